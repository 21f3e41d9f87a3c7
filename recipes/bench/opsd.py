"""`hybrid bench opsd`: whole steps of on-policy distillation (rollout, score, train); the teacher is the same model, frozen."""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from inference_v2.loading import load_tokenizer, resolve
from recipes.bench.machine import machine, versions
from recipes.bench.measure import spread, threads
from recipes.bench.peers import run_peer, startup
from recipes.bench.prompts import load_prompts, questions
from recipes.commands.generate import read_rows
from trainers.config import OPSDConfig
from trainers.loop import train

PHASES = ("rollout", "score", "train")


class _Measured(Exception):
    """Ends a run whose steps were all taken, before it would save."""


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The report. The steps are the training loop's own, with the recipe's defaults: reverse KL over the whole vocabulary, AdamW
    with fp32 masters. Raises ValueError for a model or prompts that cannot be used, and for a peer that fails."""
    tokenizer = load_tokenizer(resolve(args.model))
    if tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer, which training data needs; put one beside the weights")
    prompts = questions(tokenizer) if args.prompts is None else [_prompt(row) for row in read_rows(args.prompts)]
    count = args.num_prompts or len(prompts)
    with threads(args.threads) as num_threads:
        records = _steps(args, prompts, count)
        tokens = round(records[-1]["response_length_mean"] * count)
        seconds = [record["step_seconds"] for record in records]
        report: dict[str, Any] = {
            "command": "opsd",
            "model": args.model,
            "dtype": args.dtype,
            "prompts": count,
            "new_tokens": args.new_tokens,
            "tokens": tokens,
            "step_s": spread(seconds),
            "phase_s": {phase: spread([record[f"{phase}/seconds"] for record in records]) for phase in PHASES},
            "tokens_per_s": tokens / spread(seconds)["median"],
            "loss": records[-1]["loss"],
            "peak_memory_bytes": round(max(record["memory/peak_rss_gb"] for record in records) * 1e9),
            "machine": machine(),
            "versions": versions(),
        }
        prompt = load_prompts(args.model, count=1, tokens=8)[0]
        report["startup_s"] = startup(args.model, args.dtype, prompt, args.threads, args.startups)
        if args.peer:
            job = {
                "model": args.model,
                "dtype": args.dtype,
                "prompts": prompts,
                "num_prompts": count,
                "new_tokens": args.new_tokens,
                "repeats": args.repeats,
                "threads": num_threads,
            }
            report["peer"] = run_peer(args, job)
            report["ratio"] = report["peer"]["seconds"]["median"] / report["step_s"]["median"]
            report["memory_ratio"] = report["peak_memory_bytes"] / report["peer"]["peak_memory_bytes"]
    return report


def _steps(args: argparse.Namespace, prompts: list[Any], count: int) -> list[dict[str, Any]]:
    """The records of `repeats` steps after one that does not count (it certifies the rollout and makes optimizer state)."""
    last = 1 + args.repeats

    def on_step(step: int, record: dict[str, Any]) -> None:
        if step == last:
            raise _Measured

    with tempfile.TemporaryDirectory() as folder:
        data, run_dir = Path(folder) / "prompts.jsonl", Path(folder) / "run"
        data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
        config = OPSDConfig.model_validate(
            {
                "recipe": "opsd",
                "output_dir": str(run_dir),
                "max_steps": last + 1,
                "model": {"path": args.model},
                "teacher": {"kind": "frozen", "path": args.model},
                "data": {"train": str(data)},
                "rollout": {
                    "prompts_per_step": count,
                    "sampling": {"max_new_tokens": args.new_tokens, "min_new_tokens": args.new_tokens},
                },
                "train": {"micro_batch_tokens": args.micro_batch_tokens},
                "engine": {"compute_dtype": args.dtype, "device": "cpu", "optimizer": {"lr": 1e-6}},
                "certificate": {"every": 0, "action": "warn"},
                "checkpoint": {"every": None},
                "log": {"console": False, "completions": 0},
            }
        )
        with suppress(_Measured):
            train(config, on_step=on_step)
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines][1:]


def _prompt(row: dict[str, Any]) -> Any:
    if "prompt" not in row:
        raise ValueError('--prompts: a row of prompt_ids; allowed here: {"prompt": text or messages}')
    return row["prompt"]
