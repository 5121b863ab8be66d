"""The C++ every kernel stands on: vector types of one width, and the functions eager itself calls.

    emit_prelude(16, 4, {"exp"})  ->  namespace v16 { f32v, load, store, select }  namespace v16 { exp_ }

GCC's vector extensions, no headers: <immintrin.h> alone costs 0.3 s. Transcendental functions are the
SLEEF ones that libtorch_cpu exports, in the accuracy eager uses. The scalar overload runs the vector
function on one lane, so that a result never depends on where an element sits.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from dovetail.ir.loop import FUNCTIONS

HEAD: Final = Path(__file__).with_name("head.h").read_text()
PART: Final = Path(__file__).with_name("part.h").read_text()
VECTORS: Final = Path(__file__).with_name("vectors.h").read_text()


# One entry per function that needs text of its own: overloads for a vector V and a scalar T.
# {v} and {s} are replaced by float and double variants.
_SLEEF: Final = {
    **dict.fromkeys([name for name in FUNCTIONS if name not in ("asinh", "acosh")], ("x",)),
    **dict.fromkeys(("pow", "atan2", "hypot"), ("x", "y")),
}
_ACCURACY: Final = {"sin": "u35", "cos": "u35", "erfc": "u15", "hypot": "u05"}
"""Tenths of a unit in the last place; of the others u10."""

_UNARY: Final = {
    # body for any type T with arithmetic; `x` is the argument
    "rsqrt": "1 / sqrt_(x)",
    "reciprocal": "1 / x",
    "sigmoid": "1 / (1 + exp_(-x))",
    "frac": "x - trunc_(x)",
}
NEEDS: Final = {
    "rsqrt": ("sqrt",), "sigmoid": ("exp",), "frac": ("trunc",), "fmod": ("fma", "trunc", "abs", "copysign"),
    "floordiv": ("fmod", "floor", "copysign"), "remainder": ("fmod",), "polynomial": ("fma",),
    "exp": ("round", "polynomial", "larger", "smaller"),
    "expm1": ("exp", "copysign"), "circle": ("polynomial",), "log": ("polynomial",),
    **dict.fromkeys(("sin", "cos"), ("circle", "abs")),
    "log1p": ("log", "copysign"), "maximum": ("larger",), "minimum": ("smaller",),
    "tanh": ("exp", "abs", "copysign"),
    "erf": ("trunc", "abs", "fma", "copysign", "smaller"), "erfc": ("exp", "erf"),
}  # fmt: skip

_BY_LANE: Final = {
    # the scalar; most are vector instructions too, or GCC makes one of a loop over the lanes; SLEEF's asinh
    # and acosh overflow, the C library's do not
    "sqrt": "__builtin_sqrt{c}(x)", "floor": "__builtin_floor{c}(x)", "ceil": "__builtin_ceil{c}(x)",
    "trunc": "__builtin_trunc{c}(x)", "round": "__builtin_nearbyint{c}(x)", "abs": "__builtin_fabs{c}(x)",
    "fmod": "fmod{c}(x, y)", "copysign": "__builtin_copysign{c}(x, y)",
    "larger": "x > y ? x : y", "smaller": "x < y ? x : y", "fma": "__builtin_fma{c}(x, y, z)",
    "asinh": "__builtin_asinh{c}(x)", "acosh": "__builtin_acosh{c}(x)",
}  # fmt: skip
_PARAMETERS: Final = {
    **dict.fromkeys(("fmod", "copysign", "larger", "smaller"), "x, y"), "fma": "x, y, z",
}  # fmt: skip
_FMOD: Final = """\
    const {vector} a = abs_(x), b = abs_(y), q = a / b, m = fma_(-trunc_(q), b, a);
    const auto is_near = (q < {near}) & (b < __builtin_inff());
    int near = 0; for (int l = 0; l < L; ++l) near -= is_near[l];
    if (near == L) return copysign_(m < 0 ? m + b : m, x);
    """
"""All lanes at once where the quotient is exact but for its last digit, which may be one too large."""

_CLANG: Final = {
    "sqrt": "__builtin_elementwise_sqrt(x)", "larger": "x > y ? x : y", "smaller": "x < y ? x : y",
}  # fmt: skip
"""In place of instructions that only GCC has under their names."""
_ROUNDING: Final = {"round": 8, "floor": 9, "ceil": 10, "trunc": 11}
"""The instruction's operand; 8 means that inexact results raise no flag."""


