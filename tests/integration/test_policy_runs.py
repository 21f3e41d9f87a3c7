"""Whole runs of PPO and the group-relative methods on one rank: what an update starts from, what stands still, what a resume must
know, what is left on disk, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import peft
import pytest
import torch
from rl_cases import SGD, models, parts, policy_settings, recording, score, scorer_folder, watched
from safetensors.torch import load_file
from trainer_cases import CHARACTERS, Killed, configure, run, settings, tiny_folder
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hybrid.engine import HybridEngine
from recipes.cli import main
from trainers.critic import CriticModel
from trainers.data.order import PromptStream
from trainers.data.prompts import load_prompts
from trainers.new_model import character_tokenizer
from trainers.on_policy import OnPolicy
from trainers.rewards import Rewards


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def make(folder, tmp_path):
    def make(recipe: str, name: str = "run", **changes):
        return policy_settings(recipe, folder, output_dir=str(tmp_path / name), **changes)

    return make


def start(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "student" / "model.safetensors")


def same(first, second) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


# -- what an update starts from


@pytest.mark.parametrize("old", ["rollout", "recompute"])
@pytest.mark.parametrize("attention", ["packed", "sdpa"])
def test_the_first_update_has_a_ratio_of_one_at_any_temperature_and_with_dropout_in_the_checkpoint(
    make, tmp_path, folder, attention, old
):
    """Also without recomputing: the rollout's own log-probs are the trainer's. With the dropout on, the ratio shows it."""
    tiny_folder(tmp_path / "student", attention_dropout=0.2)
    changes = {"model.path": str(tmp_path / "student"), "engine.attn_implementation": attention, "updates.old_logprobs": old}
    seen = {}
    for dropout in (False, True) if attention == "sdpa" else (False,):
        tree = make("ppo", f"run_{dropout}", **changes, **{"engine.dropout": dropout, "certificate.action": "warn"})
        with recording() as found:
            run(tree)
        (call,) = found.of(scalar=False)
        ratios = [ratio for row in call["tokens"].values() for ratio in row["ratio"]]
        assert len(ratios) == call["means"]["tokens"] > 20
        seen[dropout] = max(abs(ratio - 1) for ratio in ratios)
    assert seen[False] <= 1e-4
    assert seen.get(True, 1.0) > 1e-2


def test_only_the_first_update_reports_the_distance_to_the_engine_that_drew_the_tokens(make):
    tree = make("ppo", **{"updates.epochs": 3, "engine.optimizer.lr": 0.05})
    with recording() as found:
        _, records = run(tree)
    assert [any(n.startswith("mismatch") for n in call["means"]) for call in found.of(scalar=False)] == [True, False, False]
    assert records[1]["mismatch_abs"] <= 1e-5  # and not the mean with what later updates moved
    assert abs(records[1]["ratio"] - 1) > 1e-3


def test_minibatches_are_every_response_once_an_epoch_in_another_order(make):
    tree = make("ppo", **{"updates": {"epochs": 2, "minibatches": 4}, "engine.optimizer.lr": 0.0})
    with recording() as found:
        run(tree)
    (rollouts,) = found.rollouts
    everything = Counter(r.ids for r in rollouts)
    epochs = [[tuple(call["tokens"]) for call in found.of(scalar=False)[i : i + 4]] for i in (0, 4)]
    for epoch in epochs:
        assert [len(part) for part in epoch] == [1, 2, 1, 2]
        assert Counter(ids for part in epoch for ids in part) == everything
    assert epochs[0] != epochs[1]
    assert [tuple(call["tokens"]) for call in found.of(scalar=True)] == epochs[0] + epochs[1]  # the critic's are the same


# -- what stands still


@pytest.mark.parametrize("recipe", ["ppo", "grpo"])
def test_a_learning_rate_of_zero_changes_nothing(make, folder, recipe):
    """For 20 steps, while the critic learns."""
    adamw = {"name": "adamw", "lr": 0.0, "weight_decay": 0.1}
    changes = {"max_steps": 20, "engine.optimizer": adamw, "reward_kl.beta": 0.1, "checkpoint.every": None, "updates.epochs": 2,
               "train.micro_batch_tokens": 200}  # fmt: skip
    if recipe == "ppo":
        changes["critic.optimizer"] = {"lr": 1e-2}
    tree = make(recipe, **changes)
    _, records = run(tree)
    assert same(parts(tree)["model"], start(folder))
    for record in records.values():
        for name in ("kl_reference", "kl_per_response", "kl_first_token", "kl", "approx_kl", "mismatch_kl"):
            assert abs(record[name]) <= 1e-5 if name == "kl_per_response" else abs(record[name]) <= 1e-6
        assert abs(record["ratio"] - 1) <= 1e-6
    if recipe == "ppo":
        assert len({record["critic/value"] for record in records.values()}) == 20


@pytest.mark.parametrize("loading", ["engine", "module"])
def test_a_policy_that_goes_on_from_an_adapter_starts_with_it(make, folder, tmp_path, loading):
    """The reference, and a self-teacher of its start, are base and adapter together; in a resumed run too."""
    base = AutoModelForCausalLM.from_pretrained(folder / "student")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        peft.get_peft_model(base, peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False)).save_pretrained(
            tmp_path / "adapter"
        )
    changes = {"engine.optimizer.lr": 0.0, "engine.lora": {"path": str(tmp_path / "adapter")}, "max_steps": 2,
               "teacher": {"kind": "self", "weights": "start", "scoring": loading}, "checkpoint.every": 1,
               "data.privileged_column": "none"}  # fmt: skip
    tree = make("grpo", loading, **changes)
    records = run(tree, stop_after=1)[1] | run(tree)[1]
    assert records.keys() == {1, 2}
    for record in records.values():
        assert abs(record["kl_per_response"]) <= 1e-5
        assert abs(record["divergence"]) <= 1e-6
    _, below = run(make("grpo", "below", **changes | {"reference.path": str(folder / "student"), "max_steps": 1}))
    assert below[1]["kl_per_response"] > 0.1, "the adapter changes the model"


def test_the_weight_of_the_kl_stands_still_while_only_the_critic_learns(make):
    changes = {"max_steps": 3, "critic.warmup_steps": 2, "reward_kl": {"target": 1.0, "horizon": 60}}
    _, records = run(make("ppo", **changes))
    assert [records[step]["reward_kl_beta"] for step in (1, 2, 3)] == [0.05, 0.05, 0.05]
    _, records = run(make("ppo", "at once", **changes | {"critic.warmup_steps": 0}))
    assert records[2]["reward_kl_beta"] < 0.05  # there is no KL yet


def test_a_critic_that_warms_up_learns_alone(make, folder):
    tree = make("ppo", **{"max_steps": 3, "critic.warmup_steps": 2, "checkpoint.every": 1, "checkpoint.keep": 3})
    _, records = run(tree)
    for step in (1, 2):
        assert "policy_loss" not in records[step]
        assert "certificate_max" not in records[step]
        assert records[step]["critic/value_loss"] > 0
    assert records[3]["policy_loss"] is not None
    assert records[3]["certificate_max"] <= 1e-4  # due at the policy's first update
    still = make("ppo", "still", **{"max_steps": 3, "critic.warmup_steps": 2})
    run(still, stop_after=2)
    checkpoint = Path(still["output_dir"]) / "checkpoints" / "step_2"
    engine = HybridEngine.from_pretrained(str(folder / "student"), configure(still).engine)
    engine.load(checkpoint)
    assert same(engine.model.local_shards(), start(folder))
    engine.close()
    assert not same(parts(tree)["model"], start(folder))


def test_rates_decay_to_the_end_of_the_run(make):
    """Of several updates a step; of the policy after the critic's warm-up."""
    linear = {"name": "sgd", "lr": 0.01, "schedule": "linear"}
    tree = make("ppo", **{"max_steps": 4, "critic.warmup_steps": 1, "updates.epochs": 2, "engine.optimizer": linear,
                          "critic.optimizer": linear})  # fmt: skip
    _, records = run(tree)
    assert [records[s]["lr"] for s in (2, 3, 4)] == pytest.approx([0.01 * left / 6 for left in (5, 3, 1)])
    assert [records[s]["critic/lr"] for s in (1, 2, 3, 4)] == pytest.approx([0.01 * left / 8 for left in (7, 5, 3, 1)])


