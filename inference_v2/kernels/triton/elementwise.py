"""Norms, the gated activation, and all that lies between the qkv projection and attention. One program a row (or a head of one
token), so a row's bits depend on nothing else; each step is rounded as in reference.py."""

import triton
import triton.language as tl

from inference_v2.kernels.triton.numbers import narrow


@triton.jit
def rms_norm(x, residual, weight, y, total, row_stride, eps, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """y [rows, DIM] = norm of x, whose rows lie `row_stride` apart, or of total = x + residual."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < DIM
    value = tl.load(x + row * row_stride + at, mask=inside, other=0.0)
    if residual is not None:
        other = tl.load(residual + row * DIM + at, mask=inside, other=0.0)
        value = narrow(value.to(tl.float32) + other.to(tl.float32), value.dtype)
        tl.store(total + row * DIM + at, value, mask=inside)
    normed = _normed(value, _inverse_rms(value, eps, DIM), tl.load(weight + at, mask=inside, other=0.0))
    tl.store(y + row * DIM + at, normed, mask=inside)


@triton.jit
def silu_and_mul(gate_up, y, DIM: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < DIM
    gate = tl.load(gate_up + row * 2 * DIM + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * DIM + DIM + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = narrow(wide / (1.0 + tl.exp(-wide)), gate.dtype)
    tl.store(y + row * DIM + at, _times(activated, up), mask=inside)


@triton.jit
def enter_attention(
    q, k, v, q_out, k_pool, v_pool, slots, positions, cos, sin, q_norm, k_norm, eps,
    q_stride, k_stride, v_stride, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a token and head: queries first, then keys, then values. Tokens lie `*_stride` apart, heads DIM. `cos` None:
    no rotation; HALF is half of the rotated dimensions."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if head < Q_HEADS:
        target = q_out + (token * Q_HEADS + head) * DIM
        _enter(q + token * q_stride + head * DIM, target, token, positions, cos, sin, q_norm, eps, DIM, HALF, BLOCK)
    else:
        slot = tl.load(slots + token)
        kv_head = (head - Q_HEADS) % KV_HEADS
        row = (slot * KV_HEADS + kv_head) * DIM
        if head < Q_HEADS + KV_HEADS:
            source = k + token * k_stride + kv_head * DIM
            _enter(source, k_pool + row, token, positions, cos, sin, k_norm, eps, DIM, HALF, BLOCK)
        else:
            at = tl.arange(0, BLOCK)
            value = tl.load(v + token * v_stride + kv_head * DIM + at, mask=at < DIM, other=0.0)
            tl.store(v_pool + row + at, value, mask=at < DIM)


@triton.jit
def _enter(
    source, target, token, positions, cos, sin, norm, eps, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One head: norm, rotation, and the way out."""
    at = tl.arange(0, BLOCK)
    inside = at < DIM
    value = tl.load(source + at, mask=inside, other=0.0)
    scale = _inverse_rms(value, eps, DIM)
    if norm is not None:
        value = _normed(value, scale, tl.load(norm + at, mask=inside, other=0.0))
    if cos is not None:
        rotated = at < 2 * HALF
        partner_at = tl.where(rotated, tl.where(at < HALF, at + HALF, at - HALF), at)
        partner = tl.load(source + partner_at, mask=inside, other=0.0)
        if norm is not None:
            partner = _normed(partner, scale, tl.load(norm + partner_at, mask=inside, other=0.0))
        angle = tl.load(positions + token) * HALF + at % HALF
        c, s = tl.load(cos + angle, mask=rotated, other=0.0), tl.load(sin + angle, mask=rotated, other=0.0)
        turned = _times(partner, s).to(tl.float32)
        turned = _times(value, c).to(tl.float32) + tl.where(at < HALF, -turned, turned)
        value = tl.where(rotated, narrow(turned, value.dtype), value)
    tl.store(target + at, value, mask=inside)


@triton.jit
def _inverse_rms(x, eps, DIM: tl.constexpr):
    """Of a whole row, zero beyond DIM."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, axis=0) / DIM + eps)


@triton.jit
def _normed(x, scale, weight):
    return _times(narrow(x.to(tl.float32) * scale, x.dtype), weight)


@triton.jit
def _times(a, b):
    return narrow(a.to(tl.float32) * b.to(tl.float32), a.dtype)