def _instruction(name: str, vector: str, size: int) -> str | None:
    """The vector form of a function that is one instruction on this many bytes, written as such: loops
    over lanes become the same instruction, but take the compiler long."""
    single = ("ps", "i32v", "0x7fffffff")
    kind, bits, sign = single if vector == "f32v" else ("pd", "i64v", "0x7fffffffffffffff")
    if name == "abs":
        return f"INLINE {vector} abs_({vector} x) {{ return ({vector})(({bits})x & {sign}); }}"
    if name == "copysign":
        both = f"(({bits})x & {sign}) | (({bits})y & ~{sign})"
        return f"INLINE {vector} copysign_({vector} x, {vector} y) {{ return ({vector})({both}); }}"
    forms: dict[str, dict[int, str]] = {
        "fma": {64: f"vfmadd{kind}512_mask(x, y, z, -1, 4)", 32: f"vfmadd{kind}256(x, y, z)"},
        "sqrt": {64: f"sqrt{kind}512_mask(x, {vector}{{}}, -1, 4)", 32: f"sqrt{kind}256(x)"},
        "larger": {64: f"max{kind}512_mask(x, y, {vector}{{}}, -1, 4)", 32: f"max{kind}256(x, y)"},
        "smaller": {64: f"min{kind}512_mask(x, y, {vector}{{}}, -1, 4)", 32: f"min{kind}256(x, y)"},
    }
    if name in _ROUNDING:
        how = _ROUNDING[name]
        wide = f"rndscale{kind}_mask(x, {how}, {vector}{{}}, -1, 4)"
        forms[name] = {64: wide, 32: f"round{kind}256(x, {how})"}
    call = forms.get(name, {}).get(size)
    if call is None:
        return None
    params = ", ".join(f"{vector} {x}" for x in _PARAMETERS.get(name, "x").split(", "))
    made = f"return ({vector})__builtin_ia32_{call};"
    if name in _CLANG:
        made = f"\n#ifdef __clang__\n    return {_CLANG[name]};\n#else\n    {made}\n#endif\n"
    return f"INLINE {vector} {name}_({params}) {{ {made} }}"


