"""`hybrid bench`: what this machine makes of a rollout, a scoring pass, a swap, a whole step, and of other engines beside it."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

EXAMPLES = """\
examples:
  hybrid bench rollout --model models/smollm2 --samples 4 --new-tokens 64 --json
  hybrid bench rollout --model models/smollm2 --samples 4 --new-tokens 64 --peer hf
  hybrid bench rollout --model models/smollm2 --num-prompts 4 --prompt-tokens 1500 --samples 4 --new-tokens 64
  hybrid bench swap --model models/smollm2 --swaps 30
  hybrid bench opsd --model models/smollm2 --new-tokens 128 --peer trl --peer-python TRL_VENV/bin/python
  hybrid bench loss-head --tokens 4096 --vocab 151936 --hidden 896
  hybrid bench learning --recipes opsd/demo.yaml grpo/demo.yaml --seeds 0 1 2 --target 0.9 --plot opsd_vs_grpo.png

each benchmark warms up once, repeats, and gives median, min, max and all runs; memory is this process's (a peer's: all of its
processes). They run on the CPU; on a GPU see recipes/bench/gpu_check.py. How to set a peer up: recipes/bench/peer_*.py.
"""
BENCHMARKS = {
    "rollout": "draw prompts x samples x new tokens",
    "score": "log-probs of prompts x samples x new tokens",
    "swap": "train -> generate -> train, again and again",
    "opsd": "whole steps of on-policy distillation",
    "scaling": "cost against batch, context and model size, on random models",
    "loss-head": "the chunked loss at full vocabulary",
    "learning": "generated tokens until a held-out score is reached, by recipe",
}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "bench",
        help="measure speed and memory, also beside other engines",
        description="Measure speed and memory on this machine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    of = {name: names.add_parser(name, help=text, description=f"Measure: {text}.") for name, text in BENCHMARKS.items()}
    for name in ("rollout", "score", "swap", "opsd"):
        of[name].add_argument("--model", required=True, metavar="DIR", help="a Hugging Face folder or hub name")
        of[name].add_argument("--startups", type=_natural, default=1, metavar="R", help="timed process starts; 0: none")
    for name in ("rollout", "score"):
        of[name].add_argument("--samples", type=_positive, default=1, metavar="S", help="completions per prompt")
        of[name].add_argument("--prompt-tokens", type=_positive, metavar="L", help="made-up prompts of exactly L tokens")
    for name in ("rollout", "score", "opsd"):
        of[name].add_argument("--new-tokens", type=_positive, default=64, metavar="N", help="per completion, exactly")
        of[name].add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="as `hybrid generate`; default: 16 questions")
        of[name].add_argument("--num-prompts", type=_positive, metavar="P", help="default: all there are")
    _add_peer(of["rollout"], ("hf", "vllm"))
    _add_peer(of["score"], ("hf",))
    _add_peer(of["opsd"], ("trl",))
    of["score"].add_argument("--hidden", action="store_true", help="hidden states too, as a teacher gives them")
    of["opsd"].add_argument("--micro-batch-tokens", type=_positive, default=4096, metavar="N", help="of forward and backward")
    of["swap"].add_argument("--swaps", type=_positive, default=30, metavar="R")
    of["swap"].add_argument("--prompt-tokens", type=_positive, default=16, metavar="L")
    of["swap"].add_argument("--on-leave", choices=("keep", "offload", "free"), default="free")
    lists = {"batches": [16, 1, 4, 64], "contexts": [128, 16, 512, 1024]}
    for option, default in lists.items():
        of["scaling"].add_argument(
            f"--{option}", type=_positive, nargs="+", default=default, metavar="N", help="the first: centre"
        )
    of["scaling"].add_argument("--sizes", nargs="+", default=["60m", "tiny", "2m", "15m", "135m"], metavar="NAME")
    of["scaling"].add_argument("--new-tokens", type=_positive, default=16, metavar="N")
    loss_head = of["loss-head"]
    for option, value in {"tokens": 4096, "vocab": 151936, "hidden": 896}.items():
        loss_head.add_argument(f"--{option}", type=_positive, default=value, metavar="N")
    loss_head.add_argument("--loss", choices=("cross_entropy", "forward_kl", "reverse_kl"), default="reverse_kl")
    loss_head.add_argument("--chunk-tokens", type=_positive, metavar="N", help="default: the engine's choice")
    loss_head.add_argument("--kernels", choices=("auto", "reference", "cpu"), default="auto")
    learning = of["learning"]
    learning.add_argument(
        "--recipes",
        nargs="+",
        required=True,
        metavar="CONFIG.yaml",
        help="each may be a quoted line: 'CONFIG.yaml key=value ...'",
    )
    learning.add_argument("--seeds", type=_natural, nargs="+", default=[0, 1, 2], metavar="N")
    learning.add_argument("--target", type=float, default=0.8, metavar="SCORE")
    learning.add_argument("--set", nargs="+", default=[], metavar="key=value", help="for all recipes: the same start, say")
    learning.add_argument(
        "--out", type=Path, default=Path("runs/learning"), metavar="DIR", help="the runs; finished ones are kept"
    )
    learning.add_argument("--plot", type=Path, metavar="FILE.png")
    learning.add_argument("--json", action="store_true", help="one JSON object")
    for name, each in of.items():
        if name == "learning":
            continue
        each.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
        if name != "swap":
            each.add_argument("--repeats", type=_positive, default=5, metavar="R", help="timed runs, after a warm-up")
        each.add_argument("--threads", type=_positive, metavar="T", help="default: torch's choice")
        each.add_argument("--json", action="store_true", help="one JSON object")
    return parser


def run(args: argparse.Namespace) -> int:
    if hasattr(args, "peer"):
        from recipes.bench.peers import check_peer_options

        check_peer_options(args)
    report = importlib.import_module(f"recipes.bench.{args.benchmark.replace('-', '_')}").run(args)
    print(json.dumps(report) if args.json else readable(report))
    return 0


def readable(report: dict[str, Any], indent: str = "") -> str:
    """One line a number; the runs of a spread are left to --json, and rows of a table become its lines."""
    lines = []
    for name, value in report.items():
        if isinstance(value, dict) and "runs" in value:
            value = f"{_short(value['median'])}   ({_short(value['min'])} to {_short(value['max'])})"
        elif isinstance(value, dict):
            lines += [f"{indent}{name}", readable(value, indent + "  ")]
            continue
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            lines += [f"{indent}against {name}", *(f"{indent}  {_row(row)}" for row in value)]
            continue
        lines.append(f"{indent}{name:<{max(1, 28 - len(indent))}} {_short(value)}")
    return "\n".join(lines)


def _row(row: dict[str, Any]) -> str:
    cells = {name: value["median"] if isinstance(value, dict) else value for name, value in row.items()}
    return "  ".join(f"{name} {_short(value)}" for name, value in cells.items())


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return " ".join(str(_short(item)) for item in value)
    return f"{value:.4g}" if isinstance(value, float) else value


def _add_peer(parser: argparse.ArgumentParser, peers: tuple[str, ...]) -> None:
    parser.add_argument("--peer", choices=peers, help="run this engine on the same work, after ours, and give the ratio")
    parser.add_argument("--peer-python", metavar="PATH", help="its interpreter; default: this one")
    parser.add_argument(
        "--peer-dtype", choices=("float32", "bfloat16"), help="its dtype, where another one is faster there; default: --dtype"
    )
    parser.add_argument(
        "--peer-env", metavar="NAME=VALUE", action="append", default=[], type=_assignment, help="of its environment; repeatable"
    )


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: NAME=VALUE")
    return name, value


def _positive(text: str) -> int:
    return _at_least(1, text)


def _natural(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text}; allowed: a whole number >= {least}")
    return value
