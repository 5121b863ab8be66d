"""The C++ every kernel stands on: vector types of one width, and the functions eager itself calls.

    emit_prelude(16, 4, {"exp"})  ->  namespace v16 { f32v, load, store, select }  namespace v16 { exp_ }

GCC's vector extensions, no headers: <immintrin.h> alone costs 0.3 s. Transcendental functions are the
SLEEF ones that libtorch_cpu exports, in the accuracy eager uses. The scalar overload runs the vector
function on one lane, so that a result never depends on where an element sits.
"""
from __future__ import annotations

import struct
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
    "floordiv": ("fmod", "floor", "copysign"), "remainder": ("fmod",),
    **dict.fromkeys(("polynomial", "pieces"), ("fma",)),
    "exp": ("round", "polynomial", "larger", "smaller"),
    "expm1": ("exp", "copysign"), "circle": ("polynomial",), "log": ("polynomial", "pieces", "larger"),
    **dict.fromkeys(("sin", "cos"), ("circle", "abs")),
    "log1p": ("log", "copysign"), "log2": ("log",), "log10": ("log",), "maximum": ("larger",),
    "minimum": ("smaller",), "tanh": ("pieces", "abs", "copysign", "smaller"),
    "erf": ("trunc", "pieces", "abs", "copysign", "smaller"), "erfc": ("exp", "erf"),
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


def _table(name: str, bits: str) -> str:
    """An array of floats, given by their bits."""
    numbers = ", ".join(f"{number:.9g}" for (number,) in struct.iter_unpack(">f", bytes.fromhex(bits)))
    return f"alignas(64) static const float {name}_table[] = {{{numbers}}};\n"


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
    # The logarithm of x + lost, which is far smaller, to any base: of a power of two, of the nearest of 16
    # numbers (such that floats hold it almost exactly), and of the rest, by a polynomial.
    "log": _table("log", """
    3f8000003f69fc1d3f5da86f3f5234e63f47f87c3f3e61a13f363e113f2e2f7d3fa7431a3fa08bd83f9aba003f94eeba3f8fc0f7
    3f8afc523f8656e63f800000000000003db8289d3e137fc23e49d1063e7cef5f3e97a0bd3eadff723ec52624be88f9f0be67fd38
    be422e27be1b1924bdedb6f7bda8a202bd45ffa900000000
""") + """\
INLINE f32v log_to(float high, float low, float factor, f32v x, f32v lost = f32v{}) {
    f32v n; const f32v m = mantissa(x, n);
    const i32v at = (i32v)m >> 19;
    const f32v inverse = piece(log_table, at), beside = scaled(lost, -larger_(splat<f32v>(-127.0f), n));
    const f32v r = fma_(beside, inverse, fma_(m, inverse, splat<f32v>(-1.0f)));
    const f32v q = polynomial(r, 0.189730409f, -0.250161899f, 0.333345169f, -0.499999964f);
    const f32v near = fma_(piece(log_table + 16, at), factor, n * low);
    return fma_(n, high, fma_(fma_(q, r * r, r), factor, near));
}
INLINE f32v log_(f32v x, f32v lost = f32v{}) { return log_to(0.693145752f, 1.42860677e-06f, 1.0f, x, lost); }
""",
    "log2": "INLINE f32v log2_(f32v x) { return log_to(0x1.ffep-1f, 0x1p-12f, 1.44269504f, x); }\n",
    "log10": "INLINE f32v log10_(f32v x) { return log_to(0x1.344p-2f, 4.60503898e-06f, 0.434294492f, x); }\n",
    "log1p": "INLINE f32v log1p_(f32v x) { const f32v u = 1 + x; "
             "return copysign_(log_(u, x < 0x1p24f ? x - (u - 1) : f32v{}), x); }\n",
    # Within one unit in the last place: 16 polynomials, of erf(t) / t - 1 below 1 and of erf(t) above.
    "erf": _table("erf", """
    3dfaf0d13d9f0464bb3874f1bdd4d0fa3f636d693f72bb463f7a7b4a3f7df30f3f7f52113f7fccb03f7ff28a3f7ffcdd3f7fff5a
    3f7fffe23f7ffffb3f800000bdbec806be84d61ebebf6f7bbed949923ea2f4ce3e2e72ca3da4cea33d0967593c4a31273b8348c5
    3a96744e399829cf3887cf1d3755f07f3614b57334f4d02abebb3565be93b5bcbe293b32bd22bc4ebeb7531cbe6fddffbe05e8df
    bd80cd62bcd6dafdbc1bc68abb4516b0ba5a2fc1b954c8e7b8519695b6f49fe8b674f2863d62d41d3e126af33e338df83e1b3de0
    3e2659a13e21bb413deb32943d8a1f3e3d0752833c60f64c3ba03ed03ac4ed0d39d1b21438c21d3c379c96f8000000003dd92424
    3d80789f3b01d69cbd35fc603ce64956bcf6a3cfbd49e659bd2e38fdbcd6d64fbc5e6279bbbc6b20bb0390fcba0ca5fc395ce090
    b892717000000000bc9f9c50bd3d7e87bd3e922abcd1cd9bbd7a624fbcfc2e24bb18cb7b3c395b343c4bfe2f3c08e8a43b8ac9e9
    3ae26fbe3a192966392eade53829b36600000000
""") + """\
INLINE f32v erf_(f32v x) {
    const f32v a = abs_(x), t = smaller_(splat<f32v>(3.9999998f), a), n = trunc_(t * 4);
    const f32v v = pieces(erf_table, convert<i32v>(n), fma_(n, splat<f32v>(-0.25f), t) - 0.125f);
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
    # The same of tanh; the pieces are those between quarters of powers of two, 5/8 further on.
    "tanh": _table("tanh", """
    3f613c523f743c4f3f7b9bbb3f7e60263f7f66b63f7feb3c3f7ffd303f7fff9f3f7ffff32ed2bb45bba99b51bca68159bd35c817
    bde6b0093f3433283f4f2e5b3e6755033db7e8ee3d0b55a83c4f4dba3b99087f3a25df4b38b67a88372f7cf335adda93b36df729
    bda88daebe227265be657bdcbe9fb1d53f0128543eb0a7d6be4ba8ccbdaf8382bd0902b8bc4e80f0bb97b249ba23a58cb8c7efd4
    b61fae8eb4e3e8d3beaaa9fcbea45d89be929a1ebe70f65bbdec6396beb5e984be8ef3d63dce51a43d54b9493cb09ee63c0a2bb0
    3b40ad4f39cad90d38ad47edb7994d0db531b5a7b93b4dd63d8413bd3defe7923e1b4fc43e20a0ba3dabc16b3de2edc3bcd7b461
    bcacc7dfbc214cf7bb8bc7b4ba9d0b48b91ac1b8b864a32137dc7a943520045d3e0b5f3e3dfba0433dbe1e383d2a7435bd0fcc2d
    3d4bcc333b2694e73a9f609e3b9eb50c3b2fb7ef3ab631e8397b259937db5d79379180c9b73a7c8cb4131d4cbca2eb58bd56d997
    bda7c633bd77e0f1bca729bfbd0cc489bcc10b62
