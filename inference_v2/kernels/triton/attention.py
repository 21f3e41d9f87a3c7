"""Paged attention in two kernels: `attend` for tiles of consecutive queries of one request, and `merge` for decodes whose keys
were shared out among programs.

Keys are cut into partitions of a fixed size, at absolute positions. Within one the online softmax runs over key tiles
(https://arxiv.org/abs/2205.14135); partitions are then merged from the first to the last
(https://crfm.stanford.edu/2023/10/12/flashdecoding.html). Where this happens, in one program or in several, changes no bit, nor
does what else is in the batch: a query tile has the same shape in a decode and in a prefill.
"""

import triton
import triton.language as tl

from inference_v2.kernels.triton.numbers import FAR, narrow, product, tanh, weighted_sum


@triton.jit(do_not_specialize=["requests", "table_stride"])
def attend(
    q, k_pool, v_pool, out, part_peaks, part_masses, part_totals, cu_query_lens, context_lens, block_tables, sinks,
    requests, table_stride, scale, softcap, window,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr, KEYS: tl.constexpr, PARTITION: tl.constexpr,
    DECODE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (tile, kv head): up to TOKENS queries of one request, each with the heads that share the kv head, as ROWS rows.
    DECODE: every request has one query. SPLIT (decodes only): program (tile, kv head, partition) writes one partition's peak
    and mass [T, Q_HEADS, partitions] and total [T, Q_HEADS, partitions, DIM]. softcap or window None: without."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    if DECODE:
        request, first_row, offset, query_len = tile, tile, tile * 0, tile * 0 + 1
    else:  # request r has the tile numbers from cu_query_lens[r] // TOKENS + r on, which are enough; some are left over
        request, high = tile * 0, tile * 0 + requests
        while high - request > 1:
            middle = (request + high) // 2
            before = tl.load(cu_query_lens + middle) // TOKENS + middle <= tile
            request, high = tl.where(before, middle, request), tl.where(before, high, middle)
        first_row = tl.load(cu_query_lens + request)
        query_len = tl.load(cu_query_lens + request + 1) - first_row
        offset = (tile - first_row // TOKENS - request) * TOKENS
    if offset >= query_len:
        return

    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    rows, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_DIM)
    token, q_head = offset + rows // GROUP, kv_head * GROUP + rows % GROUP
    real = (rows < TOKENS * GROUP) & (token < query_len)
    first_position = tl.load(context_lens + request) - query_len
    positions = tl.where(real, first_position + token, -1)  # rows that are none see no key
    last_key = first_position + tl.minimum(offset + TOKENS, query_len) - 1
    first_key = offset * 0
    if window is not None:
        first_key = tl.maximum(first_position + offset - window + 1, 0)
    places = (first_row + token).to(tl.int64) * Q_HEADS + q_head  # [ROWS] of [T, Q_HEADS]
    there = real[:, None] & (dims < DIM)
    queries = tl.load(q + places[:, None] * DIM + dims, mask=there, other=0.0)
    table = block_tables + request.to(tl.int64) * table_stride

    if SPLIT:
        partition = tl.program_id(2)
        start, stop = partition * PARTITION, (partition + 1) * PARTITION
        if (stop <= first_key) | (start > last_key):
            return
        peak, mass, total = _partition(
            queries, k_pool, v_pool, table, positions, kv_head, start, stop, first_key, last_key, scale, softcap, window,
            KV_HEADS, DIM, BLOCK_SIZE, ROWS, BLOCK_DIM, KEYS,
        )  # fmt: skip
        places = places * tl.num_programs(2) + partition
        tl.store(part_peaks + places, peak, mask=real)
        tl.store(part_masses + places, mass, mask=real)
        tl.store(part_totals + places[:, None] * DIM + dims, total, mask=there)
    else:
        peak, mass = tl.full([ROWS], FAR, tl.float32), tl.zeros([ROWS], tl.float32)
        if sinks is not None:
            peak, mass = tl.load(sinks + q_head, mask=real, other=0.0), mass + 1.0
        total = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
        for partition in range(first_key // PARTITION, last_key // PARTITION + 1):
            start, stop = partition * PARTITION, (partition + 1) * PARTITION
            new_peak, new_mass, new_total = _partition(
                queries, k_pool, v_pool, table, positions, kv_head, start, stop, first_key, last_key, scale, softcap, window,
                KV_HEADS, DIM, BLOCK_SIZE, ROWS, BLOCK_DIM, KEYS,
            )  # fmt: skip
            peak, mass, total = _merged(peak, mass, total, new_peak, new_mass, new_total)
        mass = tl.where(real, mass, 1.0)
        tl.store(out + places[:, None] * DIM + dims, narrow(tl.div_rn(total, mass[:, None]), out.dtype.element_ty), mask=there)


@triton.jit
def _partition(
    queries, k_pool, v_pool, table, positions, kv_head, start, stop, first_key, last_key, scale, softcap, window,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Online softmax of the keys from `start` to `stop` that some row sees: peak and mass [ROWS], total [ROWS, BLOCK_DIM]."""
    dims = tl.arange(0, BLOCK_DIM)
    peak, mass = tl.full([ROWS], FAR, tl.float32), tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    for at in range(tl.maximum(start, first_key // KEYS * KEYS), tl.minimum(stop, last_key + 1), KEYS):
        keys = at + tl.arange(0, KEYS)
        seen = (keys >= first_key) & (keys <= last_key)  # what no row sees is not read: it may be NaN
        slots = tl.load(table + keys // BLOCK_SIZE, mask=seen, other=0).to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
        places = (slots * KV_HEADS + kv_head)[:, None] * DIM + dims
        there = seen[:, None] & (dims < DIM)
        k = tl.load(k_pool + places, mask=there, other=0.0)
        v = tl.load(v_pool + places, mask=there, other=0.0)
        scores = product(queries, tl.trans(k), tl.zeros([ROWS, KEYS], tl.float32)) * scale
        if softcap is not None:
            scores = tanh(scores / softcap) * softcap
        visible = keys <= positions[:, None]
        if window is not None:
            visible = visible & (keys > positions[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        weights, shrink = tl.exp(scores - new_peak[:, None]), tl.exp(peak - new_peak)
        mass = tl.fma(mass, shrink, tl.sum(weights, axis=1))
        total = weighted_sum(weights, v, total * shrink[:, None])
        peak = new_peak
    return peak, mass, total


@triton.jit
def _merged(peak, mass, total, new_peak, new_mass, new_total):
    """Two softmaxes into one. Written with fma: left to the compiler, what is fused could differ between the kernels."""
    top = tl.maximum(peak, new_peak)
    old, new = tl.exp(peak - top), tl.exp(new_peak - top)
    return top, tl.fma(mass, old, new_mass * new), tl.fma(total, old[:, None], new_total * new[:, None])


@triton.jit(do_not_specialize=["partitions"])
def merge(
    part_peaks, part_masses, part_totals, context_lens, sinks, out, partitions, window,
    Q_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PARTITION: tl.constexpr,
):  # fmt: skip
    """Program (token, head): the partitions of one decode, as `attend` merges them."""
    row, head = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, BLOCK_DIM)
    last_key = tl.load(context_lens + row) - 1
    first_key = last_key * 0
    if window is not None:
        first_key = tl.maximum(last_key - window + 1, 0)
    place = row.to(tl.int64) * Q_HEADS + head
    peak, mass = tl.full([1], FAR, tl.float32), tl.zeros([1], tl.float32)
    if sinks is not None:
        peak, mass = peak * 0.0 + tl.load(sinks + head), mass + 1.0
    total = tl.zeros([1, BLOCK_DIM], tl.float32)
    inside = (dims < DIM)[None, :]
    for partition in range(first_key // PARTITION, last_key // PARTITION + 1):
        at = place * partitions + partition + tl.arange(0, 1)
        found = tl.load(part_totals + at[:, None] * DIM + dims, mask=inside, other=0.0)
        peak, mass, total = _merged(peak, mass, total, tl.load(part_peaks + at), tl.load(part_masses + at), found)
    result = narrow(tl.div_rn(total, mass[:, None]), out.dtype.element_ty)
    tl.store(out + place * DIM + dims[None, :], result, mask=inside)
