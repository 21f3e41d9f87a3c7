"""`hybrid bench rollout`: prompts x samples x new tokens, drawn at temperature 1 without truncation, full lengths."""

from __future__ import annotations

import argparse
from typing import Any

from inference_v2 import SamplingParams
from recipes.bench import phases
from recipes.bench.engines import OpenedEngine, open_engine, versions_of
from recipes.bench.floor import gemm_floor_ms, step_bytes
from recipes.bench.machine import machine, versions
from recipes.bench.measure import peak_resident_bytes, seconds_of, spread, threads
from recipes.bench.peers import run_peer, startup
from recipes.bench.prompts import load_prompts


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The report. Raises ValueError for a model or prompts that cannot be used, and for a peer that fails."""
    prompts = load_prompts(args.model, file=args.prompts, count=args.num_prompts, tokens=args.prompt_tokens)
    with threads(args.threads) as num_threads:
        opened = open_engine(args.model, args.dtype)
        sampling = SamplingParams(max_new_tokens=args.new_tokens, num_samples=args.samples, ignore_eos=True)
        tokens = 0

        def rollout() -> None:
            nonlocal tokens
            opened.forget_prefixes()
            tokens = _count(opened, prompts, sampling)

        seconds = seconds_of(rollout, args.repeats)
        with phases.watched(opened.engine) as steps:
            rollout()
        decode = phases.summary([step for step in steps if step.is_decode])
        report: dict[str, Any] = {
            "command": "rollout",
            "model": args.model,
            "dtype": args.dtype,
            "prompts": len(prompts),
            "samples": args.samples,
            "new_tokens": args.new_tokens,
            "prompt_tokens": [min(map(len, prompts)), max(map(len, prompts))],
            "tokens": tokens,
            "tokens_per_s": tokens / spread(seconds)["median"],
            "tokens_per_s_runs": spread([tokens / s for s in seconds]),
            "seconds": spread(seconds),
            "prefill": phases.summary([step for step in steps if not step.is_decode]),
            "decode": decode,
            "preemptions": opened.engine.stats().preemptions,
            "peak_memory_bytes": peak_resident_bytes(),
            **versions_of(opened),
        }
        report |= _floor(opened, decode)
        report["machine"] = machine()
        if "weight_bytes_per_step" in report and "step_ms" in decode:
            per_second = report["weight_bytes_per_step"] / decode["step_ms"] * 1e3
            report["bandwidth_share"] = per_second / (report["machine"]["read_gb_per_s"] * 1e9)
        report["versions"] = versions()
        report["startup_s"] = startup(args.model, args.dtype, prompts[0], args.threads, args.startups)
        if args.peer:
            job = {
                "work": "rollout",
                "model": args.model,
                "dtype": args.dtype,
                "prompts": prompts,
                "samples": args.samples,
                "new_tokens": args.new_tokens,
                "repeats": args.repeats,
                "threads": num_threads,
            }
            report["peer"] = run_peer(args, job)
            report["ratio"] = report["tokens_per_s"] / report["peer"]["tokens_per_s"]["median"]
    return report


def _count(opened: OpenedEngine, prompts: list[tuple[int, ...]], sampling: SamplingParams) -> int:
    """Tokens drawn. Raises ValueError for a prompt that the engine refuses."""
    done = [sample for samples in opened.engine.generate(prompts, sampling) for sample in samples]
    if error := next((sample.error for sample in done if sample.error), None):
        raise ValueError(f"the engine refuses a prompt: {error}; shorten --prompt-tokens or --new-tokens")
    return sum(len(sample.token_ids) for sample in done)


def _floor(opened: OpenedEngine, decode: dict[str, Any]) -> dict[str, Any]:
    """The floor of a decode step at the rows it had; nothing for a model type without linears of ours."""
    if opened.fused is None or not decode["steps"]:
        return {}
    floor = gemm_floor_ms(opened.fused, opened.engine.decoder.spec, decode["rows"])
    return {
        "gemm_floor_ms": floor,
        "decode_over_floor": decode["step_ms"] / floor["median"],
        "weight_bytes_per_step": step_bytes(opened.fused),
    }