# -- resuming

ADAMW = {"name": "adamw", "lr": 5e-3, "schedule": "cosine", "total_steps": 40}
EVERYTHING = {
    "updates": {"epochs": 2, "minibatches": 2},
    "engine.optimizer": ADAMW,
    "reward_kl": {"beta": 0.1, "target": 0.05, "horizon": 20},
    "shaping": {"normalise": "whiten", "missing_eos_penalty": 0.5},
    "ema_decay": 0.8,
    "loss.kl": 0.1,
    "data.shuffle": True,
    "train.micro_batch_tokens": 60,
}
RESUMED = {
    "ppo": (
        "ppo",
        {"critic.optimizer": ADAMW, "critic.warmup_steps": 1, "teacher": {"kind": "self", "weights": "ema", "ema_decay": 0.5}},
    ),
    "grpo": (
        "grpo",
        {
            "dynamic_sampling": {"max_batches": 3},
            "rewards": [{"name": "rl_cases:starts_low"}],
            "loss.ratio": "sequence",
            "loss.reduction": "sequence_mean",
        },
    ),
}


@pytest.mark.parametrize("name", list(RESUMED))
def test_a_killed_run_ends_bit_equal(make, folder, name):
    """Weights of every model, the averages, beta, the running moments, and where the data and the mixture are."""
    recipe, changes = RESUMED[name]
    changes = EVERYTHING | changes | {"max_steps": 4, "ptx": {"data": str(folder / "sums.jsonl"), "batch_size": 3, "weight": 0.3}}
    whole, cut = make(recipe, "whole", **changes), make(recipe, "cut", **changes)
    with recording() as found:
        _, expected = run(whole)
    with pytest.raises(Killed):
        run(cut, kill_after=3)
    _, rest = run(cut)
    assert list(rest) == [3, 4]
    for step in rest:
        assert watched(rest[step]) == watched(expected[step])
        assert rest[step]["reward_kl_beta"] == expected[step]["reward_kl_beta"]
    assert len({record["reward_kl_beta"] for record in expected.values()}) > 2
    folders = ["model", "model_ema", *(["critic"] if recipe == "ppo" else [])]
    first, second = parts(whole, *folders), parts(cut, *folders)
    assert all(same(first[n], second[n]) for n in folders)
    states = [extra(tree, 4) for tree in (whole, cut)]
    assert states[0] == states[1]
    state = states[0]["algorithm"]
    if recipe == "ppo":  # 3 rows for each of 4 updates, in the 3 steps after the critic's warm-up
        assert (state["mix"]["epoch"], state["mix"]["offset"]) == (3, 6)
    rewards = [r.reward for rollouts in found.rollouts for r in rollouts]
    assert state["reward_moments"]["count"] == len(rewards)
    assert state["reward_moments"]["mean"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-9)
    drawn = sum(record.get("dynamic_drawn", 3) for record in expected.values())
    assert states[0]["data"]["epoch"] * 10 + states[0]["data"]["offset"] == drawn


