"""The `hybrid` command.

Exit codes: 0 done; 1 the run failed; 2 bad input (one line per problem on stderr); 128 + signal after a signal, a training run
having saved a checkpoint.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import re
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from recipes import launch
from recipes.settings import SettingsError

COMMANDS = ("train", "doctor", "generate", "evaluate", "export", "plot", "bench", "fetch_smollm2")
OUR_PACKAGES = tuple(str(Path(__file__).parents[1] / name) + os.sep for name in ("inference_v2", "hybrid", "trainers", "recipes"))
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
LOST_PEER = re.compile(r"connection (closed|reset|refused)|broken pipe", re.IGNORECASE)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"hybrid: error: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    top = _Parser(
        prog="hybrid",
        description="Train Hugging Face models on their own samples: distillation, PPO, GRPO; reward models and SFT.",
        epilog="Each command explains itself: hybrid train --help",
    )
    top.add_argument("--version", action="version", version=f"hybrid {version('hybrid-rlhf')}")
    subparsers = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"recipes.commands.{name}")
        module.add_parser(subparsers).set_defaults(run=module.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    # A thread that spins at a barrier burns the core that the thread it waits for needs: 5x slower beside one busy process.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch loads
    args = _parse(argv)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers' too; ours is the only progress line
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")  # what it cannot read is said once, by us
    os.environ.setdefault("HF_HUB_VERBOSITY", "critical")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a `module:function` stands beside the recipe that is run
    try:
        return args.run(args)
    except SettingsError as error:
        return _refuse(*error.lines)
    except (ValueError, OSError) as error:
        if _is_failed_write(error):
            print(f"hybrid: error: {_one_line(error)}", file=sys.stderr)
            return 1
        if not _raised_by_us(error):
            raise
        return _refuse(_one_line(error))
    except FloatingPointError as error:
        if launch.is_main_rank():
            print(f"hybrid: error: {_one_line(error)}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        if not (launch.is_rank() and LOST_PEER.search(str(error))):
            raise
        print(f"hybrid: rank {os.environ['RANK']}: lost contact with another rank; leaving", file=sys.stderr, flush=True)
        os._exit(1)  # the teardown of a broken process group may abort, or wait for the lost rank
    except KeyboardInterrupt:
        return 130


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """argparse ends a list of positionals at the first option; `train X.yaml --nproc 2 max_steps=5` is meant to work."""
    top = parser()
    args, rest = top.parse_known_args(argv)
    if rest and (not hasattr(args, "overrides") or any(text.startswith("-") for text in rest)):
        top.error(f"not known: {' '.join(rest)}")
    if rest:
        args.overrides += rest
    return args


def _refuse(*lines: str) -> int:
    """Say what is wrong with the input. Ranks usually meet the same problem: one says it."""
    rank = "" if launch.is_main_rank() else f"rank {os.environ['RANK']}: "
    if rank:
        time.sleep(10)  # rank 0 speaks first, and its launcher then ends this process
    for line in lines:
        print(f"hybrid: {rank}error: {line}", file=sys.stderr)
    return 2


def _raised_by_us(error: Exception) -> bool:
    """Whether one of our checks raised it (or a file named by the user could not be opened), and not some library's inside: a
    fault in the program keeps its traceback."""
    if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)) and error.filename:
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(OUR_PACKAGES)


def _is_failed_write(error: Exception) -> bool:
    folders = sys.modules.get("hybrid.folders")  # which imports torch
    return getattr(error, "errno", None) in FULL or (folders is not None and isinstance(error, folders.FolderError))


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
