"""Functions of float64 numbers in Triton, right to a few of their last digits, for the kernels of rows.

Written with roots, exponentials and logarithms alone, so that Triton's interpreter runs them as well.
"""

import triton
import triton.language as tl


@triton.jit
def least(a, b):
    return tl.where((a < b) | (a != a), a, b)  # NaN goes through


@triton.jit
def copysign(size, sign):
    return tl.where(sign.to(tl.int64, bitcast=True) < 0, -tl.abs(size), tl.abs(size))


@triton.jit
def sign(z):
    return tl.where(z > 0.0, 1.0, tl.where(z < 0.0, -1.0, z))


@triton.jit
def log1p(z):
    # log(u) for the rounded u = 1 + z, and what was rounded away
    u = 1.0 + z
    small = tl.where(u == 1.0, 1.0, u - 1.0)
    return tl.where(u == 1.0, z, tl.where(u - 1.0 == z, tl.log(u), tl.log(u) * (z / small)))


@triton.jit
def expm1(z):
    u = tl.exp(z)
    log = tl.log(u)
    near = tl.abs(z) < 1.0
    safe = tl.where(near & (u != 1.0), log, 1.0)
    return tl.where(near, tl.where(u == 1.0, z, (u - 1.0) * (z / safe)), u - 1.0)


@triton.jit
def sinh(z):
    e = expm1(tl.abs(z))
    far = e > 1e300
    size = tl.where(far, e, e + e / (e + 1.0)) * 0.5
    return tl.where(z < 0.0, -size, size)


@triton.jit
def cosh(z):
    e = tl.exp(tl.abs(z))
    return (e + 1.0 / e) * 0.5


@triton.jit
def tanh(z):
    e = expm1(2.0 * tl.where(tl.abs(z) > 20.0, 20.0, tl.abs(z)))
    size = tl.where(z == z, e / (e + 2.0), z)
    return tl.where(z < 0.0, -size, size)


@triton.jit
def asinh(z):
    size = tl.abs(z)  # of float32 numbers, whose squares are finite
    value = log1p(size + size * size / (1.0 + tl.sqrt(1.0 + size * size)))
    return tl.where(z < 0.0, -value, value)


@triton.jit
def arctan2(y, x):
    a, b = tl.abs(y), tl.abs(x)
    large, small = tl.where(a > b, a, b), tl.where(a > b, b, a)
    q = small / tl.where(large == 0.0, 1.0, large)
    for _ in tl.static_range(3):  # three half angles, to 0.1 at most, where ten terms of the series are enough
        q = q / (1.0 + tl.sqrt(1.0 + q * q))
    square, series = q * q, q * 0.0
    for i in tl.static_range(10):
        series = 1.0 / (19.0 - 2.0 * i) - square * series
    angle = 8.0 * q * series
    angle = tl.where(a > b, 1.5707963267948966192 - angle, angle)
    angle = tl.where(x < 0.0, 3.1415926535897932385 - angle, angle)
    return tl.where(y < 0.0, -angle, angle)