def extra(tree, step: int):
    """What a checkpoint says beside its tensors."""
    path = Path(tree["output_dir"]) / "checkpoints" / f"step_{step}" / "state.json"
    return json.loads(path.read_text(encoding="utf-8"))["state"]["extra"]


# -- what is left on disk


def test_the_critic_and_the_average_are_folders_that_transformers_loads(make, folder):
    """The average is that of the weights after each step; with a critic that starts from a reward model, its head too."""
    tree = make("ppo", **{"max_steps": 3, "checkpoint.every": 1, "checkpoint.keep": 3, "ema_decay": 0.7, "updates.epochs": 2,
                          "critic.path": str(folder / "scorer")})  # fmt: skip
    snapshots = []
    with recording() as found:
        run(tree, stop_after=None)
    average = start(folder)
    for step in (1, 2, 3):
        engine = HybridEngine.from_pretrained(str(folder / "student"), configure(tree).engine)
        engine.load(Path(tree["output_dir"]) / "checkpoints" / f"step_{step}")
        snapshots.append({n: t.clone() for n, t in engine.model.local_shards().items()})
        engine.close()
        average = {n: 0.7 * t + 0.3 * snapshots[-1][n] for n, t in average.items()}
    left = parts(tree, "model", "model_ema", "critic")
    for name, tensor in left["model_ema"].items():
        torch.testing.assert_close(tensor, average[name], rtol=0, atol=3e-7)
    assert not same(left["model_ema"], left["model"])
    run_dir = Path(tree["output_dir"])
    AutoModelForCausalLM.from_pretrained(run_dir / "model_ema")
    critic = AutoModelForSequenceClassification.from_pretrained(run_dir / "critic").eval()
    assert critic.config.num_labels == 1
    engine = HybridEngine.from_pretrained(str(run_dir / "critic"), {"device": "cpu"}, scalar=True)
    rollouts = found.rollouts[-1]
    for rollout in rollouts:
        read = CriticModel.__new__(CriticModel)  # only what it reads with: its places
        read.config, read.policy, read.engine, read.micro_batch_tokens = configure(tree).critic, engine, engine, 24
        (values,) = read.score([rollout])
        with torch.no_grad():
            hidden = critic.model(torch.tensor([rollout.ids])).last_hidden_state[0]
            expected = critic.score(hidden)[rollout.num_prompt - 1 :, 0]
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)
    engine.close()


