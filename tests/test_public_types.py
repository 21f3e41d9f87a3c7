"""What is public says its types, and a type checker that finds the packages as installed refuses a wrong call."""

import ast
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("inference_v2", "hybrid", "trainers", "recipes")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
# Bodies of triton.jit, whose annotations mean something else to Triton, and what it alone imports; a comparison that needs TRL.
UNIMPORTED = ("inference_v2.kernels.triton.", "recipes.bench.peer_trl")
MODULES = [
    info.name
    for package in PACKAGES
    for info in pkgutil.walk_packages([str(ROOT / package)], f"{package}.")
    if not info.name.startswith(UNIMPORTED)
]
EXPORTS = {
    "hybrid": (
        "HybridEngine",
        "TrainingEngine",
        "add_config_arguments",
        "checkpointing",
        "comm",
        "init_distributed",
        "initialize",
        "zero",
    ),
    "inference_v2": ("Completion", "InferenceEngine", "Request", "SamplingParams"),
}
RIGHT = """
import hybrid
import hybrid.comm as dist
from hybrid import HybridEngine, TrainingEngine, add_config_arguments, init_distributed, zero
from inference_v2 import InferenceEngine, SamplingParams
from torch import nn

init_distributed("gloo")
engine, optimizer, loader, schedule = hybrid.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1})
trained: TrainingEngine = engine
rank: int = hybrid.comm.get_rank()
with zero.GatheredParameters(nn.Linear(2, 2).parameters(), modifier_rank=0):
    dist.barrier()
hybrid.checkpointing.checkpoint(nn.ReLU(), nn.Linear(2, 2).weight)
sampling = SamplingParams(max_new_tokens=1)
"""
WRONG = {  # a call, and the code of mypy's error
    "hybrid.initialize(model=3)": "arg-type",
    'hybrid.comm.get_rank("x", 1, 2)': "call-arg",
    'dist.get_rank("x")': "arg-type",
    "dist.all_reduce(3)": "arg-type",
    "size: str = dist.get_world_size()": "assignment",
    "hybrid.initialise()": "attr-defined",
    "from inference_v2 import InferenceEngin": "attr-defined",
    "SamplingParams(num_samples='many')": "arg-type",
    "engine.step(1, 2, 3)": "call-arg",
}
# Of libraries, only what the packages' own signatures are made of is read: torch's compilers and transformers would double the
# time. `make check` reads all.
CONFIG = """
[mypy]
plugins = pydantic.mypy
ignore_missing_imports = true
check_untyped_defs = true

[mypy-transformers.*,sympy.*,torch._inductor.*,torch._dynamo.*,torch.fx.*,torch.export.*,torch._export.*,torch.onnx.*,\
torch._higher_order_ops.*,torch._refs.*,torch._decomp.*,torch.ao.*,torch.testing.*,torch._prims.*,torch._functorch.*,torch.jit.*]
follow_imports = skip
"""


def unannotated(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list):
            continue
        given = node.args
        rest = [one for one in (given.vararg, given.kwarg) if one is not None]
        names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs, *rest) if one.annotation is None]
        lacking = [name for name in names if name not in ("self", "cls")] + ["return"] * (node.returns is None)
        if lacking:
            yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {', '.join(lacking)}"


def test_every_parameter_and_return_has_a_type():
    assert not [line for path in FILES for line in unannotated(path)]


def functions_of(module: types.ModuleType) -> Iterator[tuple[str, Callable[..., typing.Any]]]:
    """Those that are written in the module, methods and properties too."""
    for name, value in vars(module).items():
        members = (
            [(f"{name}.{key}", member) for key, member in vars(value).items()] if inspect.isclass(value) else [(name, value)]
        )
        for qualified, member in members:
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            function = inspect.unwrap(function) if callable(function) else function
            written = inspect.isfunction(function) and function.__code__.co_filename == module.__file__
            if written and function.__name__ != "<lambda>":
                yield qualified, function


def checker_names(module: types.ModuleType) -> dict[str, object]:
    """What a module imports for type checkers only, since it is heavy or imports the module itself."""
    found: dict[str, object] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for line in (line for line in node.body if isinstance(line, ast.ImportFrom)):
                home = line.module or ""
                source = None if home.startswith(UNIMPORTED) else importlib.import_module(home)
                found |= {a.asname or a.name: object if source is None else getattr(source, a.name) for a in line.names}
    return found


@pytest.mark.parametrize("name", MODULES)
def test_types_are_names_that_exist(name):
    module = importlib.import_module(name)
    known = checker_names(module)
    for qualified, function in functions_of(module):
        hints = typing.get_type_hints(function, localns=known)  # NameError for what does not exist
        parameters = set(inspect.signature(function).parameters) - {"self", "cls"}
        assert parameters | {"return"} <= hints.keys(), f"{name}.{qualified}"


@pytest.mark.parametrize("package", EXPORTS)
def test_exports_are_there_and_nothing_else(package):
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(EXPORTS[package])
    for name in EXPORTS[package]:
        assert getattr(module, name).__name__.rpartition(".")[2] == name
    with pytest.raises(AttributeError, match="no_such"):
        _ = module.no_such


def test_packages_ship_the_marker_of_their_types():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").is_file()
        assert "py.typed" in data[package]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What mypy says of the packages, of RIGHT and of WRONG, from a folder that is not the project's: it takes the packages from
    the interpreter's path, as installed, and only if they have py.typed."""
    folder = tmp_path_factory.mktemp("checked")
    (folder / "mypy.ini").write_text(CONFIG)
    (folder / "right_calls.py").write_text(RIGHT)
    (folder / "wrong_calls.py").write_text("\n".join((RIGHT.strip(), *WRONG)))
    modules = [part for package in PACKAGES for part in ("-p", package)]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", "cache", *modules, "-m", "right_calls", "-m", "wrong_calls"],
        capture_output=True, text=True, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def errors(report: str) -> list[str]:
    return [line for line in report.splitlines() if ": error: " in line]


def test_the_packages_and_a_right_caller_pass_the_type_checker(checked):
    assert not [line for line in errors(checked) if not line.startswith("wrong_calls.py:")]


@pytest.mark.parametrize("call", WRONG)
def test_the_type_checker_refuses(checked, call):
    line = len(RIGHT.strip().splitlines()) + 1 + list(WRONG).index(call)
    of_line = [error for error in errors(checked) if error.startswith(f"wrong_calls.py:{line}:")]
    assert [error for error in of_line if error.endswith(f"[{WRONG[call]}]")], checked
