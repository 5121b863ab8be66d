// Vectors of L lanes. The holes are filled in by prelude.py.
namespace v%(L)s {
enum { L = %(L)s };
template <class T> struct vec_of { typedef T type __attribute__((vector_size(sizeof(T) * L))); };
template <class T> struct mem_of { typedef T type __attribute__((vector_size(sizeof(T) * L), aligned(1), may_alias)); };
template <int N> struct int_of; template <> struct int_of<1> { typedef int8_t type; };
template <> struct int_of<2> { typedef int16_t type; }; template <> struct int_of<4> { typedef int32_t type; };
template <> struct int_of<8> { typedef int64_t type; };
typedef vec_of<float>::type f32v; typedef vec_of<double>::type f64v;
typedef vec_of<int8_t>::type i8v; typedef vec_of<int16_t>::type i16v;
typedef vec_of<int32_t>::type i32v; typedef vec_of<int64_t>::type i64v;
typedef vec_of<uint8_t>::type u8v; typedef vec_of<uint16_t>::type u16v;
typedef vec_of<uint32_t>::type u32v; typedef vec_of<uint64_t>::type u64v;
typedef vec_of<int_of<%(M)s>::type>::type mask;   // a bool per lane: 0 or -1
struct bf16v { u16v bits; };
struct f16v { u16v bits; };
template <> struct vec_of<bf16> { typedef bf16v type; };
template <> struct vec_of<f16> { typedef f16v type; };
template <> struct vec_of<bool> { typedef mask type; };
INLINE i32v iota() { return %(iota)s; }
template <class V, class T> INLINE V splat(T x) { return %(splat)s; }
template <class T> INLINE typename vec_of<T>::type load(const T* p) { return *(const typename mem_of<T>::type*)p; }
template <class T> INLINE typename vec_of<T>::type load(const T* p, int64_t n) {
    typedef typename vec_of<T>::type V;
    return (V)part<sizeof(V), sizeof(T)>::load(p, n);
}
template <class T, class V> INLINE void store(T* p, V v) { *(typename mem_of<T>::type*)p = v; }
template <class T, class V> INLINE void store(T* p, V v, int64_t n) { part<sizeof(V), sizeof(T)>::store(p, v, n); }
// Every second element, none beyond the last one used.
template <class T> INLINE typename vec_of<T>::type load_second(const T* p) { auto a = load(p), b = load(p + (L - 1)); return %(second)s; }
// Elements of two vectors in turns.
template <class T, class V> INLINE void store_both(T* p, V a, V b) { store(p, %(low)s); store(p + L, %(high)s); }
// The same of half types, which are structures around their bits.
#define HALF(T, V) \
INLINE V load(const T* p) { return {load((const uint16_t*)p)}; } \
INLINE V load(const T* p, int64_t n) { return {load((const uint16_t*)p, n)}; } \
INLINE V load_second(const T* p) { return {load_second((const uint16_t*)p)}; } \
INLINE void store(T* p, V v) { store((uint16_t*)p, v.bits); } \
INLINE void store(T* p, V v, int64_t n) { store((uint16_t*)p, v.bits, n); } \
INLINE void store_both(T* p, V a, V b) { store_both((uint16_t*)p, a.bits, b.bits); }
HALF(bf16, bf16v) HALF(f16, f16v)
#undef HALF
// Between small and large types through 32 bits, and from bytes that are loaded: GCC would go lane by lane.
template <class W, class V> INLINE W convert(V v) {
#ifndef __clang__
    if constexpr (sizeof(v[0]) == 1 && sizeof(v) >= 8) asm("" : "+v"(v));
#endif
    if constexpr ((sizeof(v[0]) < 4) == (sizeof(W{}[0]) < 4)) return __builtin_convertvector(v, W);
    else return __builtin_convertvector(__builtin_convertvector(v, i32v), W);
}
template <> inline __attribute__((always_inline)) f64v convert<f64v>(f32v v) { return %(widen)s; }
#ifndef __clang__
template <> inline __attribute__((always_inline)) u32v convert<u32v>(u16v v) { return %(longer)s; }
#endif
template <class C> INLINE mask to_mask(C c) { return __builtin_convertvector(c, mask); }
INLINE mask load(const bool* p) { return to_mask(load((const int8_t*)p) != 0); }
INLINE mask load(const bool* p, int64_t n) { return to_mask(load((const int8_t*)p, n) != 0); }
INLINE void store(bool* p, mask v) { store((int8_t*)p, convert<i8v>(-v)); }
INLINE void store(bool* p, mask v, int64_t n) { store((int8_t*)p, convert<i8v>(-v), n); }
INLINE mask first(int64_t n) { return to_mask(iota() < splat<i32v>((int32_t)n)); }
template <class V> INLINE V select(mask m, V a, V b) {
    typedef typename vec_of<typename int_of<sizeof(a[0])>::type>::type I;
    return convert<I>(m) ? a : b;
}
INLINE mask select(mask m, mask a, mask b) { return (m & a) | (~m & b); }
INLINE bool any_lane(mask m) { typedef char bytes __attribute__((vector_size(sizeof(mask)))); return %(any)s != 0; }
INLINE f32v to_f32v(bf16v x) { return (f32v)(convert<u32v>(x.bits) << 16); }
INLINE f32v to_f32v(f16v x) { %(from_half)s }
INLINE bf16v to_bf16v(f32v x) {
    u32v b = (u32v)x, r = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
    return {convert<u16v>(x != x ? splat<u32v>(0x7fc0u) : r)};
}
INLINE f16v to_f16v(f32v x) { %(to_half)s }
template <class V> INLINE V vfloordiv_i(V a, V b) { V z; for (int l = 0; l < L; ++l) z[l] = floordiv_i(a[l], b[l]); return z; }
template <class V> INLINE V vmod_i(V a, V b) { V z; for (int l = 0; l < L; ++l) z[l] = mod_i(a[l], b[l]); return z; }
INLINE i64v check_index(i64v i, i64v n, int64_t count, int32_t* bad) {
    i64v z = {};
    for (int64_t l = 0; l < count; ++l) z[l] = ::check_index((int64_t)i[l], (int64_t)n[l], bad);
    return z;
}
INLINE f32v scaled(f32v x, f32v n) { %(scale)s }   // x * 2**n, rounded once
INLINE f32v mantissa(f32v x, f32v& n) { %(mantissa)s }
template <int h, class V> INLINE void swap_blocks(V& a, V& b) {
    const V x = a, y = b;
    switch (h) {
%(swaps)s    }
}
template <int h, class V> INLINE void transpose_by(V* rows) {
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) if (!(i & h)) swap_blocks<h>(rows[i], rows[i + h]);
}
// L rows of L elements each, turned around the diagonal in registers.
template <class V> INLINE void transpose(V* rows) {
    if (L > 1) transpose_by<1>(rows);
    if (L > 2) transpose_by<2>(rows);
    if (L > 4) transpose_by<4>(rows);
    if (L > 8) transpose_by<8>(rows);
}
template <int h, class V> INLINE V turned(V v) {
    switch (h) {
%(turns)s    default: return v;
    }
}
}
