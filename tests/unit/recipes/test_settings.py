import sys
from pathlib import Path

import pytest

from recipes.preflight import check_files
from recipes.settings import RECIPES, SettingsError, find_recipe, known_keys, load_settings, parse_override
from trainers.config import OPSDConfig

MINIMAL = "recipe: opsd\nmodel: {path: student}\nteacher: {path: teacher}\ndata: {train: rows.jsonl}\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def _write(text: str, name: str = "r.yaml") -> str:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
        return name

    return _write


def refused(name, *overrides) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        load_settings(name, overrides)
    assert all("\n" not in line for line in caught.value.lines)
    return caught.value.lines


def test_output_dir_defaults_to_the_name_of_the_file(write):
    assert load_settings(write(MINIMAL, "mine/my_run.yaml")).output_dir == "runs/my_run"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*/*.yaml")), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_shipped_recipes_load_by_name(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # away from the clone
    load_settings(f"recipes/{path.parent.name}/{path.name}")


def test_no_two_shipped_recipes_write_to_one_folder():
    folders = [load_settings(f"recipes/{path.parent.name}/{path.name}").output_dir for path in RECIPES.glob("*/*.yaml")]
    assert len(folders) >= 20
    assert len(set(folders)) == len(folders)
    reward = load_settings("recipes/reward/qwen3_0.6b.yaml").output_dir
    ppo = load_settings("recipes/ppo/qwen3_0.6b.yaml")
    assert ppo.rewards[0].model == ppo.critic.path == f"{reward}/model"


def test_shipped_recipes_carry_their_run_line():
    for path in RECIPES.glob("*/*.yaml"):
        assert f"hybrid train recipes/{path.parent.name}/{path.name}" in path.read_text(), path


def test_overrides_are_yaml_scalars_along_dotted_paths(write):
    config = load_settings(
        write(MINIMAL),
        ["engine.optimizer.lr=1e-4", "eval.reward=regex:^Answer:", "checkpoint.every=null", "engine.optimizer.betas=[0.8, 0.9]"],
    )
    assert config.engine.optimizer.lr == 1e-4
    assert config.engine.optimizer.betas == (0.8, 0.9)
    assert config.eval.reward == "regex:^Answer:"
    assert config.checkpoint.every is None


@pytest.mark.parametrize(
    ("text", "value"),
    [("a=1e-5", 1e-5), ("a=3", 3), ("a=true", True), ("a=", None), ("a='3'", "3"), ("a=x=y", "x=y"), ("a={b: 1}", {"b": 1})],
)
def test_an_override_keeps_the_type_that_yaml_gives_it(text, value):
    assert parse_override(text) == (["a"], value)


def test_floats_without_a_dot_are_numbers_in_files_too(write):
    name = write(
        "recipe: sft\ndata: {train: x.jsonl}\nmodel: {new: {architecture: qwen3, characters: ab, settings: {rms_norm_eps: 1e-5}}}"
    )
    assert load_settings(name).model.new.settings["rms_norm_eps"] == 1e-5


def test_every_problem_gets_a_line_with_its_path_and_the_nearest_known_key(write):
    lines = refused(write(MINIMAL + "max_step: 3\nlog: 5\nengine: {optimizer: {lrs: 1, lr: abc}}"), "teacher.pth=x", "lr=1")
    text = "\n".join(lines)
    assert len(lines) == 6
    assert "max_step: unknown key; the nearest known one is max_steps" in text
    assert "engine.optimizer.lrs: unknown key; the nearest known one is engine.optimizer.lr" in text
    assert "teacher.pth: unknown key; the nearest known one is teacher.path" in text
    assert "r.yaml: lr: unknown key; the nearest known one is engine.optimizer.lr" in text
    assert "engine.optimizer.lr='abc'" in text
    assert "log=5" in text


def test_defaults_that_follow_from_a_wrong_field_are_no_problems_of_their_own(write):
    (line,) = refused(write(MINIMAL + "engine: {optimizer: {name: muons}}"))
    assert "engine.optimizer.name='muons': Input should be 'adamw', " in line


REWARDED = "recipe: ppo\nmodel: {path: student}\ndata: {train: rows.jsonl}\n"


