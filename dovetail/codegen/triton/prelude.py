"""Functions that generated Triton kernels call. This file is copied in front of the kernels as it is.

They are what eager's CUDA kernels do where Triton's own operation differs: NaN propagates through
minimum and maximum, integer division rounds down, the remainder has the divisor's sign.
"""
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def follow():
    """Wait until the kernel before this one is done, then let the next one get ready."""
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def under(a, top):
    """exp(a - top) of bfloat16s, in two instructions: with a constant of 16 bits their products are exact, so
    that it is 1 at the top. For products that overflow any other constant will do."""
    scale = tl.where(tl.abs(top) < 1e38, 1.44268798828125, 0.5)
    return tl.exp2(a * scale - top * scale)


@triton.jit
def below(a, top):
    """exp(a - top), for sums of it, in which the far ones, less accurate, count little; 1 at the top, be
    that infinite."""
    apart = a - top
    return tl.where(a == top, 1.0, tl.exp2(apart * 1.4426950408889634))


@triton.jit
def grow(top, total, block):
    """Running maxima and the sums of exponentials under them, each of some neighbours, with a block more:
    what was summed is scaled down where the maximum grows."""
    neighbours: tl.constexpr = block.shape[1] // top.shape[1]
    parts = tl.reshape(block, (top.shape[0], top.shape[1], neighbours))
    higher = maximum(top, tl.reduce(parts, 2, maximum))
    more = tl.sum(below(parts, higher[:, :, None]), 2)
    return higher, total * below(top, higher) + more


@triton.jit
def attend(scores, top, total, mixed, values):
    """Running maxima of lines of scores, sums of exponentials under them, and those times values, with a tile
    more. A line may have no score but -inf so far."""
    higher = tl.maximum(top, tl.max(scores, 1)[:, None])
    shift = tl.where(higher == float("-inf"), 0.0, higher) * 1.4426950408889634
    weights = tl.exp2(scores * 1.4426950408889634 - shift)
    fade = tl.exp2(top * 1.4426950408889634 - shift)
    total = total * fade + tl.sum(weights, 1)[:, None]
    return higher, total, tl.dot(weights.to(values.dtype), values, mixed * fade, input_precision="tf32x3")


@triton.jit
def product(a, b):
    return a * b


@triton.jit
def greater_first(value, index, other, other_index):
    """Of two (value, index) pairs the greater; the first of equals; NaN wins."""
    better = (value > other) | ((value != value) & (other == other))
    equal = (value == other) | ((value != value) & (other != other))
    take = better | (equal & (index < other_index))
    return tl.where(take, value, other), tl.where(take, index, other_index)


@triton.jit
def less_first(value, index, other, other_index):
    better = (value < other) | ((value != value) & (other == other))
    equal = (value == other) | ((value != value) & (other != other))
    take = better | (equal & (index < other_index))
    return tl.where(take, value, other), tl.where(take, index, other_index)


@triton.jit
def remainder(a, b):
    r = libdevice.fmod(a, b)
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


@triton.jit
def floordiv(a, b):
    """Eager's: exact quotients stay exact."""
    r = libdevice.fmod(a, b)
    q = (a - r) / b
    q = tl.where((r != 0) & ((b < 0) != (r < 0)), q - 1.0, q)
    whole = libdevice.floor(q)
    rounded = tl.where(q - whole > 0.5, whole + 1.0, whole)
    return tl.where(b == 0, a / b, tl.where(q != 0, rounded, libdevice.copysign(q * 0.0, a / b)))


@triton.jit
def int_remainder(a, b):
    r = a % b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


@triton.jit
def int_floordiv(a, b):
    q = a // b
    return tl.where((a % b != 0) & ((a < 0) != (b < 0)), q - 1, q)


@triton.jit
def int_pow(a, b):
    result = a * 0 + 1
    power = a
    left = tl.where(b < 0, 0, b)
    for _ in range(6):
        result = tl.where(left & 1 != 0, result * power, result)
        power = power * power
        left = left >> 1
    negative = tl.where(a == 1, 1, tl.where(a == -1, 1 - 2 * (b & 1), 0))
    return tl.where(b < 0, negative, result)


@triton.jit
def wrap(index, size, inside=True):
    """Stops the device at a position out of range, as eager does; `inside`: the points that count."""
    tl.device_assert((index >= -size) & (index < size), "index out of range", mask=inside)
    return tl.where(index < 0, index + size, index)


@triton.jit
def _erf_rest(x):
    """1 - erf(|x|), to 8e-8: 2 to the power of a polynomial, which was fitted for least error in erf."""
    a = tl.minimum(tl.abs(x), 4.0, propagate_nan=tl.PropagateNan.ALL)
    p = 2.3023724e-3 + a * (4.6151035e-4 + a * -1.0021009e-4)
    p = 1.6279137 + a * (0.91832864 + a * (0.14896373 + a * (-2.945265e-2 + a * p)))
    return tl.exp2(-a * p)


@triton.jit
def erf(x):
    """To 1.6e-7, and to 6e-6 of itself close to 0: for results that are rounded to 16 bits."""
    far = 1.0 - _erf_rest(x)
    s = x * x
    near = x * (1.1283792 + s * (-0.37612638 + s * 0.11283792))
    return tl.where(s < 0.0625, near, tl.where(x < 0, -far, far))


@triton.jit
def one_plus_erf(x):
    """As in GELU: nothing cancels."""
    rest = _erf_rest(x)
    return tl.where(x < 0, rest, 2.0 - rest)


@triton.jit
def one_plus_tanh(x):
    return libdevice.fast_dividef(2.0, 1.0 + tl.exp2(x * -2.8853900817779268))


@triton.jit
def tanh(x):
    """To two units of fp32, and to 5e-6 of itself close to 0: for results rounded to 16 bits."""
    a = tl.abs(x)
    far = 1.0 - 2.0 / (1.0 + tl.exp2(a * 2.8853900817779268))
    s = x * x
    near = x * (1.0 + s * (-0.33333333 + s * (0.13333333 - s * 0.053968254)))
    return tl.where(a < 0.375, near, tl.where(x < 0, -far, far))