_SINGLE: Final = {
    # exp(x) is 2**n * exp(rest). A term of a sum may be three units in the last place away.
    "exp": """\
INLINE f32v bound(f32v x, float low) { return larger_(splat<f32v>(low), smaller_(splat<f32v>(89.0f), x)); }
INLINE f32v exp_rest(f32v t, f32v& n) {
    n = round_(t * 1.44269504f);
    return fma_(n, -1.428606765330187e-06f, fma_(n, -0.693145751953125f, t));
}
INLINE f32v exp_(f32v x) {
    f32v n; const f32v r = exp_rest(bound(x, -104.5f), n);
    const f32v q = polynomial(r, 0.00138327f, 0.00837807f, 0.041668482f, 0.1666638f, 0.4999999f, 1.0f, 1.0f);
    return scaled(q, n);
}
INLINE f32v exp_term_(f32v x) {
    const f32v t = bound(x, -104.5f), n = round_(t * 1.44269504f), r = fma_(n, -0.693147182f, t);
    return scaled(polynomial(r, 0.00829484f, 0.0419349f, 0.1666772f, 0.4999872f, 0.9999996f, 1.0000001f), n);
}
""",
    "expm1": """\
INLINE f32v expm1_(f32v x) {
    f32v n; const f32v r = exp_rest(bound(x, -20.0f), n);
    const f32v q = polynomial(r, 0.00019790357328020036f, 0.001394465914927423f, 0.008333496749401093f,
                              0.04166629537940025f, 0.1666666567325592f, 0.5f);
    return copysign_(scaled(1 - scaled(splat<f32v>(1.0f), -n) + fma_(q, r * r, r), n), x);
}
""",
    **{name: f"""\
INLINE f32v {name}_(f32v x) {{
    const f32v big = fma_(x, 0.318309886f, splat<f32v>({half}f)) + 0x1.8p23f;
    const f32v y = circle(x, big - 0x1.8p23f - {half}f, big); const auto far = abs_(x) > 48000.0f;
    return __builtin_expect(any_lane(to_mask(far)), 0) ? (far ? LIBRARY(x) : y) : y;
}}
""" for name, half in (("sin", "0.0"), ("cos", "0.5"))},
    # The logarithm of x + lost, which is far smaller: n, and a polynomial between the roots of 1/2 and of 2.
    "log": """\
INLINE f32v log_sum(f32v x, f32v lost) {
    const i32v k = ((i32v)x - 0x3f3504f3) >> 23;
    const f32v n = convert<f32v>(k), f = (f32v)((i32v)x - (k << 23)) - 1 + scaled(lost, -n), s = f * f;
    const f32v q = polynomial(f, 0.06757530570030212f, -0.11694324761629105f, 0.1189352497458458f,
        -0.12403086572885513f, 0.1421855241060257f, -0.16668090224266052f, 0.2000216692686081f,
        -0.25000008940696716f, 0.3333331048488617f);
    const f32v low = fma_(s, splat<f32v>(-0.5f), fma_(q * f, s, n * 1.428606765330187e-06f));
    const f32v none = x == 0 ? splat<f32v>(-__builtin_inff()) : splat<f32v>(__builtin_nanf(""));
    return x > 0 ? (x < __builtin_inff() ? fma_(n, splat<f32v>(0.693145751953125f), f + low) : x) : none;
}
INLINE f32v log_(f32v x) {
    const auto small = x < 0x1p-126f;
    const f32v y = log_sum(small ? x * 0x1p24f : x, f32v{});
    return small ? y - 16.635532333438687f : y;
}
""",
    "log1p": "INLINE f32v log1p_(f32v x) { const f32v u = 1 + x; "
             "return copysign_(log_sum(u, x < 0x1p24f ? x - (u - 1) : f32v{}), x); }\n",
    # Within one unit in the last place: 16 polynomials, of erf(t) / t - 1 below 1 and of erf(t) above.
    "erf": """\
alignas(64) static const float erf_table[6 * 16] = {
    0.122529633f, 0.0776450932f, -0.00281458744f, -0.103914216f, 0.888388216f, 0.948170066f, 0.978443742f,
    0.99199003f, 0.997345984f, 0.999217033f, 0.999794602f, 0.999952137f, 0.999990106f, 0.999998212f,
    0.999999702f, 1.0f, -0.0931549519f, -0.259446084f, -0.373897403f, -0.424389422f, 0.318273962f,
    0.170359761f, 0.0804722533f, 0.0335458256f, 0.0123408204f, 0.00400647754f, 0.00114787533f,
    0.00029022849f, 6.47587949e-05f, 1.27517842e-05f, 2.21593359e-06f, 4.56000009e-07f, -0.365641743f,
    -0.288495898f, -0.165264875f, -0.0397303626f, -0.358055949f, -0.234245285f, -0.130771145f,
    -0.0628917366f, -0.0262274686f, -0.00950778462f, -0.00300733373f, -0.000832315593f, -0.000202927375f,
    -4.99697235e-05f, -7.2903822e-06f, -3.65000005e-06f, 0.0553780682f, 0.142986104f, 0.175346255f,
    0.151603222f, 0.162451282f, 0.157940879f, 0.114842564f, 0.0674424022f, 0.0330376737f, 0.0137305968f,
    0.00489030033f, 0.00150242599f, 0.00039996265f, 9.2560862e-05f, 1.86669495e-05f, 0.0f, 0.106025964f,
    0.0627300665f, 0.0019811755f, -0.0444301367f, 0.0281111412f, -0.0301074069f, -0.0492919423f,
    -0.042534817f, -0.0262252372f, -0.0135732824f, -0.00575007498f, -0.00200754311f, -0.000536530977f,
    0.00021064491f, -6.98295189e-05f, 0.0f, -0.0194837153f, -0.046263244f, -0.0465261117f, -0.0256107356f,
    -0.0611289106f, -0.0307837203f, -0.00233146432f, 0.0113132484f, 0.0124507388f, 0.0083562471f,
    0.00423549535f, 0.00172757334f, 0.000584265566f, 0.000166587139f, 4.04598177e-05f, 0.0f,
};
INLINE f32v erf_term(int k, i32v at) {
#ifndef __clang__
    if constexpr (L == 16) return __builtin_shuffle(load(erf_table + 16*k), at);
    if constexpr (L == 8) return __builtin_shuffle(load(erf_table + 16*k), load(erf_table + 16*k + 8), at);
#endif
    f32v v; for (int l = 0; l < L; ++l) v[l] = erf_table[16*k + (at[l] & 15)]; return v;
}
INLINE f32v erf_(f32v x) {
    const f32v a = abs_(x), t = smaller_(splat<f32v>(3.9999998f), a), n = trunc_(t * 4);
    const f32v u = fma_(n, splat<f32v>(-0.25f), t) - 0.125f;
    const i32v at = convert<i32v>(n);
    f32v v = erf_term(5, at);
#pragma GCC unroll 5
    for (int k = 4; k >= 0; --k) v = fma_(v, u, erf_term(k, at));
    return copysign_(t < 1 ? fma_(v, t, t) : v, x);
}
""",
    # exp(-x**2), with what rounding takes from the square, times a polynomial.
    "erfc": """\
INLINE f32v erfc_(f32v x) {
    const f32v a = smaller_(splat<f32v>(10.2f), abs_(x)), s = a * a;
    const f32v q = polynomial((a - 3) / (a + 3), 5.5916e-05f, 2.8881e-05f, -0.0005945695f, 0.0007157309f,
        0.0042688758f, -0.02439423f, 0.07166586f, -0.15011579f, 0.2456038f, -0.32623357f, 0.17900115f);
    const f32v y = exp_(-s) * fma_(fma_(a, a, -s), -q, q);
    return a < 0.75f ? 1 - erf_(x) : x < 0 ? 2 - y : y;
}
""",
    "tanh": """\
INLINE f32v tanh_(f32v x) {
    const f32v t = abs_(x), s = t * t;
    const f32v far = 1 - 2 / (exp_(2 * t) + 1);
    const f32v q = polynomial(s, 0.00012146899825893342f, -0.0008411302696913481f, 0.0030785829294472933f,
        -0.00859510526061058f, 0.021784726530313492f, -0.05395309627056122f, 0.1333319991827011f,
        -0.333333283662796f);
    return copysign_(t > 1.0f ? far : fma_(q * s, t, t), x);
}
""",
}