def test_problems_of_a_list_s_items_have_their_place_and_their_own_keys(write):
    rewards = "[{name: exact_match, weigth: 2}, {modl: z}, {model: z, recipe: r}, {model: z, ofload: true}]"
    lines = refused(write(REWARDED + f"rewards: {rewards}\ncritic: {{optimizer: {{lrr: 1}}}}\nreference: {{pth: a}}"))
    assert [line.removeprefix("r.yaml: ") for line in lines] == [
        "rewards.0.weigth: unknown key; the nearest known one is rewards.0.weight",
        "rewards.1.name: missing, and it has no default",
        "rewards.1.modl: unknown key; the nearest known one is model",
        "rewards.2: give exactly one of model (a HF folder or hub name) and recipe (which trains it)",
        "rewards.3.ofload: unknown key; the nearest known one is rewards.3.offload",
        "reference.pth: unknown key; the nearest known one is reference.path",
        "critic.optimizer.lrr: unknown key; the nearest known one is critic.optimizer.lr",
    ]
    assert "rewards is empty; allowed: one component or more, each with `name`," in refused(write(REWARDED + "rewards: []"))[0]
    assert not load_settings(write(REWARDED + "rewards: []\nrollout: {environment: {name: calculator}}")).rewards


@pytest.mark.parametrize(
    "override",
    ["max_steps='1'", "max_steps=true", "seed=true", "seed=1.5", "engine.dropout=yes_please", "engine.dropout=1",
     "engine.optimizer.lr='1e-4'", "engine.optimizer.betas=[0.9, '0.95']", "engine.zero_stage=true", "engine.zero_stage=4",
     "engine.rollout.engine.block_size='16'", "rollout.sampling.stop=x", "rollout.sampling.stop_token_ids=['1']",
     "engine.freeze=[1]", "output_dir=3"],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_and_not_converted(write, override):
    (line,) = refused(write(MINIMAL), override)
    assert override.partition("=")[0] in line


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: !!python/object/apply:os.system [touch pwned]", "YAML tag"),
        ("a: !mine 3", "YAML tag"),
        ("a: &x 1\nb: *x", "aliases"),
        ("a: 1\na: 2", "given twice"),
        ("a: {b: 1, b: 2}", "given twice"),
        ("- 1", "holds list at the top"),
        ("", "holds NoneType at the top"),
        ("a: [1", "not valid YAML"),
        ("? [1, 2]\n: 3", "a key must be plain text"),
        ("recipe: [sft]", "allowed: opsd, sft"),
        ("a: 2020-13-45", "not a value"),
        ("a: " + "9" * 5000, "not a value"),
        ('a: "x\\0"', "zero byte"),
        ("a: " + "[" * 3000 + "]" * 3000, "nested more than"),
        ("recipe: ppoo", "allowed: opsd, sft"),
        ("model: {path: x}", "no `recipe:` key"),
    ],
)
def test_bad_yaml_is_one_line_and_nothing_runs(write, text, says):
    (line,) = refused(write(text))
    assert says in line
    assert not Path("pwned").exists()


def test_an_override_is_yaml_without_tags_as_well(write):
    (line,) = refused(write(MINIMAL), "data.train=!!python/name:os.system x")
    assert "YAML tag" in line


@pytest.mark.parametrize("text", ["max_steps", "=3", "a..b=3", "a b=3"])
def test_an_override_without_a_key_path_is_refused(text):
    with pytest.raises(SettingsError, match=r"section\.key=value"):
        parse_override(text)


def test_an_override_below_a_plain_value_is_refused(write):
    (line,) = refused(write(MINIMAL), "max_steps.a=3")
    assert "max_steps" in line


def test_relative_paths_are_taken_from_the_working_directory_then_from_the_recipe(write):
    name = write(MINIMAL.replace("{path: teacher}", "{recipe: t.yaml}"), "mine/r.yaml")
    write(MINIMAL, "mine/t.yaml")
    write("{}", "mine/rows.jsonl")
    config = load_settings(name)
    assert (config.data.train, config.teacher.recipe, config.model.path) == ("mine/rows.jsonl", "mine/t.yaml", "student")
    write("{}", "rows.jsonl")
    assert load_settings(name).data.train == "rows.jsonl"


def test_so_are_those_of_policy_optimisation(write):
    sections = "rewards: [{model: judge}, {recipe: r.yaml}, {name: exact_match}]\nreference: {path: base}\n"
    name = write(REWARDED + sections + "critic: {path: judge}\nptx: {data: texts.jsonl}", "mine/p.yaml")
    write(MINIMAL, "mine/r.yaml")
    for file in ("judge/config.json", "base/config.json", "texts.jsonl"):
        write("{}", f"mine/{file}")
    config = load_settings(name)
    assert (config.reference.path, config.critic.path, config.ptx.data) == ("mine/base", "mine/judge", "mine/texts.jsonl")
    assert (config.rewards[0].model, config.rewards[1].recipe) == ("mine/judge", "mine/r.yaml")
    write("{}", "judge/config.json")
    assert (load_settings(name).critic.path, load_settings(name).rewards[0].model) == ("judge", "judge")


