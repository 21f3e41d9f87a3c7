from typing import Any
import argparse


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    return subparsers.add_parser("plot")


def run(args: argparse.Namespace) -> int:
    raise SystemExit("not yet")
