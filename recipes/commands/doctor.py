"""`hybrid doctor`: a table of what is right and wrong with a recipe, its models and its data."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from recipes.settings import SettingsError, load_settings

EXAMPLES = """\
examples:
  hybrid doctor recipes/opsd/smollm2_self_teacher.yaml model.path=models/smollm2
  hybrid doctor my_recipe.yaml engine.compute_dtype=bfloat16 --nproc 8 --strict
  hybrid doctor my_recipe.yaml --json | jq '.rows[] | select(.level != "ok")'

Nothing is trained, no weights are read and no GPU is needed. Reward functions and URLs are called on one row; models that are
named by their hub name are fetched, as a run would.
Models that another recipe is to train first are judged by what that recipe starts from; examine the recipe itself too.
Exit code: 0, or 2 where a row says FAIL (with --strict: or warn), or where the recipe cannot be read.
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "doctor",
        help="examine a recipe, its models and its data",
        description="Examine a recipe, its models and its data without training, and print what was found.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG.yaml", help="a path, or the name of a recipe shipped with the package")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks that the run will have; default 1")
    parser.add_argument("--rows", type=int, default=10_000, metavar="N", help="read so many rows of each data set; default 10000")
    parser.add_argument("--strict", action="store_true", help="exit code 2 for warnings too")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return parser


def run(args: argparse.Namespace) -> int:
    for name in ("nproc", "rows"):
        if getattr(args, name) < 1:
            raise SettingsError(f"--{name} {getattr(args, name)}; allowed: 1 or more")
    config = load_settings(args.config, args.overrides)
    logging.basicConfig(format="hybrid: %(message)s", level=logging.ERROR)
    from recipes.doctor.examine import examine
    from recipes.doctor.finding import as_json, exit_code, print_table

    findings = examine(config, nproc=args.nproc, max_rows=args.rows)
    if args.json:
        print(as_json(args.config, findings))
    else:
        print_table(args.config, findings)
    return exit_code(findings, strict=args.strict)
