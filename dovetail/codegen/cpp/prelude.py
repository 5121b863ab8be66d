"""The C++ every kernel stands on: vector types of one width, and the functions eager itself calls.

    emit_prelude(16, 4, {"exp"})  ->  namespace v16 { f32v, load, store, select }  namespace v16 { exp_ }

GCC's vector extensions, no headers: <immintrin.h> alone costs 0.3 s. Transcendental functions are the
SLEEF ones that libtorch_cpu exports, in the accuracy eager uses. The scalar overload runs the vector
function on one lane, so that a result never depends on where an element sits.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Final

HEAD: Final = """\
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t; typedef unsigned long uint64_t;
extern "C" {
int omp_get_max_threads(); int omp_get_thread_num(); int omp_get_num_threads();
void* aligned_alloc(unsigned long, unsigned long); void free(void*);
void* memcpy(void*, const void*, unsigned long); void* memset(void*, int, unsigned long);
double fmod(double, double); float fmodf(float, float); double lgamma(double); double nextafter(double, double);
float nextafterf(float, float); double erf(double); double log(double); double exp(double); double sqrt(double);
double tan(double); double floor(double); double fabs(double); double cos(double);
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
"""

_PART: Final = """\
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
#define MASKED(B, E, BITS, LOAD, STORE) \\
template <> struct part<B, E> { \\
    typedef unit<E>::type T; typedef T V __attribute__((vector_size(B))); \\
    static inline __attribute__((always_inline)) V load(const void* p, int64_t n) { return LOAD((const T*)p, V{}, (BITS)((1u << n) - 1)); } \\
    template <class W> static inline __attribute__((always_inline)) void store(void* p, W w, int64_t n) { STORE((T*)p, (V)w, (BITS)((1u << n) - 1)); } \\
};
MASKED(64, 4, unsigned short, __builtin_ia32_loaddqusi512_mask, __builtin_ia32_storedqusi512_mask)
MASKED(64, 8, unsigned char, __builtin_ia32_loaddqudi512_mask, __builtin_ia32_storedqudi512_mask)
MASKED(32, 4, unsigned char, __builtin_ia32_loaddqusi256_mask, __builtin_ia32_storedqusi256_mask)
MASKED(32, 2, unsigned short, __builtin_ia32_loaddquhi256_mask, __builtin_ia32_storedquhi256_mask)
MASKED(16, 2, unsigned char, __builtin_ia32_loaddquhi128_mask, __builtin_ia32_storedquhi128_mask)
MASKED(16, 1, unsigned short, __builtin_ia32_loaddquqi128_mask, __builtin_ia32_storedquqi128_mask)
#endif
"""

VECTORS: Final = """\
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
INLINE i32v iota() { return %(iota)s; }
template <class V, class T> INLINE V splat(T x) { return %(splat)s; }
template <class T> INLINE typename vec_of<T>::type load(const T* p) { return *(const typename mem_of<T>::type*)p; }
template <class T> INLINE typename vec_of<T>::type load(const T* p, int64_t n) {
    typedef typename vec_of<T>::type V;
    return (V)part<sizeof(V), sizeof(T)>::load(p, n);
}
template <class T, class V> INLINE void store(T* p, V v) { *(typename mem_of<T>::type*)p = v; }
template <class T, class V> INLINE void store(T* p, V v, int64_t n) { part<sizeof(V), sizeof(T)>::store(p, v, n); }
INLINE bf16v load(const bf16* p) { return {load((const uint16_t*)p)}; }
INLINE bf16v load(const bf16* p, int64_t n) { return {load((const uint16_t*)p, n)}; }
INLINE void store(bf16* p, bf16v v) { store((uint16_t*)p, v.bits); }
INLINE void store(bf16* p, bf16v v, int64_t n) { store((uint16_t*)p, v.bits, n); }
INLINE f16v load(const f16* p) { return {load((const uint16_t*)p)}; }
INLINE f16v load(const f16* p, int64_t n) { return {load((const uint16_t*)p, n)}; }
INLINE void store(f16* p, f16v v) { store((uint16_t*)p, v.bits); }
INLINE void store(f16* p, f16v v, int64_t n) { store((uint16_t*)p, v.bits, n); }
template <class W, class V> INLINE W convert(V v) { return __builtin_convertvector(v, W); }
template <class C> INLINE mask to_mask(C c) { return __builtin_convertvector(c, mask); }
INLINE mask load_mask(const bool* p) { return to_mask(load((const int8_t*)p) != 0); }
INLINE mask load_mask(const bool* p, int64_t n) { return to_mask(load((const int8_t*)p, n) != 0); }
INLINE void store_mask(bool* p, mask v) { store((int8_t*)p, convert<i8v>(-v)); }
INLINE void store_mask(bool* p, mask v, int64_t n) { store((int8_t*)p, convert<i8v>(-v), n); }
INLINE mask first(int64_t n) { return to_mask(iota() < splat<i32v>((int32_t)n)); }
template <class V> INLINE V select(mask m, V a, V b) {
    typedef typename vec_of<typename int_of<sizeof(a[0])>::type>::type I;
    return convert<I>(m) ? a : b;
}
INLINE mask select(mask m, mask a, mask b) { return (m & a) | (~m & b); }
INLINE bool any_lane(mask m) { bool r = false; for (int l = 0; l < L; ++l) r |= m[l] != 0; return r; }
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
"""

# One entry per function that needs text of its own: overloads for a vector V and a scalar T.
# {v} and {s} are replaced by float and double variants.
_SLEEF: Final = {
    "exp": "exp{p}_u10", "exp2": "exp2{p}_u10", "expm1": "expm1{p}_u10", "log": "log{p}_u10", "log2": "log2{p}_u10",
    "log10": "log10{p}_u10", "log1p": "log1p{p}_u10", "sin": "sin{p}_u35", "cos": "cos{p}_u35", "tan": "tan{p}_u10",
    "asin": "asin{p}_u10", "acos": "acos{p}_u10", "atan": "atan{p}_u10", "sinh": "sinh{p}_u10", "cosh": "cosh{p}_u10",
    "tanh": "tanh{p}_u10", "asinh": "asinh{p}_u10", "acosh": "acosh{p}_u10", "atanh": "atanh{p}_u10",
    "erf": "erf{p}_u10", "erfc": "erfc{p}_u15", "lgamma": "lgamma{p}_u10",
}  # fmt: skip
_SLEEF2: Final = {"pow": "pow{p}_u10", "atan2": "atan2{p}_u10", "hypot": "hypot{p}_u05"}

_UNARY: Final = {
    # body for any type T with arithmetic; `x` is the argument
    "rsqrt": "1 / sqrt_(x)",
    "reciprocal": "1 / x",
    "sigmoid": "1 / (1 + exp_(-x))",
    "frac": "x - trunc_(x)",
}
NEEDS: Final = {
    "rsqrt": ("sqrt",), "sigmoid": ("exp",), "frac": ("trunc",), "floordiv": ("fmod", "floor", "copysign"),
    "remainder": ("fmod",), "truncdiv": ("trunc",), "erfinv": (), "i1e": ("i1",), "i0e": ("i0",), "ndtri": ("erfinv",),
}  # fmt: skip

_LANES: Final = {
    # float functions GCC expands lane by lane into one vector instruction
    "sqrt": "__builtin_sqrt{c}", "floor": "__builtin_floor{c}", "ceil": "__builtin_ceil{c}",
    "trunc": "__builtin_trunc{c}", "round": "__builtin_nearbyint{c}", "abs": "__builtin_fabs{c}",
}  # fmt: skip

_OWN: Final = {
    "digamma": """\
INLINE double digamma1(double x) {
    if (x == 0) return __builtin_copysign(__builtin_inf(), -x);
    double result = 0;
    if (x < 0) {
        if (x == floor(x)) return __builtin_nan("");
        double f = x - floor(x);
        result = -3.14159265358979323846 / tan(3.14159265358979323846 * f);
        x = 1 - x;
    }
    while (x < 10) { result -= 1 / x; x += 1; }
    double r = 1 / (x * x);
    return result + log(x) - 0.5 / x
        - r * (1. / 12 - r * (1. / 120 - r * (1. / 252 - r * (1. / 240 - r * (1. / 132 - r * (691. / 32760 - r / 12))))));
}
""",
    "erfinv": """\
INLINE double erfinv1(double y) {
    if (!(y >= -1 && y <= 1)) return __builtin_nan("");
    if (y == 1 || y == -1) return __builtin_copysign(__builtin_inf(), y);
    double w = log((1 - y) * (1 + y)), a = 0.147, t = 2 / (3.14159265358979323846 * a) + w / 2;
    double x = __builtin_copysign(sqrt(sqrt(t * t - w / a) - t), y);
    for (int k = 0; k < 3; ++k) {
        double e = (erf(x) - y) / (1.12837916709551257390 * exp(-x * x));
        x -= e / (1 + x * e);
    }
    return y == 0 ? y : x;
}
""",
    "ndtri": """\
INLINE double ndtri1(double p) { return 1.41421356237309504880 * erfinv1(2 * p - 1); }
""",
    "i0": """\
INLINE double bessel_i(double x, int order, bool scaled) {
    double a = fabs(x), sum, term;
    if (a < 30) {
        term = order ? a / 2 : 1; sum = term;
        for (int k = 1; k < 200 && term > sum * 1e-18; ++k) { term *= (a * a / 4) / (k * (double)(k + order)); sum += term; }
        if (scaled) sum *= exp(-a);
    } else {
        double mu = 4.0 * order * order; term = 1; sum = 1;
        for (int k = 1; k < 30; ++k) {
            double next = term * -(mu - (2 * k - 1) * (2.0 * k - 1)) / (k * 8 * a);
            if (fabs(next) >= fabs(term)) break;
            term = next; sum += term;
        }
        sum /= sqrt(2 * 3.14159265358979323846 * a);
        if (!scaled) sum *= exp(a / 2) * 1.0 * exp(a / 2);
    }
    return order && x < 0 ? -sum : sum;
}
INLINE double i01(double x) { return bessel_i(x, 0, false); }
""",
    "i0e": "INLINE double i0e1(double x) { return bessel_i(x, 0, true); }\n",
    "i1": "INLINE double i11(double x) { return bessel_i(x, 1, false); }\n",
    "i1e": "INLINE double i1e1(double x) { return bessel_i(x, 1, true); }\n",
}
NEEDS.update({"i0e": ("i0",), "i1": ("i0",), "i1e": ("i0",)})

_SINGLE: Final = {
    "exp": """\
INLINE f32v exp_(f32v x) {
    f32v t = x > 89.0f ? splat<f32v>(89.0f) : x;
    t = t < -104.5f ? splat<f32v>(-104.5f) : t;
    const f32v n = round_(t * 1.44269504f);
    const f32v r = fma_(n, splat<f32v>(-1.428606765330187e-06f), fma_(n, splat<f32v>(-0.693145751953125f), t));
    f32v q = splat<f32v>(0.00019790357328020036f);
    q = fma_(q, r, splat<f32v>(0.001394465914927423f));
    q = fma_(q, r, splat<f32v>(0.008333496749401093f));
    q = fma_(q, r, splat<f32v>(0.04166629537940025f));
    q = fma_(q, r, splat<f32v>(0.1666666567325592f));
    q = fma_(q, r, splat<f32v>(0.5f));
    q = 1 + fma_(q, r * r, r);
    return scaled(q, n);
}
""",
    # Faster than SLEEF's and within one unit in the last place; the polynomials are least-squares fits.
    "erf": """\
INLINE f32v erf_(f32v x) {
    const f32v a = abs_(x), t = a > 4 ? splat<f32v>(4.0f) : a, s = t * t;
    f32v far = splat<f32v>(-2.113087930410984e-06f);
    far = fma_(far, t, splat<f32v>(3.393791848793626e-05f));
    far = fma_(far, t, splat<f32v>(-0.0002155449183192104f));
    far = fma_(far, t, splat<f32v>(0.0005061763804405928f));
    far = fma_(far, t, splat<f32v>(0.0018208149122074246f));
    far = fma_(far, t, splat<f32v>(-0.021289324387907982f));
    far = fma_(far, t, splat<f32v>(0.10420630872249603f));
    far = fma_(far, t, splat<f32v>(0.6360758543014526f));
    far = fma_(far, t, splat<f32v>(1.128469467163086f));
    far = 1 - exp_(-(far * t));
    f32v near = splat<f32v>(8.185085607692599e-05f);
    near = fma_(near, s, splat<f32v>(-0.0008097701356746256f));
    near = fma_(near, s, splat<f32v>(0.005196951795369387f));
    near = fma_(near, s, splat<f32v>(-0.026857705786824226f));
    near = fma_(near, s, splat<f32v>(0.11283663660287857f));
    near = fma_(near, s, splat<f32v>(-0.37612631916999817f));
    near = fma_(near, s, splat<f32v>(0.12837916612625122f));
    near = fma_(near, t, t);
    return copysign_(t > 0.95f ? far : near, x);
}
""",
    "tanh": """\
INLINE f32v tanh_(f32v x) {
    const f32v t = abs_(x), s = t * t;
    const f32v far = 1 - 2 / (exp_(2 * t) + 1);
    f32v near = splat<f32v>(0.00012146899825893342f);
    near = fma_(near, s, splat<f32v>(-0.0008411302696913481f));
    near = fma_(near, s, splat<f32v>(0.0030785829294472933f));
    near = fma_(near, s, splat<f32v>(-0.00859510526061058f));
    near = fma_(near, s, splat<f32v>(0.021784726530313492f));
    near = fma_(near, s, splat<f32v>(-0.05395309627056122f));
    near = fma_(near, s, splat<f32v>(0.1333319991827011f));
    near = fma_(near, s, splat<f32v>(-0.333333283662796f));
    near = fma_(near * s, t, t);
    return copysign_(t > 1.0f ? far : near, x);
}
""",
}
NEEDS.update({"exp": ("round", "fma"), "erf": ("exp", "abs", "fma", "copysign"), "tanh": ("exp", "abs", "fma", "copysign")})

_BINARY: Final = {
    # for vectors and scalars alike, where `?:` picks per lane; V is the type, x and y the arguments
    "maximum": "x != x ? x : (y != y ? y : (x > y ? x : y))",
    "minimum": "x != x ? x : (y != y ? y : (x < y ? x : y))",
    "fmax": "x != x ? y : (y != y ? x : (x > y ? x : y))",
    "fmin": "x != x ? y : (y != y ? x : (x < y ? x : y))",
}
_INTEGER_BINARY: Final = {"maximum": "x > y ? x : y", "minimum": "x < y ? x : y"}


def _vector_types(lanes: int, widest: int) -> list[tuple[str, str, str, str]]:
    """(vector, scalar, SLEEF suffix, C suffix) of the float types in use."""
    single = ("f32v", "float", f"f{lanes}", "f")
    return [single, ("f64v", "double", f"d{lanes}", "")] if widest == 8 else [single]


def emit_function(name: str, lanes: int, widest: int) -> str:
    """Overloads of `name`_ for the float vectors and scalars."""
    out: list[str] = []
    for vector, c_type, suffix, c in _vector_types(lanes, widest):
        if lanes == 1 and (name in _SLEEF or name in _SLEEF2):
            out += _emit_libm(name, c_type, c)
        elif name in _SINGLE and c_type == "float":
            out.append(_SINGLE[name])
            out.append(f"INLINE float {name}_(float x) {{ return {name}_(splat<f32v>(x))[0]; }}")
        elif name in _SLEEF:
            call = "Sleef_" + _SLEEF[name].format(p=suffix)
            out.append(f'extern "C" {vector} {call}({vector});')
            out.append(f"INLINE {vector} {name}_({vector} x) {{ return {call}(x); }}")
            out.append(f"INLINE {c_type} {name}_({c_type} x) {{ return {call}(splat<{vector}>(x))[0]; }}")
        elif name in _SLEEF2:
            call = "Sleef_" + _SLEEF2[name].format(p=suffix)
            out.append(f'extern "C" {vector} {call}({vector}, {vector});')
            out.append(f"INLINE {vector} {name}_({vector} x, {vector} y) {{ return {call}(x, y); }}")
            out.append(
                f"INLINE {c_type} {name}_({c_type} x, {c_type} y) "
                f"{{ return {call}(splat<{vector}>(x), splat<{vector}>(y))[0]; }}"
            )
        else:
            out += _emit_plain(name, vector, c_type, c)
    return "\n".join(out) + "\n"


def _emit_libm(name: str, c_type: str, c: str) -> list[str]:
    """Without vectors, the C library's function."""
    kinds, names = (c_type, "x") if name in _SLEEF else (f"{c_type}, {c_type}", "x, y")
    params = ", ".join(f"{c_type} {x}" for x in names.split(", "))
    return [
        f'extern "C" {c_type} {name}{c}({kinds});',
        f"INLINE {c_type} {name}_({params}) {{ return {name}{c}({names}); }}",
    ]


def _emit_plain(name: str, vector: str, c_type: str, c: str) -> list[str]:
    each = "for (int l = 0; l < L; ++l)"
    if name in _UNARY:
        body = _UNARY[name]
        return [f"INLINE {t} {name}_({t} x) {{ return {body}; }}" for t in (vector, c_type)]
    if name in _LANES:
        call = _LANES[name].format(c=c)
        return [
            f"INLINE {c_type} {name}_({c_type} x) {{ return {call}(x); }}",
            f"INLINE {vector} {name}_({vector} x) {{ {vector} y; {each} y[l] = {call}(x[l]); return y; }}",
        ]
    if name in _BINARY:
        return [f"INLINE {t} {name}_({t} x, {t} y) {{ return {_BINARY[name]}; }}" for t in (vector, c_type)]
    if name in _OWN:
        return [
            f"INLINE {c_type} {name}_({c_type} x) {{ return ({c_type}){name}1(x); }}",
            f"INLINE {vector} {name}_({vector} x) {{ {vector} y; {each} y[l] = ({c_type}){name}1(x[l]); return y; }}",
        ]
    return [text.format(T=c_type, V=vector, c=c, each=each) for text in _TWO[name]]


_TWO: Final = {
    "fmod": (
        "INLINE {T} fmod_({T} x, {T} y) {{ return fmod{c}(x, y); }}",
        "INLINE {V} fmod_({V} x, {V} y) {{ {V} z; {each} z[l] = fmod{c}(x[l], y[l]); return z; }}",
    ),
    "nextafter": (
        "INLINE {T} nextafter_({T} x, {T} y) {{ return nextafter{c}(x, y); }}",
        "INLINE {V} nextafter_({V} x, {V} y) {{ {V} z; {each} z[l] = nextafter{c}(x[l], y[l]); return z; }}",
    ),
    "copysign": (
        "INLINE {T} copysign_({T} x, {T} y) {{ return __builtin_copysign{c}(x, y); }}",
        "INLINE {V} copysign_({V} x, {V} y) {{ {V} z; {each} z[l] = __builtin_copysign{c}(x[l], y[l]); return z; }}",
    ),
    "fma": (
        "INLINE {T} fma_({T} x, {T} y, {T} z) {{ return __builtin_fma{c}(x, y, z); }}",
        "INLINE {V} fma_({V} x, {V} y, {V} z) {{ {V} w; {each} w[l] = __builtin_fma{c}(x[l], y[l], z[l]); return w; }}",
    ),
    "remainder": (
        "INLINE {T} remainder_({T} x, {T} y) {{ {T} m = fmod_(x, y); return m != 0 && (m < 0) != (y < 0) ? m + y : m; }}",
        "INLINE {V} remainder_({V} x, {V} y) {{ {V} m = fmod_(x, y); return ((m != 0) & ((m < 0) ^ (y < 0))) ? m + y : m; }}",
    ),
    "truncdiv": (
        "INLINE {T} truncdiv_({T} x, {T} y) {{ return trunc_(x / y); }}",
        "INLINE {V} truncdiv_({V} x, {V} y) {{ return trunc_(x / y); }}",
    ),
    "floordiv": (
        "INLINE {T} floordiv_({T} x, {T} y) {{\n"
        "    if (y == 0) return x / y;\n"
        "    {T} m = fmod_(x, y), d = (x - m) / y;\n"
        "    if (m != 0 && (m < 0) != (y < 0)) d -= 1;\n"
        "    if (d == 0) return copysign_(({T})0, x / y);\n"
        "    {T} f = floor_(d);\n"
        "    return d - f > ({T})0.5 ? f + 1 : f;\n"
        "}}",
        "INLINE {V} floordiv_({V} x, {V} y) {{ {V} z; {each} z[l] = floordiv_(x[l], y[l]); return z; }}",
    ),
}

_INTEGER: Final = """\
template <class T> INLINE T idiv(T x, T y) { return y == 0 ? (T)0 : (T)-1 < 0 && y == (T)-1 ? (T)(0 - x) : (T)(x / y); }
template <class T> INLINE T floordiv_(T x, T y) { T q = idiv(x, y), r = x - q * y; return q - (T)(r != 0 && (r < 0) != (y < 0)); }
template <class T> INLINE T truncdiv_(T x, T y) { return idiv(x, y); }
template <class T> INLINE T remainder_(T x, T y) { T r = x - idiv(x, y) * y; return r != 0 && (r < 0) != (y < 0) ? (T)(r + y) : r; }
template <class T> INLINE T fmod_(T x, T y) { return x - idiv(x, y) * y; }
template <class T> INLINE T pow_(T x, T n) {
    if (n < 0) return x == 1 ? 1 : x == (T)-1 ? (n % 2 ? -1 : 1) : 0;
    T r = 1; while (n) { if (n & 1) r *= x; x *= x; n /= 2; } return r;
}
template <class T> INLINE T shl_(T x, T n) { return n < 0 || n >= (T)(sizeof(T) * 8) ? 0 : (T)(x << n); }
template <class T> INLINE T shr_(T x, T n) { return n < 0 || n >= (T)(sizeof(T) * 8) ? (x < 0 ? (T)-1 : (T)0) : (T)(x >> n); }
"""
_INTEGER_LANES: Final = ("floordiv", "truncdiv", "remainder", "fmod", "pow", "shl", "shr")


def emit_prelude(lanes: int, widest: int, functions: Iterable[str]) -> tuple[str, ...]:
    """Pieces of text for vectors of `lanes` lanes, elements of at most `widest` bytes, with these
    functions. Kernels with different needs share equal pieces."""
    wanted: dict[str, None] = {}

    def want(name: str) -> None:
        for other in NEEDS.get(name, ()):
            want(other)
        wanted.setdefault(name)

    for name in sorted(functions):
        want(name)
    pieces = [HEAD, _PART, _vectors(lanes, widest)]
    for name in wanted:
        own = _emit_integer(name[4:]) if name.startswith("int:") else emit_function(name, lanes, widest)
        if name in _OWN:
            pieces.append(_OWN[name])
        pieces.append(f"namespace v{lanes} {{\n{own}}}\n")
    return tuple(pieces)


_SCALE: Final = {
    64: "return (f32v)__builtin_ia32_scalefps512_mask(x, n, f32v{}, -1, 4);",
    0: "const i32v k = convert<i32v>(n), h = k >> 1; return x * (f32v)((h + 127) << 23) * (f32v)((k - h + 127) << 23);",
}
"""Bytes of a float vector -> how to scale by a power of two: one instruction, or two exact factors."""

_HALF: Final = {
    16: (
        "return (f32v)__builtin_ia32_vcvtph2ps512_mask((i16v)x.bits, f32v{}, -1, 4);",
        "return {(u16v)__builtin_ia32_vcvtps2ph512_mask(x, 0, i16v{}, -1)};",
    ),
    8: (
        "return (f32v)__builtin_ia32_vcvtph2ps256((i16v)x.bits);",
        "return {(u16v)__builtin_ia32_vcvtps2ph256(x, 0)};",
    ),
    0: (
        "f32v y; for (int l = 0; l < L; ++l) y[l] = to_f32(f16{x.bits[l]}); return y;",
        "f16v y; for (int l = 0; l < L; ++l) y.bits[l] = to_f16(x[l]).bits; return y;",
    ),
}
"""Lanes -> conversions from and to half precision by one instruction; 0 is for any number of lanes."""


def _ints(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


def _vectors(lanes: int, widest: int) -> str:
    numbers = ", ".join(map(str, range(lanes)))
    turns = "".join(
        f"    case {h}: return __builtin_shufflevector(v, v, {', '.join(str((k + h) % lanes) for k in range(lanes))});\n"
        for h in (1, 2, 4, 8)
        if h < lanes
    )
    swaps = "".join(
        f"    case {h}: a = __builtin_shufflevector(x, y, {_ints((lanes + k - h) if k & h else k for k in range(lanes))}); "
        f"b = __builtin_shufflevector(x, y, {_ints((lanes + k) if k & h else k + h for k in range(lanes))}); break;\n"
        for h in (1, 2, 4, 8)
        if h < lanes
    )
    from_half, to_half = _HALF.get(lanes, _HALF[0])
    holes = {
        "swaps": swaps,
        "scale": _SCALE.get(lanes * 4, _SCALE[0]),
        "from_half": from_half,
        "to_half": to_half,
        "L": str(lanes), "M": str(widest), "iota": f"i32v{{{numbers}}}", "turns": turns,
        "splat": "V{" + ", ".join(["x"] * lanes) + "}",
    }  # fmt: skip
    text = VECTORS
    for hole, filling in holes.items():
        text = text.replace(f"%({hole})s", filling)
    return text


def _emit_integer(name: str) -> str:
    if name == "base":
        return _INTEGER
    vectors = ("i8v", "i16v", "i32v", "i64v", "u8v", "u16v", "u32v", "u64v")
    if name in _INTEGER_BINARY:
        body = _INTEGER_BINARY[name]
        scalars = ("int8_t", "int16_t", "int32_t", "int64_t", "uint8_t", "uint16_t", "uint32_t", "uint64_t")
        return "".join(f"INLINE {t} {name}_({t} x, {t} y) {{ return {body}; }}\n" for t in (*vectors, *scalars))
    return "".join(
        f"INLINE {v} {name}_({v} x, {v} y) {{ {v} z; for (int l = 0; l < L; ++l) z[l] = {name}_(x[l], y[l]); return z; }}\n"
        for v in vectors
    )