@pytest.mark.parametrize("recipe", ["ppo", "reward"])
def test_a_checkpoint_is_exported_as_the_model_of_its_run(make, folder, tmp_path, recipe):
    """Also of a run whose rate decays to its end, and of one that trains a scalar model."""
    tree = make("ppo") if recipe == "ppo" else settings("reward", folder, **{"data.train": str(folder / "pairs.jsonl")})
    tree |= {"output_dir": str(tmp_path / "run"), "max_steps": 1}
    tree["engine"]["optimizer"] = {"schedule": "cosine"}
    run(tree)
    assert main(["export", str(tmp_path / "run" / "checkpoints" / "step_1"), str(tmp_path / "out")]) == 0
    assert same(load_file(tmp_path / "out" / "model.safetensors"), parts(tree)["model"])


def test_the_adapter_of_a_checkpoint_is_exported_alone(make, folder, tmp_path):
    tree = make("grpo", **{"engine.lora": {"r": 2}, "checkpoint.every": 1})
    run(tree)
    run_dir = Path(tree["output_dir"])
    assert main(["export", str(run_dir / "checkpoints" / "step_1"), str(tmp_path / "adapter"), "--adapter"]) == 0
    name = "adapter_model.safetensors"
    assert same(load_file(tmp_path / "adapter" / name), load_file(run_dir / "adapter" / name))


