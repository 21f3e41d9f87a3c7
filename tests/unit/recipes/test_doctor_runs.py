"""Runs that would not do what was meant: settings and data of a healthy recipe, changed."""

import json

import pytest
from doctor_cases import complaints, copied, edit_json, healthy, of, only_complaint, rows, write_rows

SCHEDULED = {"lr": 1e-3, "schedule": "linear"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return healthy(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole, tmp_path):
    return copied(whole, tmp_path / "recipe")


def reward_of_length(completion, prompt) -> float:
    return -float(len(completion))


def reward_that_raises(completion, prompt) -> float:
    return 1 / len(completion)


# -- generation_config


def test_a_generation_config_that_others_apply_silently(folder):
    edit_json(
        folder / "student" / "generation_config.json",
        lambda c: c.update(top_k=20, temperature=0.6, top_p=1.0, repetition_penalty=1.1, do_sample=True),
    )
    said = only_complaint(rows("opsd", folder))
    assert said.startswith("warn generation_config: ")
    assert "asks for temperature=0.6, top_k=20, repetition_penalty=1.1; it is never read here" in said
    assert "the recipe samples with temperature=1 and no truncation or penalty" in said
    assert "remove temperature, top_k, repetition_penalty" in said


def test_a_generation_config_that_agrees_with_the_recipe(folder):
    edit_json(folder / "student" / "generation_config.json", lambda c: c.update(temperature=0.6))
    assert not complaints(rows("opsd", folder, **{"rollout.sampling.temperature": 0.6}))


# -- sampling


@pytest.mark.parametrize(
    ("recipe", "changes", "level"),
    [
        ("opsd", {"loss": {"divergence": "sampled_token"}, "rollout.sampling.top_p": 0.9}, "warn"),
        ("opsd", {"rollout.sampling.top_p": 0.9}, "ok"),
        ("grpo", {"rollout.sampling.top_p": 0.9}, "warn"),
        ("ppo", {"rollout.sampling.min_new_tokens": 2}, "warn"),
        ("grpo", {"rollout.sampling.temperature": 0.7}, "ok"),
    ],
)
def test_truncated_sampling_under_a_policy_gradient(recipe, changes, level, folder):
    (found,) = of(rows(recipe, folder, **changes), "sampling")
    assert found.level == level
    assert (level == "ok") == (not found.remedy)


def test_one_temperature_for_all(folder):
    (found,) = of(rows("opsd", folder, **{"rollout.sampling.temperature": 0.7}), "sampling")
    assert "drawn with temperature=0.7" in found.found
    assert "loss, teacher: log-probs at temperature 0.7" in found.found


def test_an_evaluation_of_other_responses_than_are_trained(folder):
    said = only_complaint(rows("opsd", folder, **{"eval.max_new_tokens": 2, "rollout.sampling.stop": ["?"]}))
    assert "up to 2 tokens" in said
    assert "max_new_tokens 5 in rollouts; stop ['?'] in rollouts, [] in evaluations" in said


# -- data and lengths


def test_dropped_rows_are_counted(folder):
    found = of(rows("opsd", folder, **{"data.max_prompt_tokens": 14}), "data")[0]
    assert found.level == "warn"
    assert "8 of 10 rows; dropped: 2 prompts over data.max_prompt_tokens" in found.found


def test_held_out_prompts_that_are_trained_on(folder):
    said = only_complaint(rows("opsd", folder, **{"data.eval": str(folder / "sums.jsonl")}))
    assert "10 of 10 held-out prompts are training prompts too, first row 0" in said


@pytest.mark.parametrize(
    ("recipe", "changes", "text"),
    [
        ("opsd", {"engine.rollout.engine.max_model_len": 9}, "policy: data: row 7 has 5 prompt tokens, its response up to 5"),
        ("opsd", {"engine.rollout.engine.max_model_len": 15}, "teacher: data: row 7 has 15 privileged prompt tokens"),
        ("sft", {"engine.rollout.engine.max_model_len": 7}, "policy: data: row 7 has 5 prompt tokens, its response up to 3"),
        ("reward", {"engine.rollout.engine.max_model_len": 7}, "policy: data: row 7 has 5 prompt tokens"),
        ("reward", {"engine.rollout.engine.max_model_len": 8}, "evaluation: data: row 1 has 6 prompt tokens"),
        ("sft", {"eval.max_new_tokens": 60}, "evaluation: data: row"),
    ],
)
def test_responses_without_room(recipe, changes, text, folder):
    said = [f.found for f in of(rows(recipe, folder, **changes), "lengths") if f.level == "FAIL"]
    assert any(line.startswith(text) for line in said), said


def test_positions_that_were_never_trained(folder):
    said = complaints(rows("sft", folder, **{"engine.rollout.engine.max_model_len": 100}))
    assert said == [line for line in said if "max_model_len=100, its config says 64 positions" in line]
    assert len(said) == 1


def test_rows_without_what_the_recipe_reads(folder):
    bare = write_rows(folder / "bare.jsonl", [{"prompt": "1+1="}, {"prompt": "1+2=", "response": "3"}])
    said = complaints(rows("sft", folder, **{"data.train": bare}))
    assert any(line.startswith("FAIL lengths: 1 rows have no response, first row 0") for line in said)
    pairs = complaints(rows("reward", folder, **{"data.train": bare}))
    assert any("row 0 is no pair" in line for line in pairs)


# -- steps


@pytest.mark.parametrize(
    ("recipe", "nproc", "changes", "text"),
    [
        ("opsd", 4, {}, "1 ranks have no prompt to answer: set rollout.prompts_per_step to 4 or more"),
        ("sft", 4, {}, "1 ranks have no prompt to answer: set train.batch_size to 4 or more"),
        ("grpo", 2, {"updates.minibatches": 4}, "some ranks have nothing in some mini-batches"),
        ("grpo", 1, {"updates.minibatches": 4}, "let updates.minibatches divide 6"),
        ("opsd", 1, {"rollout.prompts_per_step": 15}, "a step takes rows of the data 1.5 times"),
    ],
)
def test_shares_of_ranks_and_mini_batches(recipe, nproc, changes, text, folder):
    (found,) = of(rows(recipe, folder, nproc=nproc, **changes), "batch")
    assert found.level == "warn"
    assert text in found.remedy


@pytest.mark.parametrize(
    ("recipe", "changes", "level", "text"),
    [
        ("sft", {"engine.optimizer": {"lr": 0.0}}, "FAIL", "no weight will change: set engine.optimizer.lr"),
        ("ppo", {"critic": {"optimizer": {"lr": 0.0}}}, "FAIL", "set critic.optimizer.lr"),
        ("sft", {"engine.optimizer": {**SCHEDULED, "total_steps": 2}}, "warn", "2 steps change nothing"),
        ("sft", {"engine.optimizer": {**SCHEDULED, "warmup_steps": 9}}, "warn", "warmup_steps=9 of 4 optimizer steps"),
        ("grpo", {"updates.epochs": 2, "engine.optimizer": SCHEDULED}, "ok", "8 steps, lr 0.001 first"),
    ],
)
def test_learning_rates(recipe, changes, level, text, folder):
    findings = of(rows(recipe, folder, **changes), "learning rate")
    assert any(f.level == level and text in f.found + f.remedy for f in findings), findings


@pytest.mark.parametrize(
    ("recipe", "changes", "key"),
    [
        ("grpo", {"reward_kl": {"estimator": "k3"}}, "reward_kl.estimator"),
        ("grpo", {"reward_kl": {"beta": 0.1, "horizon": 50}}, "reward_kl.horizon"),
        ("grpo", {"loss": {"kl_estimator": "k3"}}, "loss.kl_estimator"),
        ("grpo", {"reference": {"path": "teacher"}}, "reference.path"),
        ("grpo", {"loss": {"clip_high": 0.3}}, "loss.clip_high"),
        ("grpo", {"mismatch": {"high": 4.0}}, "mismatch.high"),
        ("grpo", {"shaping": {"mask_truncated": True, "missing_eos_penalty": 1.0}}, "shaping.missing_eos_penalty"),
        ("grpo", {"distill_weight": 0.5}, "distill_weight"),
        ("opsd", {"loss": {"beta": 0.3}}, "loss.beta"),
        ("opsd", {"loss": {"tail": "renormalise"}}, "loss.tail"),
    ],
)
def test_settings_that_do_nothing(recipe, changes, key, folder, monkeypatch):
    monkeypatch.chdir(folder)
    said = only_complaint(rows(recipe, folder, **changes))
    assert said.startswith(f"warn settings: {key} does nothing: ")


def test_the_same_settings_where_they_act(folder):
    acting = {
        "reward_kl": {"beta": 0.1, "estimator": "k3", "target": 0.5, "horizon": 50},
        "loss": {"kl": 0.1, "kl_estimator": "k3", "clip_high": 0.3},
        "mismatch": {"correct": "mask", "high": 4.0},
        "updates": {"epochs": 2},
    }
    assert not complaints(rows("grpo", folder, **acting))
    assert not complaints(rows("opsd", folder, loss={"divergence": "jsd", "beta": 0.3}))


# -- rewards


def test_a_right_answer_gets_the_top_reward(folder):
    said = [f.found for f in of(rows("grpo", folder, rewards=[{"name": "numeric_match"}]), "reward")]
    assert said[0] == "rewards: numeric_match: row 0, answer '0': '0': 1, '0': 1, '': 0"


def test_rows_without_the_answer_that_a_reward_needs(folder):
    bare = write_rows(folder / "bare.jsonl", [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2="}])
    found = of(rows("grpo", folder, **{"data.train": bare}), "reward")[0]
    assert found.level == "FAIL"
    assert "row 1 of the data has no answer; fill data.answer_column" in found.found


def test_answers_that_no_completion_equals(folder):
    rows_ = [json.loads(line) for line in (folder / "sums.jsonl").read_text().splitlines()]
    odd = write_rows(folder / "odd.jsonl", [{**row, "answer": " "} for row in rows_])
    found = of(rows("grpo", folder, **{"data.train": odd, "rewards": [{"name": "exact_match"}]}), "reward")[0]
    assert found.level == "warn", found
    assert "a right answer is worth no more than none" in found.remedy


@pytest.mark.parametrize(
    ("reward", "level", "text"),
    [
        ({"name": "regex:^Answer"}, "warn", "check pattern or function"),
        ({"name": "regex:[0-9]+"}, "ok", "'0': 1"),
        ({"name": "regex:[0-9]+", "weight": -1.0}, "warn", "the sign of weight"),
        ({"name": "test_doctor_runs:reward_of_length"}, "warn", "a right answer is worth no more than none"),
        ({"name": "test_doctor_runs:reward_that_raises"}, "FAIL", "ZeroDivisionError"),
        ({"name": "test_doctor_runs:nothing"}, "FAIL", "has no function 'nothing'"),
        ({"name": "length", "max_tokens": 9, "buffer": 2}, "warn", "no response is long enough for it"),
        ({"name": "length", "max_tokens": 5, "buffer": 2}, "ok", "from 3 tokens on, of at most 5"),
        ({"name": "http://127.0.0.1:9/score", "timeout_s": 1.0}, "FAIL", "127.0.0.1:9"),
    ],
)
def test_each_reward_is_called_on_one_row(reward, level, text, folder):
    found = of(rows("grpo", folder, rewards=[reward]), "reward")[0]
    assert found.level == level, found
    assert text in found.found + found.remedy


def test_the_reward_of_evaluations_is_examined_too(folder):
    (found,) = of(rows("opsd", folder, **{"eval.reward": "regex:^Answer"}), "reward")
    assert found.level == "warn"
    assert found.found.startswith("eval.reward: regex:^Answer: row 0")


def test_rewards_that_all_weigh_nothing(folder):
    said = complaints(rows("grpo", folder, rewards=[{"name": "exact_match", "weight": 0.0}]))
    assert any(line.startswith("FAIL reward: every weight in rewards is 0") for line in said)
