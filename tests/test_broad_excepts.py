"""No handler takes more than it can answer for: a broad one raises again, or stands here with its reason."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path for folder in ("inference_v2", "hybrid", "trainers", "recipes", "tests") for path in (ROOT / folder).rglob("*.py")
)
RANKS = "the other ranks wait in a collective: the error is kept, told to all, and raised on all"
USERS = "code of the user, which may raise whatever it likes: it becomes a ValueError that names what was called"
TOKENIZERS = "tokenizers raises a bare Exception for text it cannot encode; every other class of exception is raised again"
ALLOWED = {
    ("hybrid/engine.py", "summed"): RANKS,
    ("hybrid/folders.py", "write_folder"): RANKS + "; torch's CheckpointException is a BaseException",
    ("hybrid/training/background.py", "run"): "a thread: what its work raises is kept, and raised by the verb that waits for it",
    ("hybrid/training/universal.py", "_read"): "torch raises the unpickler's errors and what a broken archive leads to",
    ("inference_v2/loading.py", "load_tokenizer"): "tokenizers raises bare Exceptions, transformers whatever a bad file leads to",
    ("recipes/cli.py", "main"): "the door of the program: Ctrl-C ends it with a word and a status, not a traceback",
    ("recipes/doctor/examine.py", "_rows"): "a check that fails is a FAIL of the report, and the other rows must be seen",
    ("tests/pool.py", "_serve"): "runs in a rank: the test gets the traceback, of any kind, and raises it",
    ("trainers/backends/hf.py", "generate_together"): RANKS,
    ("trainers/backends/vllm.py", "_ask"): RANKS,
    ("trainers/backends/vllm_worker.py", "serve"): "a process of its own: the error is its answer, which the parent raises",
    ("trainers/backends/weights.py", "for_each_layer"): RANKS,
    ("trainers/data/prompts.py", "load_prompts"): TOKENIZERS,
    ("trainers/deadline.py", "run"): "a thread: what others' code raises is its answer; Ctrl-C reaches the one that waits",
    ("trainers/environments/conversations.py", "check"): USERS,
    ("trainers/environments/messages.py", "_ids"): TOKENIZERS,
    ("trainers/environments/registry.py", "_imported"): USERS,
    ("trainers/rewards/functions.py", "load"): USERS,
    ("trainers/rewards/rewards.py", "_together"): RANKS,
    ("trainers/rewards/rewards.py", "_finite"): USERS,
}


# Of these, those that take KeyboardInterrupt too.
UNINTERRUPTED = {
    ("hybrid/training/background.py", "run"),
    ("recipes/cli.py", "main"),
    ("tests/pool.py", "_serve"),
    ("trainers/deadline.py", "run"),
}


@dataclass(frozen=True)
class Broad:
    """A handler, or a `suppress`, that takes every Exception and does not end in a bare `raise`."""

    function: str
    line: int
    takes_interrupts: bool


def kinds_of(kinds: list[ast.expr]) -> set[str]:
    names = [name for kind in kinds for name in (kind.elts if isinstance(kind, ast.Tuple) else [kind])]
    return {ast.unparse(name).rpartition(".")[2] for name in names}


def swallowing(node: ast.AST, function: str = "") -> Iterator[Broad]:
    for child in ast.iter_child_nodes(node):
        inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        kinds: set[str] = set()
        if isinstance(child, ast.ExceptHandler):
            last = child.body[-1]
            if child.type is None:  # also one that raises again: BaseException says it in words
                kinds = {"BaseException"}
            elif not (isinstance(last, ast.Raise) and last.exc is None):
                kinds = kinds_of([child.type])
        if isinstance(child, ast.Call) and ast.unparse(child.func).rpartition(".")[2] == "suppress":
            kinds = kinds_of(child.args)
        if kinds & {"Exception", "BaseException", "KeyboardInterrupt"}:
            yield Broad(inner, child.lineno, not kinds.isdisjoint({"BaseException", "KeyboardInterrupt"}))
        yield from swallowing(child, inner)


def found(text: str) -> list[Broad]:
    return list(swallowing(ast.parse(text)))


def test_each_broad_handler_raises_again_or_stands_above():
    seen = {(str(path.relative_to(ROOT)), one) for path in FILES for one in found(path.read_text(encoding="utf-8"))}
    new = [f"{path}:{one.line} in {one.function}" for path, one in seen if (path, one.function) not in ALLOWED]
    assert not new, f"narrow it, end it in `raise`, or give a reason in ALLOWED: {new}"
    assert {(path, one.function) for path, one in seen} == ALLOWED.keys(), "ALLOWED has reasons for what is no more"
    assert {(path, one.function) for path, one in seen if one.takes_interrupts} == UNINTERRUPTED


SWALLOWS, INTERRUPTS = [Broad("f", 4, False)], [Broad("f", 4, True)]


@pytest.mark.parametrize(
    ("handler", "seen"),
    [
        ("except: pass", INTERRUPTS),
        ("except:\n  raise", INTERRUPTS),
        ("except BaseException: pass", INTERRUPTS),
        ("except BaseException:\n  drop()\n  raise", []),
        ("except Exception as e:\n  raise ValueError('x') from e", SWALLOWS),
        ("except Exception:\n  if x:\n    raise", SWALLOWS),
        ("except (OSError, Exception): pass", SWALLOWS),
        ("except builtins.Exception: pass", SWALLOWS),
        ("except (OSError, ValueError): pass", []),
        ("except KeyboardInterrupt: pass", INTERRUPTS),
        ("except* Exception: pass", SWALLOWS),
    ],
)
def test_the_lint_sees(handler, seen):
    assert found(f"def f():\n try:\n  pass\n {handler.replace(chr(10), chr(10) + ' ')}") == seen


def test_the_lint_sees_suppress():
    assert found("with contextlib.suppress(OSError, Exception): pass") == [Broad("", 1, False)]
    assert found("with suppress(OSError): pass") == []