def test_so_is_an_adapter_which_must_be_there_before_anything_starts(write):
    name = write(MINIMAL + "engine: {lora: {path: adapter}}", "mine/r.yaml")
    for file in ("student/config.json", "teacher/config.json", "mine/rows.jsonl", "mine/adapter/adapter_config.json"):
        write("{}", file)
    write("{}", "rows.jsonl")
    assert load_settings(name).engine.lora.path == "mine/adapter"
    check_files(load_settings(name, ["model.path=./student", "teacher.path=./teacher"]))
    Path("mine/adapter/adapter_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"engine\.lora\.path=mine/adapter: no adapter folder there"):
        check_files(load_settings(name, ["model.path=./student", "teacher.path=./teacher"]))
    assert "rank: unknown key" in refused(name, "engine.lora.rank=3")[0]


def test_a_backends_sampling_and_interpreter_are_judged_before_anything_starts(write):
    name = write(MINIMAL)
    for file in ("student/config.json", "teacher/config.json", "rows.jsonl"):
        write("{}", file)
    assert "min_p=0.1 with rollout.backend=hf" in refused(name, "rollout.backend=hf", "rollout.sampling.min_p=0.1")[0]
    local = ["model.path=./student", "teacher.path=./teacher"]
    vllm = [*local, "rollout.backend=vllm", "rollout.vllm.python=venv/bin/python"]
    with pytest.raises(FileNotFoundError, match=r"rollout\.vllm\.python=venv/bin/python: no program"):
        check_files(load_settings(name, vllm))
    check_files(load_settings(name, [*vllm[:-1], f"rollout.vllm.python={sys.executable}"]))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("critic: {path: ./nope}", r"critic\.path=\./nope: no Hugging Face folder"),
        ("reference: {path: ./nope}", r"reference\.path=\./nope: no Hugging Face folder"),
        ("ptx: {data: nope.jsonl}", r"ptx\.data=nope\.jsonl: no such file"),
        ("rollout: {environment: {name: calculatr}}", "environment 'calculatr' is unknown; did you mean calculator"),
        ("rollout: {environment: {name: calculator, settings: {openin: x}}}", "environment calculator: settings .*openin"),
    ],
)
def test_whatever_a_policys_recipe_names_must_be_there(write, lines, message):
    for file in ("student/config.json", "rows.jsonl"):
        write("{}", file)
    text = "recipe: ppo\nmodel: {path: ./student}\ndata: {train: rows.jsonl}\nrewards: [{name: exact_match}]\n"
    check_files(load_settings(write(text)))
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        check_files(load_settings(write(text + lines)))
    with pytest.raises(FileNotFoundError, match=r"rewards\.1\.model=\./nope: no Hugging Face folder"):
        check_files(load_settings(write(text.replace("exact_match}]", "exact_match}, {model: ./nope}]"))))


def test_a_section_that_nobody_wrote_has_nothing_set(write):
    config = load_settings(write(REWARDED + "rewards: [{name: exact_match}]"))
    assert (config.reference.model_fields_set, config.critic.model_fields_set) == (set(), set())


def test_paths_of_programs_and_seeds_of_adapters_are_the_runs(write):
    write("", "mine/venv/python")
    name = write(
        MINIMAL + "seed: 5\nengine: {lora: {r: 2}}\nrollout: {backend: vllm, vllm: {python: venv/python}}", "mine/r.yaml"
    )
    assert load_settings(name).rollout.vllm.python == "mine/venv/python"
    assert load_settings(name, ["rollout.vllm.python=~/python"]).rollout.vllm.python == str(Path.home() / "python")
    assert load_settings(name, ["rollout.vllm.python=python3"]).rollout.vllm.python == "python3"
    assert load_settings(name).engine.lora.seed == 5
    assert load_settings(name, ["engine.lora.seed=0"]).engine.lora.seed == 0


def test_a_missing_recipe_names_the_nearest_shipped_one():
    with pytest.raises(FileNotFoundError, match=r"recipes/opsd/demo\.yaml"):
        find_recipe("recipes/opsd/dem.yaml")


def test_a_fresh_model_takes_the_runs_seed_unless_it_has_one(write):
    name = write("recipe: sft\ndata: {train: x.jsonl}\nmodel: {new: {architecture: qwen3, characters: ab}}")
    assert load_settings(name, ["seed=5"]).model.new.seed == 5
    assert load_settings(name, ["model.new.seed=0", "seed=5"]).model.new.seed == 0


def test_a_teacher_is_frozen_unless_it_says_otherwise(write):
    assert load_settings(write(MINIMAL)).teacher.kind == "frozen"
    name = write(MINIMAL.replace("{path: teacher}", "{kind: self, ema_decay: 2}"))
    (line,) = refused(name)
    assert "teacher.ema_decay=2" in line


def test_known_keys_reach_through_unions():
    keys = set(known_keys(OPSDConfig))
    assert {"max_steps", "teacher.recipe", "teacher.weights", "rollout.sampling.top_p", "model.new.seed"} <= keys
