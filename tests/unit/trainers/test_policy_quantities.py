"""Every per-token quantity of a run, and the weights it leaves, against loops in float64 over transformers' own modules.

The responses are scripted: with and without an end, an end alone, an empty one, and two with an environment's tokens in them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_cases import models, parts, places_of, policy_settings, recording, score, scripted
from torch import Tensor
from trainer_cases import configure, run
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from trainers.config import GRPOConfig, PolicyConfig, PPOConfig
from trainers.types import Rollout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return models(tmp_path_factory.mktemp("models"))


# -- the step in loops


def in_double(path: str | None, kind: Any) -> Any:
    return None if path is None else kind.from_pretrained(path, dtype=torch.float64).eval()


@dataclass
class Response:
    """A rollout and, per policy token t, what is known of it."""

    rollout: Rollout
    places: list[int]
    score: float = 0.0  # shaped
    old: list[float] = None  # type: ignore[assignment]
    reference: list[float] | None = None
    value: list[float] | None = None  # at the token before each, and at the last
    weight: list[float] | None = None
    advantage: list[float] = None  # type: ignore[assignment]
    returns: list[float] | None = None

    @property
    def was_cut(self) -> bool:
        return self.rollout.finish_reason == "length"

    def log_rows(self, model: Any, temperature: float) -> Tensor:
        """[n, V], differentiable."""
        logits = model(torch.tensor([self.rollout.ids])).logits[0]
        return torch.log_softmax(logits[[p - 1 for p in self.places]] / temperature, -1)

    def taken(self, rows: Tensor) -> list[Tensor]:
        return [rows[t, self.rollout.ids[p]] for t, p in enumerate(self.places)]

    def values_of(self, model: Any) -> list[Tensor]:
        hidden = model.model(torch.tensor([self.rollout.ids])).last_hidden_state[0]
        scores = model.score(hidden)[:, 0]
        return [scores[p - 1] for p in self.places] + [scores[-1]]


class Loops:
    """A run of one step, as the papers write it."""

    def __init__(self, config: PolicyConfig, rollouts: Sequence[Rollout]) -> None:
        self.config = config
        self.temperature = config.rollout.sampling.temperature
        self.policy = in_double(config.model.path, AutoModelForCausalLM)
        self.critic = in_double(config.critic.path, AutoModelForSequenceClassification) if isinstance(config, PPOConfig) else None
        self.shared = config.critic.shared_weight if isinstance(config, PPOConfig) else None
        if self.shared is not None:  # the policy's own hidden states, under a further head of zeros
            self.policy.score = torch.nn.Linear(self.policy.config.hidden_size, 1, bias=False, dtype=torch.float64)
            torch.nn.init.zeros_(self.policy.score.weight)
            self.critic = self.policy
        reference = config.reference and in_double(config.reference.path or config.model.path, AutoModelForCausalLM)
        self.responses = [Response(r, places_of(r)) for r in rollouts]
        with torch.no_grad():
            for x in self.responses:
                x.old = [float(v) for v in x.taken(x.log_rows(self.policy, self.temperature))]
                if reference:
                    x.reference = [float(v) for v in x.taken(x.log_rows(reference, self.temperature))]
                if self.critic is not None:
                    x.value = [float(v) for v in x.values_of(self.critic)]
        self.metrics = {"reward_kl_beta": config.reward_kl.beta}
        self._correct_mismatch()
        self._shape()
        self._advantages()
        self._measure()

    def counted(self) -> list[Response]:
        return [x for x in self.responses if not (self.config.shaping.mask_truncated and x.was_cut)]

    def _correct_mismatch(self) -> None:
        mismatch = self.config.mismatch
        for x in self.responses if mismatch.correct != "off" else ():
            drawn = [x.rollout.logprobs_raw[p - x.rollout.num_prompt] for p in x.places]
            logs = [a - b for a, b in zip(x.old, drawn, strict=True)]
            if mismatch.level == "sequence":
                logs = [sum(logs)] * len(logs)
            x.weight = []
            for log in logs:
                w = math.exp(log)
                if mismatch.correct == "truncate":
                    x.weight.append(min(w, mismatch.high))
                else:
                    x.weight.append(w if mismatch.low <= w <= mismatch.high else 0.0)

    def _shape(self) -> None:
        shaping = self.config.shaping
        scores = [score(x.rollout.text, x.rollout.prompt) for x in self.responses]
        if shaping.normalise != "none":
            mean = sum(scores) / len(scores)
            deviation = math.sqrt(sum((s - mean) ** 2 for s in scores) / len(scores))
            scores = [(s - (mean if shaping.normalise == "whiten" else 0.0)) / deviation for s in scores]
        if shaping.clip is not None:
            scores = [max(-shaping.clip, min(shaping.clip, s)) for s in scores]
        for x, s in zip(self.responses, scores, strict=True):
            x.score = s - (shaping.missing_eos_penalty if x.was_cut else 0.0)

    def kl(self, x: Response) -> list[float]:
        if x.reference is None:
            return [0.0] * len(x.places)
        d = [a - b for a, b in zip(x.old, x.reference, strict=True)]
        estimates = {"k1": d, "k2": [v * v / 2 for v in d], "k3": [math.exp(-v) - 1 + v for v in d]}
        return estimates[self.config.reward_kl.estimator]

    def token_rewards(self, x: Response, last: float) -> list[float]:
        rewards = [-self.config.reward_kl.beta * k for k in self.kl(x)]
        if rewards:
            rewards[-1] += last
        return rewards

    def _advantages(self) -> None:
        config = self.config
        if isinstance(config, PPOConfig):
            self._gae(config)
            if config.advantages.whiten:
                self._whiten()
            return
        assert isinstance(config, GRPOConfig)
        totals = [x.score - config.reward_kl.beta * sum(self.kl(x)) for x in self.responses]
        for i, x in enumerate(self.responses):
            group = [k for k, y in enumerate(self.responses) if y.rollout.prompt == x.rollout.prompt]
            if config.estimator == "reinforce_pp":
                rewards = self.token_rewards(x, x.score)
                x.advantage = [sum(rewards[t:]) for t in range(len(rewards))]
                continue
            if config.estimator == "reinforce_pp_baseline":
                rewards = self.token_rewards(x, x.score - sum(self.responses[k].score for k in group) / len(group))
                x.advantage = [sum(rewards[t:]) for t in range(len(rewards))]
                continue
            mean = sum(totals[k] for k in group) / len(group)
            others = [totals[k] for k in group if k != i]
            of_response = {
                "grpo": (totals[i] - mean) / (math.sqrt(sum((totals[k] - mean) ** 2 for k in group) / len(group)) + 1e-6),
                "dr_grpo": totals[i] - mean,
                "rloo": totals[i] - sum(others) / len(others),
            }
            x.advantage = [of_response[config.estimator]] * len(x.places)
        if config.estimator.startswith("reinforce_pp"):
            self._whiten()

    def _gae(self, config: PPOConfig) -> None:
        gamma, lam = config.advantages.gamma, config.advantages.lam
        for x in self.responses:
            rewards, n = self.token_rewards(x, x.score), len(x.places)
            assert x.value is not None
            after_last = x.value[-1] if config.advantages.bootstrap and x.was_cut else 0.0
            v = [*x.value[:n], after_last]
            delta = [rewards[t] + gamma * v[t + 1] - v[t] for t in range(n)]
            x.advantage = [sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, n)) for t in range(n)]
            x.returns = [a + b for a, b in zip(x.advantage, v[:n], strict=True)]

    def _whiten(self) -> None:
        tokens = [a for x in self.counted() for a in x.advantage]
        mean = sum(tokens) / len(tokens)
        deviation = math.sqrt(sum((a - mean) ** 2 for a in tokens) / len(tokens) + 1e-8)
        for x in self.counted():
            x.advantage = [(a - mean) / deviation for a in x.advantage]

    def _measure(self) -> None:
        """What is reported of the responses: every one of them, the masked too, but for the critic's."""
        rewards = [score(x.rollout.text, x.rollout.prompt) for x in self.responses]
        self.metrics |= {"reward_mean": mean_of(rewards), "reward_std": math.sqrt(variance_of(rewards))}
        k1, k3 = [], []
        for x in self.responses:
            assert x.reference is not None
            k1.append([a - b for a, b in zip(x.old, x.reference, strict=True)])
            k3.append([math.exp(-d) - 1 + d for d in k1[-1]])
        self.metrics |= {
            "kl_per_response": mean_of([sum(row) for row in k1]),
            "kl_reference": mean_of([k for row in k3 for k in row]),
            "kl_first_token": mean_of([row[0] for row in k3 if row]),
        }
        for i in range(4):
            quarter = [k for row in k3 for t, k in enumerate(row) if i <= 4 * t / len(row) < i + 1]
            self.metrics[f"kl_quarter_{i + 1}"] = mean_of(quarter)
        if self.critic is None:
            agreed = [all(abs(a) < 1e-12 for a in x.advantage) for x in self.counted()]
            self.metrics["no_signal"] = sum(agreed) / len(agreed)
        else:
            pairs = [(v, r) for x in self.counted() for v, r in zip(x.value or (), x.returns or ())]
            left = variance_of([r - v for v, r in pairs]) / variance_of([r for _, r in pairs])
            self.metrics["explained_variance"] = 1 - left

    # -- updates

    def update(self) -> tuple[float, dict[tuple[int, ...], list[tuple[float, float]]]]:
        """One SGD step of the policy: its loss, and (ratio, loss) of each token by the response's ids."""
        config, loss = self.config, self.config.loss
        total, tokens = torch.zeros((), dtype=torch.float64), {}
        counted = [x for x in self.counted() if x.places]
        num_tokens = sum(len(x.places) for x in counted)
        for x in counted:
            rows = x.log_rows(self.policy, self.temperature)
            lp = x.taken(rows)
            errors = None if self.shared is None else self.value_errors(x)
            mean_log = sum(a.item() - b for a, b in zip(lp, x.old, strict=True)) / len(lp)
            tokens[x.rollout.ids] = []
            for t, a in enumerate(x.advantage):
                if loss.ratio == "token":
                    ratio = torch.exp(lp[t] - x.old[t])
                else:
                    ratio = math.exp(mean_log) * torch.exp(lp[t] - lp[t].item())
                clipped = min(max(ratio, 1 - loss.clip_low), 1 + loss.clip_high)  # type: ignore[type-var]
                term = max(-a * ratio, -a * clipped)
                if loss.dual_clip is not None and a < 0:
                    term = min(term, -loss.dual_clip * a)
                if x.weight is not None:
                    term = x.weight[t] * term
                if loss.entropy:
                    term = term + loss.entropy * (rows[t].exp() * rows[t]).sum()
                if loss.kl:
                    assert x.reference is not None
                    d = lp[t] - x.reference[t]
                    k3 = torch.exp(-d) - 1 + d
                    term = term + loss.kl * {"k2": d * d / 2, "k3": k3.item() + d.item() * (d - d.item()), "k3_value": k3}[
                        loss.kl_estimator
                    ]  # fmt: skip
                tokens[x.rollout.ids].append((ratio.item(), term.item() if isinstance(term, Tensor) else term))
                divisor = {
                    "token_mean": num_tokens,
                    "sequence_mean": len(x.places) * len(counted),
                    "sum_per_constant": (loss.constant_length or 0) * len(counted),
                }[loss.reduction]
                total = total + term / divisor
                if errors is not None:
                    assert self.shared is not None
                    total = total + self.shared * errors[t] / divisor
        descend(self.policy, total, config.engine.optimizer.lr)
        return total.item(), tokens

    def value_errors(self, x: Response) -> list[Tensor]:
        """Of each token."""
        assert isinstance(self.config, PPOConfig)
        clip, values, errors = self.config.critic.clip, x.values_of(self.critic), []
        for t, target in enumerate(x.returns or ()):
            error = (values[t] - target) ** 2
            if clip is not None:
                assert x.value is not None
                near = min(max(values[t], x.value[t] - clip), x.value[t] + clip)
                error = max(error, (near - target) ** 2)
            errors.append(error / 2)
        return errors

    def update_critic(self) -> float:
        assert isinstance(self.config, PPOConfig)
        num_tokens = sum(len(x.places) for x in self.counted())
        total = sum(sum(self.value_errors(x)) for x in self.counted()) / num_tokens
        descend(self.critic, total, self.config.critic.optimizer.lr)
        return total.item()


