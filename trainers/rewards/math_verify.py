"""Mathematical equality of completion and answer, by the package math-verify, in a process that can be killed.

SymPy evaluates what a model wrote: "9^{9^{9}}" is minutes inside of one C function, which no thread and no signal handler can
interrupt.
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainers.deadline import Deadline, NotCalled
from trainers.rewards.builtin import answer
from trainers.types import Prompt, Rollout

WORKER = Path(__file__).with_name("math_verify_worker.py")
START_S = 60.0  # for its imports, which do not count against the first call


class MathVerify:
    """A component: 1 where math-verify finds what it reads in the completion equal to the answer.

    An answer is one formula (as if boxed), or, where it has math delimiters or a box, a text with one in it; of an answer with
    "####" what follows the last of them. Raises ValueError where the package is missing.
    """

    def __init__(self, timeout_s: float, batch_timeout_s: float) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError("reward math_verify needs the package math-verify, which is not installed: pip install math-verify")
        self._deadline = Deadline(timeout_s, most_stuck=math.inf)  # none is stuck: its process is killed
        self._batch_timeout_s = batch_timeout_s
        self._process: subprocess.Popen[str] | None = None

    def check(self, prompts: Sequence[Prompt]) -> None:
        rows: dict[str, int] = {}
        for prompt in prompts:
            rows.setdefault(answer(prompt, "math_verify"), prompt.index)
        self._deadline.begin(math.inf)
        for text, row in rows.items():
            found = self._ask(text, None)
            if found != 1.0:
                problem = f": {found}" if isinstance(found, BaseException) else ""
                raise ValueError(f"reward math_verify: row {row} has the answer {text!r}, in which it reads no formula{problem}")

    def values(self, rollouts: Sequence[Rollout]) -> list[Any]:
        self._deadline.begin(self._batch_timeout_s)
        return [self._value(rollout) for rollout in rollouts]

    def close(self) -> None:
        self._deadline.close()
        self._end()

    def _value(self, rollout: Rollout) -> Any:
        try:
            expected = answer(rollout.prompt, "math_verify")
        except ValueError as error:  # a row that `check` has not seen
            return error
        return self._ask(expected, rollout.text)

    def _ask(self, expected: str, completion: str | None) -> Any:
        """The worker's value, or an exception where it took too long or died: the next call then starts another."""
        if self._process is None and (problem := self._open()) is not None:
            return problem
        value = self._deadline.call(_exchange, self._process, {"answer": expected, "completion": completion})
        if isinstance(value, BaseException) and not isinstance(value, NotCalled):
            self._end()
        return value

    def _open(self) -> BaseException | None:
        opened: list[subprocess.Popen[str]] = []
        problem = self._deadline.call(self._start, opened, timeout_s=START_S)
        self._process = next(iter(opened), None)
        if problem is not None:
            self._end()
        return problem

    def _start(self, opened: list[subprocess.Popen[str]]) -> None:
        """In a session of its own: Ctrl-C is for the trainer, which finishes its step. It leaves when its input ends."""
        process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), str(math.ceil(self._deadline.timeout_s))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        opened.append(process)  # before what may hang: then it is killed
        _read(process)  # its first line, once its imports are done

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _exchange(process: subprocess.Popen[str], request: dict[str, str | None]) -> float:
    assert process.stdin is not None, "PIPE"
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    return json.loads(_read(process))


def _read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None, "PIPE"
    if not (line := process.stdout.readline()):
        raise RuntimeError(f"the process of math-verify ended with exit code {process.wait()}")
    return line