def test_an_offloaded_critic_is_back_for_each_of_its_updates(make, monkeypatch):
    """Its weights and optimizer state are where it computes from its forward to the end of its optimizer step. Without a GPU
    nothing moves; when it would can be seen."""
    calls = []
    monkeypatch.setattr(CriticModel, "_move", lambda self, device: calls.append(str(device)))
    for name in ("forward_backward", "optim_step", "save_pretrained"):
        plain = getattr(HybridEngine, name)

        def noted(self, *args, _plain=plain, _name=name, **options):
            if self.model.is_scalar:
                calls.append(_name)
            return _plain(self, *args, **options)

        monkeypatch.setattr(HybridEngine, name, noted)
    run(make("ppo", **{"updates.epochs": 2, "critic.offload": True, "checkpoint.every": None}))
    update = ["cpu", "forward_backward", "optim_step", "cpu"]
    assert calls == ["cpu", "cpu", "cpu", *update, *update, "cpu", "save_pretrained", "cpu"]


# -- several losses in one step


def moved(tree, folder: Path) -> dict[str, torch.Tensor]:
    before = start(folder)
    return {name: tensor - before[name] for name, tensor in parts(tree)["model"].items()}


def test_reward_teacher_and_mixture_add_up(make, folder):
    """In one SGD step: the sum of what each does alone. The teacher's share is that of a distillation run, the mixture's is
    transformers' mean cross-entropy over the mixture's own tokens, by its weight."""
    teacher = {"teacher": {"path": str(folder / "other")}, "distill_weight": 0.5, "distill.divergence": "forward_kl"}
    ptx = {"ptx": {"data": str(folder / "sums.jsonl"), "batch_size": 4, "weight": 0.7}}
    alone = {"estimator": "dr_grpo", "rewards": [{"name": "rl_cases:nothing"}]}
    real = {"estimator": "dr_grpo", "rewards": [{"name": "rl_cases:score"}]}
    trees = {
        "all": make("grpo", "all", **real, **teacher, **ptx), "reward": make("grpo", "reward", **real),
        "teacher": make("grpo", "teacher", **alone, **teacher), "ptx": make("grpo", "ptx", **alone, **ptx),
    }  # fmt: skip
    records = {name: run(tree)[1][1] for name, tree in trees.items()}
    steps = {name: moved(tree, folder) for name, tree in trees.items()}
    opsd = policy_settings("opsd", folder, output_dir=trees["all"]["output_dir"] + "_opsd",
                           **{"loss.divergence": "forward_kl", "teacher": {"path": str(folder / "other")}})  # fmt: skip
    opsd.pop("rewards")
    _, distilled = run(opsd)
    steps["opsd"] = moved(opsd, folder)
    for name, step in steps["all"].items():
        torch.testing.assert_close(step, sum(steps[part][name] for part in ("reward", "teacher", "ptx")), rtol=0, atol=2e-6)
        torch.testing.assert_close(steps["teacher"][name], 0.5 * steps["opsd"][name], rtol=0, atol=2e-6)
        assert step.abs().max() > 1e-4
    assert records["all"]["divergence"] == pytest.approx(distilled[1]["loss"], rel=1e-5)
    assert records["all"]["tokens"] != records["all"]["ptx_tokens"]
    assert records["all"]["loss"] == pytest.approx(records["reward"]["loss"] + records["teacher"]["loss"], rel=1e-4, abs=1e-5)
    gradient, loss, tokens = cross_entropy_gradient(folder, mixture_rows(trees["ptx"]))
    assert (records["ptx"]["ptx_loss"], records["ptx"]["ptx_tokens"]) == (pytest.approx(0.7 * loss, rel=1e-5), tokens)
    for name, step in steps["ptx"].items():
        torch.testing.assert_close(step.double(), -SGD["lr"] * 0.7 * gradient[name], rtol=0, atol=1e-6)


def mixture_rows(tree) -> list[tuple[list[int], int]]:
    """(ids, prompt tokens) of the first four rows in the order of the stream, which the run's position confirms."""
    config = configure(tree)
    data = config.data.model_copy(update={"train": config.ptx.data})
    prompts = load_prompts(data, character_tokenizer(CHARACTERS), eos_token_ids={1}).prompts
    drawn = PromptStream(prompts, seed=config.seed, shuffle=True).take(config.ptx.batch_size)
    return [([*d.prompt.ids, *d.prompt.response_ids], len(d.prompt.ids)) for d in drawn]