def mean_of(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def variance_of(values: Sequence[float]) -> float:
    return sum((v - mean_of(values)) ** 2 for v in values) / len(values)


def descend(model: Any, loss: Tensor, lr: float) -> None:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter -= lr * gradient


# -- runs against the loops

CASES: dict[str, dict[str, Any]] = {
    "ppo": {"reward_kl.beta": 0.1, "advantages": {"gamma": 0.9, "lam": 0.8}, "loss.dual_clip": 1.05},
    "ppo, no bootstrap, shaped": {
        "reward_kl": {"beta": 0.2, "estimator": "k3"}, "advantages": {"bootstrap": False, "whiten": False, "lam": 0.5},
        "shaping": {"clip": 1.5, "normalise": "whiten", "missing_eos_penalty": 0.7}, "loss.reduction": "sequence_mean",
        "loss.entropy": 0.05, "loss.kl": 0.3, "loss.kl_estimator": "k3", "critic.clip": None,
        "engine.optimizer.lr": 0.005,
    },
    "ppo, truncated masked, corrected": {
        "reward_kl": {"beta": 0.1, "estimator": "k2"}, "shaping": {"normalise": "scale", "mask_truncated": True},
        "mismatch": {"correct": "truncate", "high": 1.1}, "loss.reduction": "sum_per_constant", "loss.constant_length": 7,
        "loss.kl": 0.2,
    },
    "ppo, shared trunk": {"critic": {"shared_weight": 0.3, "clip": 0.1}, "loss.reduction": "sequence_mean"},
    "grpo": {"loss.kl": 0.4, "loss.kl_estimator": "k3_value", "loss.clip_high": 0.28},
    "grpo, truncated masked": {"shaping": {"mask_truncated": True, "clip": 2.0}, "reward_kl.beta": 0.3},
    "dr_grpo": {"loss.reduction": "sum_per_constant", "loss.constant_length": 5, "reward_kl": {"beta": 0.2, "estimator": "k3"}},
    "rloo": {"reward_kl.beta": 0.2, "shaping.missing_eos_penalty": 1.0,
             "mismatch": {"correct": "mask", "low": 0.95, "high": 1.2}},
    "reinforce_pp": {"reward_kl": {"beta": 0.3, "estimator": "k2"}, "loss.kl": 0.1},
    "reinforce_pp_baseline": {"reward_kl.beta": 0.3, "shaping.mask_truncated": True},
    "gspo": {
        "loss": {"ratio": "sequence", "reduction": "sequence_mean", "clip_low": 0.02, "clip_high": 0.03},
        "mismatch": {"correct": "truncate", "level": "sequence", "high": 1.05},
    },
}  # fmt: skip


def settings_of(name: str, folder: Path, output: Path, **changes: Any) -> dict[str, Any]:
    recipe, method = ("ppo", None) if name.startswith("ppo") else ("grpo", name.partition(",")[0])
    changes = {"updates.epochs": 2, "reference.path": str(folder / "other"), "engine.optimizer.lr": 0.05} | CASES[name] | changes
    if recipe == "ppo":
        changes = {"critic.path": str(folder / "scorer")} | changes
    elif method != "gspo":
        changes["estimator"] = method
    if "mismatch" in changes:
        changes["certificate.action"] = "warn"
    return policy_settings(recipe, folder, output_dir=str(output), **changes)


BOTH = [(name, "packed") for name in CASES] + [(name, "sdpa") for name in ("ppo", "grpo, truncated masked", "gspo")]


@pytest.mark.parametrize(("name", "attention"), BOTH)  # without padding, and with
def test_a_step_is_that_of_the_loops(folder, tmp_path, name, attention):
    """Two updates on the same responses: ratios leave 1 and clips act."""
    tree = settings_of(name, folder, tmp_path / "run", **{"engine.attn_implementation": attention})
    with scripted(folder / "student", shift=0.1 if "mismatch" in CASES[name] else 0.0), recording() as found:
        _, records = run(tree)
    loops = Loops(configure(tree), found.rollouts[0])
    (fields,) = found.fields
    for i, x in enumerate(loops.responses):
        assert fields["old_logprobs"][i].tolist() == pytest.approx(x.old, abs=1e-5)
        assert fields["reference_logprobs"][i].tolist() == pytest.approx(x.reference, abs=1e-5)
        if x in loops.counted():
            assert fields["advantages"][i].tolist() == pytest.approx(x.advantage, abs=2e-5)
        for name_of, expected in (("returns", x.returns), ("values", x.value and x.value[:-1]), ("mismatch_weights", x.weight)):
            assert (name_of in fields) == any(getattr(y, n) for y in loops.responses for n in (NAMES[name_of],))
            if name_of in fields:
                assert fields[name_of][i].tolist() == pytest.approx(expected, abs=1e-5)
    for call in found.of(scalar=False):
        loss, tokens = loops.update()
        assert call["means"]["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-5)
        assert {ids: row["ratio"] for ids, row in call["tokens"].items() if row["ratio"]} == {
            ids: pytest.approx([ratio for ratio, _ in row], rel=2e-5) for ids, row in tokens.items()
        }
        assert {ids: row["per_token"] for ids, row in call["tokens"].items() if row["ratio"]} == {
            ids: pytest.approx([term for _, term in row], rel=5e-5, abs=2e-5) for ids, row in tokens.items()
        }
    for call in found.of(scalar=True):
        assert call["means"]["loss"] == pytest.approx(loops.update_critic(), rel=1e-5)
    assert {n: records[1][n] for n in loops.metrics} == pytest.approx(loops.metrics, rel=1e-5, abs=1e-5)
    apart = loops.critic is not None and loops.shared is None
    left = parts(tree, "model", *(["critic"] if apart else []))
    assert_weights(left["model"], loops.policy)
    if apart:
        assert_weights(left["critic"], loops.critic)
    assert records[1]["clipped_low"] + records[1]["clipped_high"] > 0


NAMES = {"returns": "returns", "values": "value", "mismatch_weights": "weight"}


def assert_weights(found: dict[str, Tensor], expected: Any) -> None:
    wanted = dict(expected.named_parameters())
    if hasattr(expected, "lm_head"):
        wanted.pop("score.weight", None)  # a critic's on this trunk, in no export
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.double(), wanted[name].detach(), rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_the_score_stands_at_the_policy_s_last_token_and_nowhere_else(folder, tmp_path):
    """With gamma and lambda of 1, no KL, a critic of zeros and no whitening, a token's reward is the difference of its advantage
    and the next one's. The penalty is for those that were cut only."""
    changes = {"reward_kl.beta": 0.0, "advantages": {"lam": 1.0, "whiten": False}, "shaping.missing_eos_penalty": 10.0}
    tree = policy_settings("ppo", folder, output_dir=str(tmp_path / "run"), **changes)
    with scripted(folder / "student"), recording() as found:
        run(tree)
    scores = [score(r.text, r.prompt) for r in found.rollouts[0]]
    rewards = []
    for advantages in found.fields[0]["advantages"]:
        row = [*advantages.tolist(), 0.0]
        rewards.append([a - b for a, b in itertools.pairwise(row)])
    assert rewards == [
        [0, 0, 0, scores[0]],  # an end
        [0, 0, 0, 0, scores[1] - 10],  # none
        [scores[2]],  # an end at once
        [],
        [0, 0, 0, scores[4]],  # an environment's tokens after the second
        [0, 0, scores[5] - 10],  # and after the first
    ]
    (call,) = found.of(scalar=False)
    counts = zip((r.ids for r in found.rollouts[0]), (4, 5, 1, 0, 4, 3), strict=True)
    assert {ids: len(row["ratio"]) for ids, row in call["tokens"].items()} == {ids: n for ids, n in counts if n}
