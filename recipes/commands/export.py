"""`hybrid export`: a checkpoint of a run as a Hugging Face folder."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

EXAMPLES = """\
examples:
  hybrid export runs/demo/checkpoints/step_100 models/demo_100 --dtype bfloat16
  hybrid export runs/lora/checkpoints/step_100 adapters/lora_100 --adapter

The finished model of a run is in RUN_DIR/model already. On several ranks: torchrun --nproc_per_node N -m recipes.cli export ...
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "export",
        help="a checkpoint as a Hugging Face folder",
        description="Write the weights of a checkpoint as a Hugging Face folder that AutoModel and AutoTokenizer load.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="RUN_DIR/checkpoints/step_N", type=Path)
    parser.add_argument("folder", metavar="DIR", type=Path, help="where the Hugging Face folder goes")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=None, help="default: the run's compute dtype")
    parser.add_argument("--adapter", action="store_true", help="peft's folder with the adapter alone, of a run with engine.lora")
    parser.add_argument("--overwrite", action="store_true", help="replace what DIR holds")
    return parser


def run(args: argparse.Namespace) -> int:
    from recipes import launch
    from recipes.settings import read_config

    if args.adapter and args.dtype is not None:
        raise ValueError("--dtype with --adapter, which keeps the dtype that it trains in; leave one out")
    checkpoint: Path = args.checkpoint.resolve()
    if not re.fullmatch(r"step_\d+", checkpoint.name) or not (checkpoint / "state.json").is_file():
        raise ValueError(f"{args.checkpoint}: no checkpoint; allowed: RUN_DIR/checkpoints/step_N")
    if args.folder.exists() and not args.overwrite and (args.folder.is_file() or any(args.folder.iterdir())):
        raise ValueError(f"{args.folder}: exists and is not empty; allowed: a new folder, or --overwrite to replace it")
    run_dir = checkpoint.parents[1]
    config = read_config(run_dir / "config.yaml")
    start = run_dir / "init" if config.model.path is None else config.model.path

    from trainers.loop import open_engine

    engine = open_engine(config, str(start))
    engine.load(checkpoint)
    if args.adapter:
        engine.save_adapter(args.folder)
    else:
        engine.save_pretrained(args.folder, dtype=args.dtype)
    engine.close()
    if launch.is_main_rank():
        print(f"{checkpoint.name} of {run_dir} is in {args.folder}")
    return 0