def cross_entropy_gradient(folder: Path, rows: list[tuple[list[int], int]]):
    model = AutoModelForCausalLM.from_pretrained(folder / "student", dtype=torch.float64)
    total, tokens = 0.0, 0
    for ids, num_prompt in rows:
        log_p = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        for place in range(num_prompt, len(ids)):
            total, tokens = total - log_p[place - 1, ids[place]], tokens + 1
    (total / tokens).backward()
    return {name: p.grad for name, p in model.named_parameters()}, (total / tokens).item(), tokens


# -- dynamic sampling


def test_dynamic_sampling_draws_until_enough_groups_differ(make, monkeypatch):
    """What is trained on has rewards that differ within each group; what is reported is of all that was drawn."""
    tree = make("grpo", **{"max_steps": 3, "dynamic_sampling": {"max_batches": 4}, "rewards": [{"name": "rl_cases:starts_low"}],
                           "rollout.prompts_per_step": 3})  # fmt: skip
    draws, judged = [], OnPolicy.judged

    def noted(self, prompts):
        rollouts, metrics = judged(self, prompts)
        draws.append([r.reward for r in rollouts])
        return rollouts, metrics

    monkeypatch.setattr(OnPolicy, "judged", noted)
    with recording() as found:
        _, records = run(tree)
    assert any(record["dynamic_drawn"] > 3 for record in records.values())
    for step, rollouts in enumerate(found.rollouts, start=1):
        groups: dict[int, list[float]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.group, []).append(rollout.reward)
        assert all(len(values) == 2 and len(set(values)) == 2 for values in groups.values())
        assert len(groups) <= 3
        assert records[step]["no_signal"] == 0
        rewards = [reward for _ in range(int(records[step]["dynamic_drawn"]) // 3) for reward in draws.pop(0)]
        mean = sum(rewards) / len(rewards)
        assert records[step]["reward_mean"] == records[step]["reward/rl_cases:starts_low"] == pytest.approx(mean)
        assert records[step]["reward_std"] == pytest.approx((mean * (1 - mean)) ** 0.5, abs=1e-9)  # of zeros and ones
    assert not draws


def test_dynamic_sampling_compares_the_component_it_is_told(make):
    """Groups that all lengths tell apart and the named component does not are replaced."""
    both = [{"name": "rl_cases:starts_low"}, {"name": "rl_cases:score", "weight": 0.01}]
    changes = {"max_steps": 2, "rewards": both, "rollout.prompts_per_step": 4}
    with recording() as found:
        run(make("grpo", **changes, dynamic_sampling={"component": "rl_cases:starts_low"}))
    for rollouts in found.rollouts:
        groups: dict[int, set[float]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.group, set()).add(rollout.reward_parts["rl_cases:starts_low"])
        assert all(len(parts) == 2 for parts in groups.values())
    with recording() as found:
        run(make("grpo", "all", **changes, dynamic_sampling={}))
    parts_of = [r.reward_parts["rl_cases:starts_low"] for rollouts in found.rollouts for r in rollouts]
    pairs = zip(parts_of[::2], parts_of[1::2], strict=True)
    assert any(one == other for one, other in pairs), "no group to tell the two apart by"
    with pytest.raises(ValueError, match=r"dynamic_sampling\.component=starts; allowed: rl_cases:starts_low, rl_cases:score"):
        run(make("grpo", "unknown", **changes, dynamic_sampling={"component": "starts"}))


def test_dynamic_sampling_makes_do_with_nothing(make, folder):
    """Where every group agrees, whatever is drawn: no update, and no end of the run."""
    tree = make("grpo", **{"max_steps": 2, "dynamic_sampling": {"max_batches": 2}, "rewards": [{"name": "rl_cases:nothing"}],
                           "loss.ratio": "sequence", "loss.kl": 0.1, "updates.minibatches": 2})  # fmt: skip
    _, records = run(tree)
    assert [(r["dynamic_drawn"], r["dynamic_kept"], r.get("tokens", 0.0)) for r in records.values()] == [(6.0, 0.0, 0.0)] * 2
    assert same(parts(tree)["model"], start(folder))


# -- evaluation


def test_held_out_prompts_are_scored_by_what_trains(make, folder):
    rewards = [{"name": "rl_cases:score"}, {"model": str(folder / "scorer"), "weight": 0.5}]
    held_out = {"data.eval": str(folder / "sums.jsonl"), "eval.reward": "rewards", "eval.max_new_tokens": 4, "eval.samples": 10}
    tree = make("grpo", rewards=rewards, **held_out, **{"engine.optimizer.lr": 0.0})
    _, records = run(tree)
    lines = (Path(tree["output_dir"]) / "completions.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "eval" and row["step"] == 1]
    assert len(rows) == 10
    assert records[1]["eval_reward"] == pytest.approx(sum(row["reward"] for row in rows) / 10, abs=1e-6)
    scorer = AutoModelForSequenceClassification.from_pretrained(folder / "scorer").eval()
    encode = character_tokenizer(CHARACTERS).encode
    for row in rows:
        ids = [*encode(row["prompt"]), *encode(row["completion"]), *([1] if row["finish_reason"] == "stop" else [])]
        with torch.no_grad():
            judged = scorer(input_ids=torch.tensor([ids])).logits.item()
        assert row["reward"] == pytest.approx(score(row["completion"], None) + 0.5 * judged, abs=1e-5)
    with pytest.raises(ValueError, match=r"eval\.reward=rewards are those that a policy is trained with"):
        configure(settings("sft", folder, **{"eval.reward": "rewards"}))


# -- what is refused


def test_a_section_in_part_keeps_the_rest_of_its_recipes_defaults(make, folder):
    assert configure(make("ppo")).reward_kl.beta == 0.05
    assert configure(make("ppo", reward_kl={"estimator": "k3"})).reward_kl.beta == 0.05
    assert configure(make("ppo", reward_kl={"beta": 0.0})).reward_kl.beta == 0.0
    for recipe in ("sft", "reward"):
        assert configure(settings(recipe, folder, engine={"zero_stage": 2})).engine.dropout
        assert not configure(settings(recipe, folder, engine={"dropout": False})).engine.dropout


@pytest.mark.parametrize(
    ("recipe", "changes", "expected"),
    [
        ("grpo", {"rollout.samples_per_prompt": 1}, "samples_per_prompt=1 with estimator=grpo.*or estimator=reinforce_pp"),
        ("grpo", {"rollout.samples_per_prompt": 1, "estimator": "reinforce_pp", "dynamic_sampling": {}}, "2 or more"),
        ("ppo", {"updates.minibatches": 7}, "updates.minibatches=7; allowed: up to the step's 6 responses"),
        ("ppo", {"reference": None}, "need a reference"),
        ("grpo", {"reference": None, "loss.kl": 0.1}, "need a reference"),
        ("ppo", {"reward_kl": {"beta": 0.0, "target": 1.0}}, "adapts reward_kl.beta, which is 0"),
        ("ppo", {"reward_kl": {"beta": 0.1, "target": 1.0, "horizon": 1}}, "horizon=1 with 6 responses.*a fifth of them"),
        ("ppo", {"loss.clip": 0.2}, "loss.clip\n"),
        ("grpo", {"critic": {}}, "critic\n"),
        ("ppo", {"rewards": []}, "rewards is empty"),
        ("ppo", {"engine.timeout_s": 200.0}, "may take 300 s for a step, and other ranks wait engine.timeout_s=200"),
        ("ppo", {"rollout.given_fraction": 0.5}, "needs tokens drawn from the policy"),
        ("ppo", {"critic.warmup_steps": 1}, "warmup_steps=1 with max_steps=1: the policy would never learn"),
        ("ppo", {"mismatch.correct": "mask", "updates.old_logprobs": "rollout"}, "would find no difference"),
        ("ppo", {"loss.reduction": "sum_per_constant"}, "needs loss.constant_length"),
        ("ppo", {"teacher": {"path": "t"}, "distill.reduction": "sequence_mean"}, "distill.reduction=sequence_mean"),
        ("ppo", {"teacher": {"path": "t"}, "distill.divergence": "sampled_token"}, "use recipe: opsd"),
        ("grpo", {"loss.ratio": "sequence", "mismatch.correct": "truncate"}, "allowed: level=sequence"),
        ("grpo", {"rewards": [{"name": "rl_cases:score", "model": "x"}]}, "name"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, recipe, changes, expected):
    with pytest.raises(ValueError, match=expected):
        configure(make(recipe, **changes))


def test_data_and_models_that_cannot_work_are_refused_at_the_start(make, folder, tmp_path):
    (tmp_path / "bare.jsonl").write_text(json.dumps({"prompt": "1+1="}), encoding="utf-8")
    scorer_folder(tmp_path / "short", folder / "other")
    config = json.loads((tmp_path / "short" / "config.json").read_text())
    (tmp_path / "short" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10}))
    tiny_folder(tmp_path / "few", max_position_embeddings=24)
    tiny_folder(tmp_path / "foreign", characters="9876543210+=?\n")
    cases = [
        ({"ptx": {"data": str(tmp_path / "bare.jsonl")}}, "ptx.data: row 0 has no response"),
        ({"ptx": {"data": str(folder / "sums.jsonl")}, "data.response_column": "long"}, "its response up to 71; allowed: 64"),
        ({"rollout.sampling": {"max_new_tokens": 60}}, "row 7 has 5 prompt tokens.*allowed: 64 in all"),
        ({"rewards": [{"name": "exact_match"}], "data.answer_column": "none"}, "row 0 of the data has no answer"),
        ({"rewards": [{"model": str(folder / "student")}]}, "has no score.weight; allowed: a reward model"),
        ({"rewards": [{"model": str(tmp_path / "short")}]}, "allowed: 10 in all by the reward model"),
        ({"critic.path": str(tmp_path / "short")}, "allowed: 10 in all by the critic"),
        ({"critic.path": str(tmp_path / "foreign")}, "policy and critic .* differ in 10 ids .2: policy '0', critic '9'"),
        ({"reference.path": str(tmp_path / "foreign")}, "policy and reference .* differ in 10 ids"),
        ({"rewards": [{"recipe": "x.yaml"}]}, "recipe is not trained yet"),
        (
            {"teacher": {"kind": "self", "weights": "live"}, "data.privileged_column": "none"},
            "row 0 gives the self-teacher nothing",
        ),
        (
            {"reference.path": str(tmp_path / "few"), "rollout.environment": {"name": "calculator"}},
            "its response up to 60; allowed: 24 in all by the reference",
        ),
    ]
    for number, (changes, expected) in enumerate(cases):
        with pytest.raises(ValueError, match=expected):
            run(make("ppo", str(number), **changes))


def test_what_a_run_opens_is_closed_also_where_it_is_refused(make, folder, monkeypatch):
    closed, close = [], Rewards.close
    monkeypatch.setattr(Rewards, "close", lambda self: (closed.append(self.names), close(self)))
    held_out = {"data.eval": str(folder / "sums.jsonl"), "eval.max_new_tokens": 2}
    run(make("grpo", **held_out))
    assert closed == [("exact_match",), ("rl_cases:score",)]
    closed.clear()
    with pytest.raises(ValueError, match="no_such"):
        run(make("grpo", "refused", **held_out, **{"eval.reward": "no_such"}))
    assert closed == [("rl_cases:score",)]
