"""The process behind the reward math_verify.

It reads a JSON object a line, {"answer": text, "completion": text or null}, and writes a number a line: 1.0 where they are equal
or, without a completion, where the answer has a formula; else 0.0.

Run by its path, so that it imports nothing of ours. Its argument is the seconds that a line may take.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
from functools import lru_cache
from typing import Any

MOST_MEMORY = 4 * 2**30  # bytes of address space: a huge number is an error here, not the end of the machine
DELIMITERS = ("$", r"\(", r"\[", r"\boxed")


def main(seconds: int) -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no reply
    logging.disable(logging.CRITICAL)  # math-verify warns at each call that its own time-out, a signal, is off
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    from math_verify import parse, verify

    def formulas(text: str) -> list[Any]:
        return parse(text.replace("\u2212", "-"), parsing_timeout=None)  # a minus sign, which math-verify reads in LaTeX only

    @lru_cache(maxsize=4096)
    def of_answer(answer: str) -> list[Any]:
        answer = answer.rpartition("####")[2].strip()
        return formulas(answer if any(d in answer for d in DELIMITERS) else rf"\boxed{{{answer}}}")

    print("ready", file=replies)
    for line in sys.stdin:
        limit_processor_time(seconds)
        request = json.loads(line)
        expected, completion = of_answer(request["answer"]), request["completion"]
        equal = bool(expected) and (completion is None or verify(expected, formulas(completion), timeout_seconds=None))
        print(float(equal), file=replies)


def limit_processor_time(seconds: int) -> None:
    """The parent kills who takes too long. Where it is gone, the system does."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime) + seconds + 1
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


if __name__ == "__main__":
    main(int(sys.argv[1]))