_STREAM: Final = """\
// Past the caches, where the address allows it.
template <class T, class V> INLINE void stream(T* p, V v) {
    typedef float line __attribute__((vector_size(64))), half __attribute__((vector_size(32)));
    if ((uint64_t)p % sizeof(V)) store(p, v);
#ifdef __clang__
    else __builtin_nontemporal_store(v, (V*)p);
#else
#ifdef __AVX512F__
    else if constexpr (sizeof(V) == 64) __builtin_ia32_movntps512((float*)p, (line)v);
#endif
    else __builtin_ia32_movntps256((float*)p, (half)v);
#endif
}
"""

_WHOLE: Final = {
    "stream": _STREAM,
    "integers": Path(__file__).with_name("integers.h").read_text(),
    "polynomial": """\
INLINE f32v fma_(f32v x, float y, f32v z) { return fma_(x, splat<f32v>(y), z); }
template <class... C> INLINE f32v polynomial(f32v x, float first, C... rest) {
    f32v q = splat<f32v>(first); ((q = fma_(q, x, splat<f32v>(rest))), ...); return q;
}
""",
    # The sine of x, n half turns away from zero. Far from there, too few digits of pi are taken off; they
    # are positive, and there is 0.0f, so that -0 stays what it is.
    "circle": """\
INLINE f32v circle(f32v x, f32v n, f32v signs) {
    const f32v r = fma_(n, -1.07806059e-14f, fma_(n, -1.50995788e-07f, fma_(n, -3.1415925f, x))), s = r * r;
    const f32v q = polynomial(s, 2.6049795e-06f, -0.000198092603f, 0.00833306182f, -0.166666597f, 0.0f);
    return (f32v)((i32v)fma_(q, r, r) ^ (i32v)signs << 31);
}
""",
}

