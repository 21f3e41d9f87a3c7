"""`hybrid bench swap`: train -> generate -> train, again and again: milliseconds of the swap, and whether memory grows."""

from __future__ import annotations

import argparse
import time
from typing import Any

from hybrid.config import HybridConfig, OptimizerConfig, RolloutConfig
from hybrid.engine import HybridEngine
from hybrid.loss_head import cross_entropy
from inference_v2 import SamplingParams
from recipes.bench.machine import machine, versions
from recipes.bench.measure import peak_resident_bytes, resident_bytes, slope, spread, threads
from recipes.bench.peers import startup
from recipes.bench.prompts import load_prompts
from recipes.minimal_opsd import pack

SETTLED = 3  # swaps after which the allocators hold what they will


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The report. A swap is the entry to generation and the leaving of it, as the engine's ledger times them; between the two
    one token is drawn, and then an optimizer step is taken on it. `stay_ms` is all of that but the step, timed from outside.
    Raises ValueError for a model that cannot be used."""
    prompt = load_prompts(args.model, count=1, tokens=args.prompt_tokens)[0]
    config = HybridConfig(
        compute_dtype=args.dtype,
        device="cpu",
        optimizer=OptimizerConfig(lr=1e-6),
        rollout=RolloutConfig(on_leave=args.on_leave),
    )
    with threads(args.threads):
        engine = HybridEngine.from_pretrained(args.model, config)
        entered, left, stayed, resident = [], [], [], []
        gathered = copied = 0
        for _ in range(1 + args.swaps):
            start = time.perf_counter()
            ((completion,),) = engine.generate([prompt], SamplingParams(max_new_tokens=1, ignore_eos=True))
            stayed.append((time.perf_counter() - start) * 1e3)
            assert engine.ledger is not None
            entered.append(engine.ledger.enter_ms)
            left.append(engine.ledger.leave_ms)
            gathered, copied = engine.ledger.gathered_bytes, engine.ledger.copy_bytes
            engine.forward_backward([pack([completion])], cross_entropy)
            engine.optim_step()
            resident.append(resident_bytes())
        peak = peak_resident_bytes()
        engine.close()
        settled = resident[min(SETTLED, args.swaps) :]
        return {
            "command": "swap",
            "model": args.model,
            "dtype": args.dtype,
            "on_leave": args.on_leave,
            "swaps": args.swaps,
            "tokens": 1 + args.swaps,
            "swap_ms": spread([a + b for a, b in zip(entered[1:], left[1:])]),
            "enter_ms": spread(entered[1:]),
            "leave_ms": spread(left[1:]),
            "stay_ms": spread(stayed[1:]),
            "first_swap_ms": entered[0] + left[0],
            "gathered_bytes": gathered,
            "copy_bytes": copied,
            "resident_bytes": resident,
            "growth_bytes_per_swap": slope(settled),
            "peak_memory_bytes": peak,
            "machine": machine(),
            "versions": versions(),
            "startup_s": startup(args.model, args.dtype, prompt, args.threads, args.startups),
        }
