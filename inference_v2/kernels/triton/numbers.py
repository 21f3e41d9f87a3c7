"""Arithmetic that the kernels share, with the same results on a GPU and in Triton's interpreter."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
FAR = tl.constexpr(-1e30)  # running maximum before any key was seen: finite, so that FAR - FAR is 0 and not NaN


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """fp32 to `dtype`, to the nearest, ties to even. The interpreter's own cast to bf16 rounds otherwise."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        bits = tl.where(x == x, bits, 0x7FC0)
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def product(a, b, c):
    """a @ b + c in fp32. Products of 16-bit numbers are exact; fp32 is never rounded to tf32."""
    if INTERPRETED:  # whose dot takes bf16 for integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc=c, input_precision="ieee")
    return tl.dot(a, b, acc=c, input_precision="ieee")


@triton.jit
def weighted_sum(weights, v, c):
    """weights @ v + c for fp32 weights. 16-bit values meet the weights in two parts, which together keep 16 bits or more."""
    if v.dtype == tl.float32:
        return product(weights, v, c)
    high = narrow(weights, v.dtype)
    low = narrow(weights - high.to(tl.float32), v.dtype)
    return product(low, v, product(high, v, c))


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
