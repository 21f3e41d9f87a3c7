"""`hybrid bench scaling`: what a decode step and a prefilled token cost at other batches, contexts and model sizes."""

from __future__ import annotations

import argparse
import random
from typing import Any

from transformers import LlamaConfig

from inference_v2 import SamplingParams
from recipes.bench import phases
from recipes.bench.engines import OpenedEngine, RandomSource, random_engine
from recipes.bench.floor import gemm_floor_ms, step_bytes
from recipes.bench.machine import machine, versions
from recipes.bench.measure import peak_resident_bytes, spread, threads

# hidden, intermediate, layers, heads, kv heads, vocabulary; the last is SmolLM2-135M's
SIZES = {
    "tiny": (64, 160, 2, 4, 2, 512),
    "2m": (128, 384, 6, 4, 2, 4096),
    "15m": (256, 768, 12, 4, 2, 16384),
    "60m": (448, 1216, 20, 7, 7, 32768),
    "135m": (576, 1536, 30, 9, 3, 49152),
}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The report: around a centre (the first of each list) one of batch, context and size is changed at a time. Raises
    ValueError for an unknown size."""
    if unknown := [size for size in args.sizes if size not in SIZES]:
        raise ValueError(f"--sizes {' '.join(unknown)}; allowed: {', '.join(SIZES)}")
    batch, context, size = args.batches[0], args.contexts[0], args.sizes[0]
    axes = {
        "batch": [(size, b, context) for b in args.batches],
        "context": [(size, batch, c) for c in args.contexts],
        "size": [(s, batch, context) for s in args.sizes],
    }
    with threads(args.threads):
        points: dict[tuple[str, int, int], dict[str, Any]] = {}
        for name in args.sizes:
            wanted = sorted({point for axis in axes.values() for point in axis if point[0] == name})
            opened = random_engine(_config(name, max(c for _, _, c in wanted) + args.new_tokens), args.dtype)
            for point in wanted:
                points[point] = _measure(opened, *point, args)
        return {
            "command": "scaling",
            "dtype": args.dtype,
            "new_tokens": args.new_tokens,
            **{axis: [points[point] for point in wanted] for axis, wanted in axes.items()},
            "tokens": sum(point["tokens"] for point in points.values()),
            "peak_memory_bytes": peak_resident_bytes(),
            "machine": machine(),
            "versions": versions(),
        }


def _config(name: str, positions: int) -> LlamaConfig:
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SIZES[name]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=max(positions, 2048),
        tie_word_embeddings=True,
    )


def _measure(opened: OpenedEngine, size: str, batch: int, context: int, args: argparse.Namespace) -> dict[str, Any]:
    """One row: medians over `repeats` of the median decode step and of a prefilled token's time."""
    spec = opened.engine.decoder.spec
    pool = range(spec.vocab_size)
    prompts = [random.Random(number).choices(pool, k=context) for number in range(batch)]
    sampling = SamplingParams(max_new_tokens=args.new_tokens, ignore_eos=True)
    step_ms, prefill_us, tokens = [], [], 0
    for _ in range(1 + args.repeats):
        opened.forget_prefixes()
        with phases.watched(opened.engine) as steps:
            done = opened.engine.generate(prompts, sampling)
        tokens += sum(len(completion.token_ids) for (completion,) in done)
        decode = [step for step in steps if step.is_decode]
        prefill = [step for step in steps if not step.is_decode]
        step_ms.append(phases.summary(decode).get("step_ms", 0.0))
        prefill_us.append(sum(step.whole for step in prefill) * 1e6 / max(1, sum(step.tokens for step in prefill)))
    assert opened.fused is not None
    floor = gemm_floor_ms(opened.fused, spec, batch, passes=5)["median"]
    decode_ms = spread(step_ms[1:])
    return {
        "size": size,
        "parameters": RandomSource(spec).num_parameters,
        "batch": batch,
        "context": context,
        "decode_step_ms": decode_ms,
        "decode_tokens_per_s": batch / decode_ms["median"] * 1e3 if decode_ms["median"] else None,
        "prefill_us_per_token": spread(prefill_us[1:]),
        "gemm_floor_ms": floor,
        "weight_bytes_per_step": step_bytes(opened.fused),
        "tokens": tokens,
    }
