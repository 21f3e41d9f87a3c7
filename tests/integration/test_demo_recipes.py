"""Every demo recipe as it is shipped, on a tiny model: two steps, and the same after a stop between them, bit for bit."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from trainer_cases import tiny_folder

from recipes.parts import with_paths
from recipes.settings import load_settings
from trainers.loop import train

SHIPPED = Path(__file__).parents[2] / "recipes"
# What the recipe says of sizes is cut to what a test has time for, and the reward is one that a random model gets now and then;
# all else is as shipped.
REWARD = 'rewards=[{name: "regex:^[0-4]"}]'
RECIPES = {
    "sft/demo.yaml": ["train.batch_size=8"],
    "sft/demo_start.yaml": ["train.batch_size=8"],
    "sft/demo_student.yaml": ["train.batch_size=8"],
    "reward/demo.yaml": ["train.batch_size=8"],
    "ppo/demo.yaml": ["rollout.prompts_per_step=16", "critic.warmup_steps=1", REWARD],
    "grpo/demo.yaml": ["rollout.prompts_per_step=4", REWARD],
    "opsd/demo.yaml": ["rollout.prompts_per_step=8"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model with the demos' characters, and another one, for a teacher."""
    folder = tmp_path_factory.mktemp("models")
    return [tiny_folder(folder / name, seed=seed, characters="0123456789+=") for seed, name in enumerate(("model", "teacher"))]


def run(recipe, folder: Path, models, *, stop_after: int | None = None, changes: tuple[str, ...] = ()):
    teacher = [f"teacher={{path: {models[1]}}}"] if recipe.startswith("opsd") else []
    overrides = [
        *RECIPES[recipe], *teacher, "max_steps=2", "data.max_eval=4", "data.max_train=64", "checkpoint.every=1",
        "log.console=false", f"output_dir={folder}", f"model={{path: {models[0]}}}", "engine.optimizer.warmup_steps=0", *changes,
    ]  # fmt: skip
    config = with_paths(load_settings(recipe, overrides))
    steps = []
    return train(config, stop=lambda: stop_after in steps, on_step=lambda step, record: steps.append(step))


def weights(folder: Path):
    return {f"{path.parent.name}/{name}": t for path in folder.glob("*/model.safetensors") for name, t in load_file(path).items()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_steps_are_those_of_a_stopped_and_resumed_run(recipe, models, tmp_path):
    assert run(recipe, tmp_path / "whole", models).steps == 2
    stopped = run(recipe, tmp_path / "parts", models, stop_after=1)
    assert (stopped.steps, stopped.stopped_by_signal) == (1, True)
    assert run(recipe, tmp_path / "parts", models).steps == 2
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert expected.keys() == found.keys()
    assert any(name.startswith("critic/") for name in found) == recipe.startswith("ppo")
    assert all((expected[name] == found[name]).all() for name in expected)
    start = load_file(Path(models[0]) / "model.safetensors")
    assert any((found[f"model/{name}"] != tensor).any() for name, tensor in start.items()), "nothing was trained"


def methods() -> list[str]:
    """The other methods that the GRPO demo's comment names, as it writes them."""
    lines = (SHIPPED / "grpo/demo.yaml").read_text().partition("The same with other methods")[2].splitlines()[1:]
    return [line.removeprefix("#   ").partition("  (")[0].strip() for line in lines if line.startswith("#   ")]


def test_the_methods_that_the_grpo_demo_names_train_and_differ(models, tmp_path):
    named = methods()
    assert len(named) == 6
    rare = 'rewards=[{name: "regex:^4"}]'  # some groups see none of it
    found = {}
    for i, method in enumerate(("", *named)):
        assert run("grpo/demo.yaml", tmp_path / str(i), models, changes=(rare, *method.split())).steps == 2
        found[method] = load_file(tmp_path / str(i) / "model/model.safetensors")
    start = load_file(Path(models[0]) / "model.safetensors")
    assert all(any((one[name] != start[name]).any() for name in start) for one in found.values())
    for method in named:
        assert any((found[""][name] != found[method][name]).any() for name in start), f"{method} changes nothing"


def test_every_demo_is_here():
    shipped = {f"{p.parent.name}/{p.name}" for p in SHIPPED.glob("*/demo*.yaml")}
    assert shipped == set(RECIPES)
