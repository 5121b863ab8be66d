// Before every kernel: integer types, half types, and what is needed from the C library.
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t; typedef unsigned long uint64_t;
extern "C" {
int omp_get_max_threads(); void* aligned_alloc(unsigned long, unsigned long); void free(void*);
void* memcpy(void*, const void*, unsigned long); double fmod(double, double); float fmodf(float, float);
}
#define INLINE static inline __attribute__((always_inline))
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
INLINE float as_f32(uint32_t x) { float y; memcpy(&y, &x, 4); return y; }
INLINE uint32_t as_u32(float x) { uint32_t y; memcpy(&y, &x, 4); return y; }
INLINE float to_f32(bf16 x) { return as_f32((uint32_t)x.bits << 16); }
INLINE float to_f32(f16 x) { _Float16 y; memcpy(&y, &x, 2); return (float)y; }
INLINE bf16 to_bf16(float x) {
    uint32_t b = as_u32(x);
    return {x != x ? (uint16_t)0x7fc0 : (uint16_t)((b + 0x7fff + ((b >> 16) & 1)) >> 16)};
}
INLINE f16 to_f16(float x) { _Float16 y = (_Float16)x; f16 z; memcpy(&z, &y, 2); return z; }
INLINE int64_t floordiv_i(int64_t a, int64_t b) { int64_t q = a / b; return q - ((a % b != 0) & ((a < 0) != (b < 0))); }
INLINE int64_t mod_i(int64_t a, int64_t b) { int64_t r = a % b; return r + ((r != 0) & ((r < 0) != (b < 0)) ? b : 0); }
INLINE int64_t min_i(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max_i(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t check_index(int64_t i, int64_t n, int32_t* bad) {
    if (i < -n || i >= n) { *bad = 1; return 0; }
    return i < 0 ? i + n : i;
}