_BINARY: Final = {
    # for vectors and scalars alike, where `?:` picks per lane; V is the type, x and y the arguments
    # a number that is known is no NaN: then one instruction is left
    "maximum": "x != x ? x : larger_(x, y)",
    "minimum": "x != x ? x : smaller_(x, y)",
    "fmax": "x != x ? y : (y != y ? x : (x > y ? x : y))",
    "fmin": "x != x ? y : (y != y ? x : (x < y ? x : y))",
    "remainder": "({ const auto m = fmod_(x, y); ((m != 0) & ((m < 0) ^ (y < 0))) ? m + y : m; })",
    "floordiv": "y == 0 ? x / y : ({ const auto m = fmod_(x, y), q = (x - m) / y, "
    "d = ((m != 0) & ((m < 0) ^ (y < 0))) ? q - 1 : q, f = floor_(d); "
    "d == 0 ? copysign_(d, x / y) : (2 * (d - f) > 1 ? f + 1 : f); })",
}


def _vector_types(lanes: int, widest: int) -> list[tuple[str, str, str, str]]:
    """(vector, scalar, SLEEF suffix, C suffix) of the float types in use."""
    single = ("f32v", "float", f"f{lanes}", "f")
    return [single, ("f64v", "double", f"d{lanes}", "")] if widest == 8 else [single]


def emit_function(name: str, lanes: int, widest: int) -> str:
    """Overloads of `name`_ for the float vectors and scalars."""
    if name in _WHOLE:
        return _WHOLE[name]
    out: list[str] = []
    for vector, c_type, suffix, c in _vector_types(lanes, widest):
        is_single = name in _SINGLE and c_type == "float"
        if name in _SLEEF and (lanes == 1 or not is_single):
            out += _emit_library(name, vector, c_type, suffix if lanes > 1 else "", c)
        elif is_single:
            library = f"Sleef_{name}{suffix}_u35"
            out += [_declare(library, vector, ("x",))] if "LIBRARY" in _SINGLE[name] else []
            out.append(_SINGLE[name].replace("LIBRARY", library))
            out.append(f"INLINE float {name}_(float x) {{ return {name}_(splat<f32v>(x))[0]; }}")
        else:
            out += _emit_plain(name, vector, c_type, c, lanes)
    return "\n".join(out) + "\n"


def _declare(call: str, kind: str, names: Sequence[str]) -> str:
    """SLEEF's function. What comes with torch has none of four floats: there it is one of eight."""
    eight = call.replace("f4_", "f8_")
    if eight == call:
        return f'extern "C" {kind} {call}({", ".join([kind] * len(names))});'
    lanes = ", ".join(f"eight{{{x}[0], {x}[1], {x}[2], {x}[3]}}" for x in names)
    return (
        "typedef float eight __attribute__((vector_size(32)));\n"
        f'extern "C" eight {eight}({", ".join(["eight"] * len(names))});\n'
        f"INLINE {kind} {call}({', '.join(f'{kind} {x}' for x in names)}) {{"
        f" const eight r = {eight}({lanes}); return {kind}{{r[0], r[1], r[2], r[3]}}; }}"
    )


def _emit_library(name: str, vector: str, c_type: str, suffix: str, c: str) -> list[str]:
    """SLEEF's function, and it on one lane; without a suffix for vectors, the C library's."""
    names = _SLEEF[name]
    call = f"Sleef_{name}{suffix}_{_ACCURACY.get(name, 'u10')}" if suffix else f"{name}{c}"
    kind = vector if suffix else c_type
    own = {t: ", ".join(f"{t} {x}" for x in names) for t in (kind, c_type)}
    out = [
        _declare(call, kind, names),
        f"INLINE {kind} {name}_({own[kind]}) {{ return {call}({', '.join(names)}); }}",
    ]
    if suffix:
        lanes = ", ".join(f"splat<{vector}>({x})" for x in names)
        out.append(f"INLINE {c_type} {name}_({own[c_type]}) {{ return {call}({lanes})[0]; }}")
    return out


