"""The shape of the project, checked: who may import whom, what is heavy, what is never used, and README's tree."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("inference_v2", "hybrid", "trainers", "recipes")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
# What decides on the host or describes a run, and must be importable (and testable) without torch.
NO_TORCH = (
    "inference_v2",
    "inference_v2.config",
    "inference_v2.types",
    "inference_v2.sequence",
    "inference_v2.blocks",
    "inference_v2.scheduler",
    "hybrid",
    "hybrid.config",
    "hybrid.training.config.top",
    "hybrid.optim.loss_scale",
    "hybrid.optim.rates",
    "trainers.config",
    "trainers.types",
    "trainers.deadline",
    "trainers.rewards",
    "trainers.environments.config",
    "trainers.environments.environment",
    "trainers.environments.registry",
    "trainers.backends.config",
    "trainers.data.order",
    "recipes.cli",
    "recipes.launch",
    "recipes.settings",
    "recipes.data",
)
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "torch.save", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system"}
UNPICKLES = "hybrid/training/universal.py"  # DeepSpeed's files, by torch's restricted unpickler; its docstring says why


def test_imports_flow_one_way():
    # In a process of its own: import-linter configures logging, which turns off every logger that exists.
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_host_decisions_and_configs_import_no_torch():
    code = f"import sys\nfor m in {NO_TORCH}:\n    __import__(m)\n    assert 'torch' not in sys.modules, m"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_unpickles_evaluates_or_loads_yaml_objects(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").split(".")[0]}
        else:
            names = set()
        assert not names & FORBIDDEN_MODULES, f"{path}:{node.lineno}"
        if isinstance(node, ast.Call):
            restricted = {k.arg: ast.unparse(k.value) for k in node.keywords}.get("weights_only") == "True"
            allowed = {"torch.load"} if restricted and path == ROOT / UNPICKLES else set()
            assert ast.unparse(node.func) not in FORBIDDEN_CALLS - allowed, f"{path}:{node.lineno}"
            assert not any(k.arg == "shell" and ast.unparse(k.value) == "True" for k in node.keywords), f"{path}:{node.lineno}"


def readme_tree() -> dict[str, str]:
    """Path -> line of the tree in README: folders end in "/", each level is indented by two spaces."""
    block = re.search(r"```text tree\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert block, "README has no ```text tree block"
    paths: dict[str, str] = {}
    folders: list[str] = []
    for line in block[1].splitlines():
        indent, name, text = re.fullmatch(r"( *)(\S+)\s*(.*)", line).groups()
        del folders[len(indent) // 2 :]
        path = "".join(folders) + name
        paths[path] = text
        if name.endswith("/"):
            folders.append(name)
    return paths


def test_the_tree_in_readme_is_true():
    tree = readme_tree()
    missing = [path for path in tree if not (ROOT / path).exists()]
    assert not missing, f"README lists what is not there: {missing}"
    unlisted = [str(p.relative_to(ROOT)) for p in FILES if p.name != "__init__.py" and str(p.relative_to(ROOT)) not in tree]
    unlisted += [r for p in (ROOT / "recipes").glob("*/*.yaml") if (r := str(p.relative_to(ROOT))) not in tree]
    assert not unlisted, f"README's tree lacks: {unlisted}"
    assert not [path for path, text in tree.items() if not text], "every line of the tree says what the file is for"


def test_dependencies_are_justified_in_contributing():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.findall(r'^    "([A-Za-z0-9_.-]+)', text.partition("dependencies = [")[2].partition("]")[0], re.M)
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert listed
    assert not [name for name in listed if f"| {name} |" not in contributing]