""") + """\
INLINE f32v tanh_(f32v x) {
    const f32v t = smaller_(splat<f32v>(9.3f), abs_(x)), w = t + 0.625f;
    const i32v from = (i32v)w & -0x200000;
    const f32v v = pieces(tanh_table, from >> 21, t - ((f32v)from - 0.625f));
    return copysign_(w < 1.5f ? fma_(v, t, t) : v, x);
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
    "pieces": """\
INLINE f32v piece(const float* table, i32v at) {
#ifndef __clang__
    if constexpr (L == 16) return __builtin_shuffle(load(table), at);
    if constexpr (L == 8) return __builtin_shuffle(load(table), load(table + 8), at);
#endif
    f32v v; for (int l = 0; l < L; ++l) v[l] = table[at[l] & 15]; return v;
}
// Of 16 polynomials of the fifth degree each lane's at u.
INLINE f32v pieces(const float* table, i32v at, f32v u) {
    f32v v = piece(table + 80, at);
#pragma GCC unroll 5
    for (int k = 4; k >= 0; --k) v = fma_(v, u, piece(table + 16*k, at));
    return v;
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
    """SLEEF's function. What comes with torch has none of four floats: there it is that of doubles."""
    wide = call.replace("f4_", "d4_")
    if wide == call:
        return f'extern "C" {kind} {call}({", ".join([kind] * len(names))});'
    given, taken = ", ".join(f"convert<f64v>({x})" for x in names), ", ".join(f"{kind} {x}" for x in names)
    made = f"INLINE {kind} {call}({taken}) {{ return convert<{kind}>({wide}({given})); }}"
    return f"{_declare(wide, 'f64v', names)}\n{made}"


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

_MANTISSA: Final = {
    64: "const f32v z = {}, m = __builtin_ia32_getmantps512_mask(x, 11, z, -1, 4); "
    "n = __builtin_ia32_getexpps512_mask(x, z, -1, 4); n -= __builtin_ia32_getexpps512_mask(m, z, -1, 4); "
    "return m;",
    0: "const auto small = x < 0x1p-126f; const i32v b = (i32v)(small ? x * 0x1p24f : x); "
    "const i32v k = (b - 0x3f400000) >> 23; n = convert<f32v>(k) - (small ? splat<f32v>(24.0f) : f32v{}); "
    "const f32v odd = x == 0 ? splat<f32v>(-__builtin_inff()) : splat<f32v>(__builtin_nanf(\"\")); "
    "n = x > 0 ? (x < __builtin_inff() ? n : x) : odd; return (f32v)(b - (k << 23));",
}
"""Bytes of a float vector -> x as m * 2**n, m from 3/4 to 3/2; where the logarithm is not finite, it is n."""

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
        "mantissa": _MANTISSA.get(lanes * 4, _MANTISSA[0]),
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