def _emit_plain(name: str, vector: str, c_type: str, c: str, lanes: int) -> list[str]:
    names = _PARAMETERS.get(name, "x, y" if name in _BINARY else "x")
    own = {t: ", ".join(f"{t} {x}" for x in names.split(", ")) for t in (vector, c_type)}
    single = _BY_LANE.get(name, "").format(c=c)
    scalar = f"INLINE {c_type} {name}_({own[c_type]}) {{ return {single}; }}"
    direct = _instruction(name, vector, lanes * (4 if c_type == "float" else 8)) if lanes > 1 else None
    if direct is not None:
        return [direct, scalar]
    if name in _UNARY or name in _BINARY:
        body = _UNARY.get(name) or _BINARY[name]
        return [f"INLINE {t} {name}_({own[t]}) {{ return {body}; }}" for t in (vector, c_type)]
    lane = ", ".join(f"{x}[l]" for x in names.split(", "))
    at_once = _FMOD.format(vector=vector, near="0x1p22f" if c else "0x1p50") if name == "fmod" else ""
    by_lane = f"{at_once}{vector} r; for (int l = 0; l < L; ++l) r[l] = {name}_({lane}); return r;"
    return [scalar, f"INLINE {vector} {name}_({own[vector]}) {{ {by_lane} }}"]


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
    pieces = [HEAD, PART, _vectors(lanes, widest)]
    for name in wanted:
        pieces.append(f"namespace v{lanes} {{\n{emit_function(name, lanes, widest)}}}\n")
    return tuple(pieces)


_SCALE: Final = {
    64: "return (f32v)__builtin_ia32_scalefps512_mask(x, n, f32v{}, -1, 4);",
    0: "const i32v k = convert<i32v>(n), h = k >> 1; "
    "return x * (f32v)((h + 127) << 23) * (f32v)((k - h + 127) << 23);",
}
"""Bytes of a float vector -> how to scale by a power of two: one instruction, or two exact factors."""

_ANY: Final = {64: "__builtin_ia32_cvtb2mask512((bytes)m)", 32: "__builtin_ia32_pmovmskb256((bytes)m)",
               16: "__builtin_ia32_pmovmskb128((bytes)m)"}  # fmt: skip
"""Bytes of a mask -> what is not zero where any lane is set."""

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


def shuffle(a: str, b: str, places: Iterable[int]) -> str:
    """The lanes of a and b, counted through, at these places."""
    return f"__builtin_shufflevector({a}, {b}, {', '.join(map(str, places))})"


def _vectors(lanes: int, widest: int) -> str:
    numbers = ", ".join(map(str, range(lanes)))
    steps = [h for h in (1, 2, 4, 8) if h < lanes]
    every = range(lanes)
    turned = {h: shuffle("v", "v", ((k + h) % lanes for k in every)) for h in steps}
    turns = "".join(f"    case {h}: return {text};\n" for h, text in turned.items())
    swaps = "".join(
        f"    case {h}:\n"
        f"        a = {shuffle('x', 'y', (lanes + k - h if k & h else k for k in every))};\n"
        f"        b = {shuffle('x', 'y', (lanes + k if k & h else k + h for k in every))};\n"
        f"        break;\n"
        for h in steps
    )
    from_half, to_half = _HALF.get(lanes, _HALF[0])
    holes = {
        "swaps": swaps,
        "scale": _SCALE.get(lanes * 4, _SCALE[0]),
        "any": _ANY.get(lanes * widest, "m[0]"),
        # each one instruction, which g++ would take by halves
        "widen": "__builtin_ia32_cvtps2pd512_mask(v, f64v{}, -1, 4)" if (lanes, widest) == (8, 8)
        else "__builtin_convertvector(v, f64v)",
        "longer": "(u32v)__builtin_ia32_pmovzxwd512_mask((i16v)v, i32v{}, -1)" if lanes == 16
        else "__builtin_convertvector(v, u32v)",
        "from_half": from_half,
        "to_half": to_half,
        "low": shuffle("a", "b", (k // 2 + k % 2 * lanes for k in every)),
        "high": shuffle("a", "b", ((k + lanes) // 2 + (k + lanes) % 2 * lanes for k in every)),
        "second": shuffle("a", "b", (2 * k if k < lanes // 2 else 2 * k + 1 for k in every)),
        "L": str(lanes), "M": str(widest), "iota": f"i32v{{{numbers}}}", "turns": turns,
        "splat": "V{" + ", ".join(["x"] * lanes) + "}",
    }  # fmt: skip
    text = VECTORS
    for hole, filling in holes.items():
        text = text.replace(f"%({hole})s", filling)
    return text
