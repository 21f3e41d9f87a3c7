"""The sampler: from fp32 logits to tokens and both log-probs, without a word from the host, so that a CUDA graph can hold it.

`masses` looks once at every logit; `draw` then picks a chunk of the vocabulary by its mass and a token inside. Rows with top-k,
top-p or min-p go through `draw_truncated` instead: the set that is kept is all tokens above a threshold and some of those on it,
and the threshold is found by bisection over the bits of a logit, one look at the row for each.

Weights are exp of the fp32 number (z - max) / temperature, sums of them fp64.
"""

import triton
import triton.language as tl

NEVER = tl.constexpr(2**31 - 1)
INFINITE = tl.constexpr(0x7F800000)  # the bits of infinity
MASS_SLACK = tl.constexpr(1e-7)  # a mass of top_p up to fp32 rounding is reached


@triton.jit
def masses(logits, temperature, peaks, sums, best, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    """Program (row, chunk): the chunk's largest logit, the first id that has it, the sum of exp((z - largest) / temperature)."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    z = tl.load(logits + row.to(tl.int64) * VOCAB + at, mask=at < VOCAB, other=float("-inf"))
    peak = tl.max(z, axis=0)
    weights = tl.exp(_scaled(z, tl.where(peak == float("-inf"), 0.0, peak), _divisor(temperature, row)))
    place = row * tl.num_programs(1) + chunk
    tl.store(peaks + place, peak)
    tl.store(sums + place, tl.sum(weights.to(tl.float64), axis=0))
    tl.store(best + place, chunk * CHUNK + tl.argmax(z, axis=0))


@triton.jit
def draw(
    logits, source, temperature, uniform, top_k, top_p, min_p, peaks, sums, best, source_peaks, source_sums,
    ids, logprobs, raw, VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row), for rows that keep the whole vocabulary. `source`: the logits to draw from, with its own chunk statistics
    (`best` is the source's)."""
    row = tl.program_id(0)
    if _is_truncated(row, temperature, top_k, top_p, min_p):
        return
    divisor = _divisor(temperature, row)
    chunks = tl.arange(0, BLOCK)
    there = chunks < CHUNKS
    peak, parts = _row_masses(source_peaks, source_sums, row, divisor, CHUNKS, BLOCK)
    mass = tl.sum(parts, axis=0)
    greedy = tl.load(temperature + row) == 0.0

    found = tl.load(source_peaks + row * CHUNKS + chunks, mask=there, other=float("-inf"))
    top_chunk = tl.argmax(found, axis=0)
    target = tl.load(uniform + row) * mass
    chunk = _first_beyond(tl.cumsum(parts, axis=0), parts, chunks, target)
    target -= tl.sum(tl.where(chunks < chunk, parts, 0.0), axis=0)

    chunk_peak = tl.load(source_peaks + row * CHUNKS + chunk)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    z = tl.load(source + row.to(tl.int64) * VOCAB + at, mask=at < VOCAB, other=float("-inf"))
    weights = tl.exp(_scaled(z, tl.where(chunk_peak == float("-inf"), 0.0, chunk_peak), divisor)).to(tl.float64)
    weights *= tl.exp(_scaled(chunk_peak, peak, divisor).to(tl.float64))
    token = _first_beyond(tl.cumsum(weights, axis=0), weights, at, target)
    token = tl.where(greedy, tl.load(best + row * CHUNKS + top_chunk), token)
    token = tl.minimum(token, VOCAB - 1)
    value = _scaled(tl.load(source + row.to(tl.int64) * VOCAB + token), peak, divisor)
    logprob = tl.where(greedy, 0.0, value.to(tl.float64) - tl.log(mass))
    _store(row, token, logprob, mass, logits, divisor, peaks, sums, ids, logprobs, raw, VOCAB, CHUNKS, BLOCK)


@triton.jit
def draw_truncated(
    logits, source, temperature, uniform, top_k, top_p, min_p, peaks, sums, source_peaks, source_sums,
    ids, logprobs, raw, VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row), for rows under top-k, top-p or min-p. A token's key is the bit pattern of |z - max| / temperature: keys rise
    as logits fall. Kept are all keys below the threshold, and the first `share` ids of those on it."""
    row = tl.program_id(0)
    if not _is_truncated(row, temperature, top_k, top_p, min_p):
        return
    divisor = _divisor(temperature, row)
    peak, parts = _row_masses(source_peaks, source_sums, row, divisor, CHUNKS, BLOCK)
    whole = tl.sum(parts, axis=0)
    z = source + row.to(tl.int64) * VOCAB
    k = tl.load(top_k + row)
    k = tl.where((k > 0) & (k < VOCAB), k, VOCAB).to(tl.int32)
    p, least = tl.load(top_p + row), tl.load(min_p + row)

    high = k * 0 + INFINITE + 1
    if k < VOCAB:  # top-p counts mass among the top k
        high = _largest_key(z, peak, divisor, k, whole + 1.0, least * 0.0, high, VOCAB, CHUNK) + 1
        count, mass = _below(z, peak, divisor, high - 1, VOCAB, CHUNK)
        whole = mass + (k - count) * _weight(high - 1)
    limit = tl.where(p >= 1.0, whole * 2.0 + 1.0, (p - MASS_SLACK) * whole)
    threshold = _largest_key(z, peak, divisor, k, limit, least, high, VOCAB, CHUNK)
    count, mass = _below(z, peak, divisor, threshold, VOCAB, CHUNK)
    within = tl.ceil((limit - mass) / tl.maximum(_weight(threshold), 1e-300))  # of those on the threshold, as far as top-p goes
    share = tl.maximum(tl.minimum((k - count).to(tl.float64), within), 1.0).to(tl.int32)

    ties, kept_mass = k * 0, whole * 0.0
    for start in range(0, VOCAB, CHUNK):
        at = start + tl.arange(0, CHUNK)
        weights, tied = _kept(z, at, peak, divisor, threshold, ties, share, VOCAB)
        ties, kept_mass = ties + tied, kept_mass + tl.sum(weights, axis=0)
    target = tl.load(uniform + row) * kept_mass
    ties, before, token, last = k * 0, whole * 0.0, k * 0 + NEVER, k * 0
    for start in range(0, VOCAB, CHUNK):
        at = start + tl.arange(0, CHUNK)
        weights, tied = _kept(z, at, peak, divisor, threshold, ties, share, VOCAB)
        beyond = (before + tl.cumsum(weights, axis=0) > target) & (weights > 0.0)
        token = tl.minimum(token, tl.min(tl.where(beyond, at, NEVER), axis=0))
        last = tl.maximum(last, tl.max(tl.where(weights > 0.0, at, 0), axis=0))
        ties, before = ties + tied, before + tl.sum(weights, axis=0)
    token = tl.where(token == NEVER, last, token)
    logprob = _scaled(tl.load(z + token), peak, divisor).to(tl.float64) - tl.log(kept_mass)
    _store(row, token, logprob, whole, logits, divisor, peaks, sums, ids, logprobs, raw, VOCAB, CHUNKS, BLOCK)


@triton.jit
def _divisor(temperature, row):
    t = tl.load(temperature + row)
    return tl.where(t == 0.0, 1.0, t)


@triton.jit
def _scaled(z, peak, divisor):
    return tl.div_rn(z - peak, divisor)


@triton.jit
def _is_truncated(row, temperature, top_k, top_p, min_p):
    asked = (tl.load(top_k + row) > 0) | (tl.load(top_p + row) < 1.0) | (tl.load(min_p + row) > 0.0)
    return asked & (tl.load(temperature + row) != 0.0)


@triton.jit
def _row_masses(peaks, sums, row, divisor, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """(the row's largest logit, the mass of each chunk [BLOCK] in fp64)."""
    chunks = tl.arange(0, BLOCK)
    there = chunks < CHUNKS
    found = tl.load(peaks + row * CHUNKS + chunks, mask=there, other=float("-inf"))
    parts = tl.load(sums + row * CHUNKS + chunks, mask=there, other=0.0)
    peak = tl.max(found, axis=0)
    return peak, parts * tl.exp(_scaled(found, peak, divisor).to(tl.float64))


@triton.jit
def _first_beyond(cumulative, weights, index, target):
    """The first index of positive weight whose cumulative weight exceeds `target`; where rounding leaves none, the last of
    positive weight."""
    first = tl.min(tl.where((cumulative > target) & (weights > 0.0), index, NEVER), axis=0)
    return tl.where(first == NEVER, tl.max(tl.where(weights > 0.0, index, 0), axis=0), first)


@triton.jit
def _store(
    row, token, logprob, mass, logits, divisor, peaks, sums, ids, logprobs, raw,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    plain_peak, plain_parts = _row_masses(peaks, sums, row, divisor, CHUNKS, BLOCK)
    plain = _scaled(tl.load(logits + row.to(tl.int64) * VOCAB + token), plain_peak, divisor)
    tl.store(ids + row, token.to(tl.int64))
    tl.store(logprobs + row, tl.where(mass < float("inf"), logprob, float("nan")).to(tl.float32))  # not so for NaN
    tl.store(raw + row, (plain.to(tl.float64) - tl.log(tl.sum(plain_parts, axis=0))).to(tl.float32))


@triton.jit
def _keys(z, at, peak, divisor, VOCAB: tl.constexpr):
    """Keys and weights of the tokens `at`."""
    value = _scaled(tl.load(z + at, mask=at < VOCAB, other=float("-inf")), peak, divisor)
    return tl.abs(value).to(tl.int32, bitcast=True), tl.exp(value).to(tl.float64)


@triton.jit
def _weight(key):
    return tl.exp(-key.to(tl.float32, bitcast=True)).to(tl.float64)


@triton.jit
def _below(z, peak, divisor, key, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    """How many tokens have a smaller key, and their mass."""
    counts, sums = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.float64)
    for start in range(0, VOCAB, CHUNK):
        at = start + tl.arange(0, CHUNK)
        keys, weights = _keys(z, at, peak, divisor, VOCAB)
        inside = (keys < key) & (at < VOCAB)
        counts, sums = counts + inside.to(tl.int32), sums + tl.where(inside, weights, 0.0)
    return tl.sum(counts, axis=0), tl.sum(sums, axis=0)


@triton.jit
def _largest_key(z, peak, divisor, k, limit, least, high, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    """The largest key < high with fewer than k tokens and less mass than `limit` below it, and a weight of at least `least`.
    0, the top token's, counts as such a key."""
    low = high * 0
    while high - low > 1:
        middle = low + (high - low) // 2
        count, mass = _below(z, peak, divisor, middle, VOCAB, CHUNK)
        holds = (count < k) & (mass < limit) & (tl.exp(-middle.to(tl.float32, bitcast=True).to(tl.float64)) >= least)
        low, high = tl.where(holds, middle, low), tl.where(holds, high, middle)
    return low


@triton.jit
def _kept(z, at, peak, divisor, threshold, ties, share, VOCAB: tl.constexpr):
    """Weights of the tokens `at`, 0 where they are not kept, and how many of them lie on the threshold."""
    keys, weights = _keys(z, at, peak, divisor, VOCAB)
    on = ((keys == threshold) & (at < VOCAB)).to(tl.int32)
    kept = (keys < threshold) | ((on > 0) & (ties + tl.cumsum(on, axis=0) <= share))
    return tl.where(kept, weights, 0.0), tl.sum(on, axis=0)
