// The first n lanes of a vector of B bytes with elements of E bytes, the others zero.
template <int E> struct unit; template <> struct unit<1> { typedef char type; }; template <> struct unit<2> { typedef short type; };
template <> struct unit<4> { typedef int type; }; template <> struct unit<8> { typedef long long type; };
template <int B, int E> struct part {
    typedef typename unit<E>::type T;
    typedef T V __attribute__((vector_size(B)));
    static inline __attribute__((always_inline)) V load(const void* p, int64_t n) { V v = {}; for (int64_t l = 0; l < n; ++l) v[l] = ((const T*)p)[l]; return v; }
    template <class W> static inline __attribute__((always_inline)) void store(void* p, W w, int64_t n) {
        V v = (V)w; for (int64_t l = 0; l < n; ++l) ((T*)p)[l] = v[l];
    }
};
#if defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__GNUC__) && !defined(__clang__)
#define MASKED(B, E, BITS, LOAD, STORE) \
template <> struct part<B, E> { \
    typedef unit<E>::type T; typedef T V __attribute__((vector_size(B))); \
    static inline __attribute__((always_inline)) V load(const void* p, int64_t n) { return LOAD((const T*)p, V{}, (BITS)((1u << n) - 1)); } \
    template <class W> static inline __attribute__((always_inline)) void store(void* p, W w, int64_t n) { STORE((T*)p, (V)w, (BITS)((1u << n) - 1)); } \
};
MASKED(64, 4, unsigned short, __builtin_ia32_loaddqusi512_mask, __builtin_ia32_storedqusi512_mask)
MASKED(64, 8, unsigned char, __builtin_ia32_loaddqudi512_mask, __builtin_ia32_storedqudi512_mask)
MASKED(32, 4, unsigned char, __builtin_ia32_loaddqusi256_mask, __builtin_ia32_storedqusi256_mask)
MASKED(32, 2, unsigned short, __builtin_ia32_loaddquhi256_mask, __builtin_ia32_storedquhi256_mask)
MASKED(16, 2, unsigned char, __builtin_ia32_loaddquhi128_mask, __builtin_ia32_storedquhi128_mask)
MASKED(16, 1, unsigned short, __builtin_ia32_loaddquqi128_mask, __builtin_ia32_storedquqi128_mask)
#endif
