"""`hybrid train`: run a recipe."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from recipes import launch
from recipes.parts import prepare, say_stopped
from recipes.preflight import check, check_files
from recipes.settings import SettingsError, load_settings
from recipes.summary import summary
from trainers.config import RunConfig

EXAMPLES = """\
examples:
  hybrid train recipes/opsd/demo.yaml
  hybrid train recipes/opsd/demo.yaml max_steps=50 engine.optimizer.lr=5e-4 output_dir=runs/short
  hybrid train recipes/opsd/smollm2_self_teacher.yaml model.path=models/smollm2 --nproc 2
  hybrid train my_recipe.yaml --check
  torchrun --nproc_per_node 2 -m recipes.cli train recipes/opsd/demo.yaml

The same command again goes on from the last whole checkpoint of output_dir (checkpoint.resume=never starts over). SIGTERM and
Ctrl-C save a checkpoint at the end of the step and leave with exit code 128 + signal; a second one leaves at once.
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "train",
        help="run a recipe",
        description="Run a recipe: a YAML file, with any key set on the command line as section.key=value.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG.yaml", help="a path, or the name of a recipe shipped with the package")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--nproc", type=int, default=None, metavar="N", help="ranks on this machine; default 1")
    parser.add_argument("--check", action="store_true", help="check config, data and model, and stop")
    parser.add_argument("--print", action="store_true", help="print the resolved config as YAML, and stop")
    return parser


def run(args: argparse.Namespace) -> int:
    config = load_settings(args.config, args.overrides)
    if args.print:
        print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True), end="")
    if args.check:
        for line in check(config):
            print(line, file=sys.stderr)
    if args.print or args.check:
        return 0
    if args.nproc is not None:
        if not 1 <= args.nproc <= launch.MOST_RANKS:
            raise SettingsError(f"--nproc {args.nproc}; allowed on this machine: 1 to {launch.MOST_RANKS}")
        if launch.is_rank():
            raise SettingsError("--nproc inside of torchrun or accelerate launch; give the number of ranks to one of them")
    check_files(config)  # before ranks start and the output folder is made
    if args.nproc is not None and args.nproc > 1:
        return launch.run_ranks(["train", args.config, *args.overrides], args.nproc)
    with launch.StopSignal() as stop:
        return train(config, stop)


def train(config: RunConfig, stop: launch.StopSignal) -> int:
    """This process's rank of a run: its parts first (data, start model, teacher), then the run itself."""
    level = logging.INFO if launch.is_main_rank() else logging.ERROR
    logging.basicConfig(format="hybrid: %(message)s", level=logging.WARNING)
    for package in ("inference_v2", "hybrid", "trainers", "recipes"):
        logging.getLogger(package).setLevel(level)
    if launch.is_rank():
        launch.leave_with_launcher()
    with locked(Path(config.output_dir)) if launch.is_main_rank() else contextlib.nullcontext():
        prepared = prepare(config, stop)
        if prepared is None:
            return stop.exit_code
        from trainers.loop import train as run_loop

        result = run_loop(prepared, stop=stop)
        if result.stopped_by_signal:
            say_stopped(result.steps)
            return stop.exit_code
        if launch.is_main_rank():
            print("\n".join(summary(prepared)))
    return 0


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Two runs in one folder would overwrite each other. The lock goes with the process, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(
                f"output_dir={folder} is in use by another run; wait for it, or give another output_dir"
            ) from None
        yield
