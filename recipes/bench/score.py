"""`hybrid bench score`: log-probs of given responses, prompts x samples x new tokens, as a teacher or reference gives them."""

from __future__ import annotations

import argparse
import random
from typing import Any

from recipes.bench import phases
from recipes.bench.engines import open_engine, versions_of
from recipes.bench.floor import gemm_floor_ms
from recipes.bench.machine import machine, versions
from recipes.bench.measure import peak_resident_bytes, seconds_of, spread, threads
from recipes.bench.peers import run_peer, startup
from recipes.bench.prompts import load_prompts


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The report. Raises ValueError as `rollout.run` does."""
    prompts = load_prompts(args.model, file=args.prompts, count=args.num_prompts, tokens=args.prompt_tokens)
    sequences, starts = with_responses(prompts, args.samples, args.new_tokens)
    with threads(args.threads) as num_threads:
        opened = open_engine(args.model, args.dtype)
        tokens, mean = 0, 0.0

        def score() -> None:
            nonlocal tokens, mean
            opened.forget_prefixes()
            scored = opened.engine.score(sequences, starts=starts, hidden=args.hidden)
            tokens = sum(len(one.logprobs) for one in scored)
            mean = sum(one.logprobs.sum().item() for one in scored) / tokens

        seconds = seconds_of(score, args.repeats)
        before = opened.engine.stats()
        with phases.watched(opened.engine) as steps:
            score()
        after = opened.engine.stats()
        report: dict[str, Any] = {
            "command": "score",
            "model": args.model,
            "dtype": args.dtype,
            "prompts": len(prompts),
            "samples": args.samples,
            "new_tokens": args.new_tokens,
            "hidden": args.hidden,
            "tokens": tokens,
            "mean_logprob": mean,
            "tokens_given": sum(map(len, sequences)),
            "tokens_computed": sum(step.tokens for step in steps),
            "tokens_hit": after.tokens_hit - before.tokens_hit,
            "tokens_per_s": tokens / spread(seconds)["median"],
            "tokens_per_s_runs": spread([tokens / s for s in seconds]),
            "seconds": spread(seconds),
            "prefill": phases.summary(steps),
            "peak_memory_bytes": peak_resident_bytes(),
            **versions_of(opened),
        }
        if opened.fused is not None:
            computed = report["tokens_computed"]
            floor = gemm_floor_ms(opened.fused, opened.engine.decoder.spec, computed, head_rows=tokens, passes=3)
            report |= {"gemm_floor_ms": floor, "over_floor": spread(seconds)["median"] * 1e3 / floor["median"]}
        report |= {"machine": machine(), "versions": versions()}
        report["startup_s"] = startup(args.model, args.dtype, prompts[0], args.threads, args.startups)
        if args.peer:
            job = {
                "work": "score",
                "model": args.model,
                "dtype": args.dtype,
                "sequences": sequences,
                "starts": starts,
                "repeats": args.repeats,
                "threads": num_threads,
            }
            report["peer"] = run_peer(args, job)
            report["ratio"] = report["tokens_per_s"] / report["peer"]["tokens_per_s"]["median"]
    return report


def with_responses(prompts: list[tuple[int, ...]], samples: int, new_tokens: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Each prompt with `samples` different responses of `new_tokens` ids, mixed from its own, and where each starts."""
    mixed = random.Random(0)
    sequences = [(*p, *mixed.choices(p, k=new_tokens)) for p in prompts for _ in range(samples)]
    return sequences, [len(p) for p in prompts for _ in range(samples)]
