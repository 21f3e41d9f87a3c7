"""What methods of policy optimisation share: sampled responses with rewards, the reference, the log-probs before the first
update, mini-batches over all ranks, and the clipped loss. ppo.py and grpo.py say where advantages come from."""

from __future__ import annotations

import json
import random
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid.batch import Batch
from hybrid.engine import HybridEngine
from hybrid.loss_head import TokenLoss
from hybrid.mesh import gather_texts
from trainers.advantages import AdaptiveKL, RunningMoments, kl_estimate, mismatch_weights
from trainers.algorithm import Algorithm, EvaluatesHeldOut, Fields, Learner, Mixture, Take
from trainers.config import PolicyConfig
from trainers.data.batching import counted_positions
from trainers.data.order import DrawnPrompt, stable_hash
from trainers.ema import PolicyAverage
from trainers.losses import divergence_token_loss
from trainers.losses.policy import policy_token_loss
from trainers.pretraining_mix import PretrainingData
from trainers.reward_scoring import RewardScorer
from trainers.rollout import require_privileged, require_room
from trainers.sampler import Sampler
from trainers.scoring import OldLogprobs, ReferenceScorer, Scorer, open_reference, open_teacher
from trainers.types import Prompt, Rollout

Key = tuple[int, int]  # of a response in a step: its group and its number in it


class OnPolicy(Algorithm):
    config: PolicyConfig

    def __init__(self, config: PolicyConfig, engine: HybridEngine, *, start: str) -> None:
        """`start` is the folder that the policy started from (also on a resume). Collective."""
        self.config, self.engine = config, engine
        self.prompts_per_step = config.rollout.prompts_per_step
        self.temperature = config.rollout.sampling.temperature
        options: dict[str, Any] = {"micro_batch_tokens": config.train.micro_batch_tokens}
        self.rewards = RewardScorer(config.rewards, engine, config.engine, **options)
        scorers: list[Scorer] = []
        if config.reference is not None:
            reference = open_reference(
                config.reference, engine, config.engine, start=start, temperature=self.temperature, **options
            )
            scorers.append(reference)
        if self._recomputes:
            scorers.append(OldLogprobs(engine, temperature=self.temperature, **options))
        self.teacher = None
        if config.teacher is not None:
            self.teacher = open_teacher(config.teacher, engine, config.engine, start=start, **options)
            scorers.append(self.teacher)
        self.scorers = scorers
        self.average = None if config.ema_decay is None else PolicyAverage(engine, config.ema_decay)
        self.mix = None if config.ptx is None else PretrainingData(config, engine)
        kl = config.reward_kl
        self.adaptive = AdaptiveKL(kl.beta, kl.target, kl.horizon) if kl.target is not None else None
        self.moments = RunningMoments()  # of all scores so far
        self._responses: list[Key] = []  # of the step, on all ranks, in one order
        self._first = True  # whether the next update is the step's first, under the weights of the rollout
        # Last: it may start a process, which nobody would close if something else were refused after it.
        self.sampler = Sampler(config, config.rollout, engine)
        self.sampler.warn_if_truncated("policy optimisation")
        self.samples_elsewhere, self.conversations = config.rollout.is_foreign, self.sampler.conversations

    @property
    def _recomputes(self) -> bool:
        asked = self.config.updates.old_logprobs
        foreign = self.config.rollout.is_foreign
        return asked == "recompute" or (asked == "auto" and (foreign or self.config.mismatch.correct != "off"))

    @property
    def beta(self) -> float:
        """Today's weight of the KL in the reward."""
        return self.config.reward_kl.beta if self.adaptive is None else self.adaptive.beta

    def check(self, prompts: Sequence[Prompt]) -> None:
        self.sampler.check(prompts)
        room: dict[str, Any] = {"max_new_tokens": self.sampler.longest_response}
        if self.teacher is not None:
            if self.teacher.model is self.engine.model:
                require_privileged(prompts, self.config.data)
            require_room(prompts, self.teacher.model.max_positions, privileged=True, reader="teacher", **room)
        readers = [("reference", s.model) for s in self.scorers if isinstance(s, ReferenceScorer)]
        readers += [("reward model", reward.model) for reward in self.rewards.models]
        for name, model in (*readers, *((name, engine.model) for name, engine in self.others.items())):
            require_room(prompts, model.max_positions, reader=name, **room)
        self.rewards.check(prompts)

    def open_evaluator(self, prompts: Sequence[Prompt]) -> EvaluatesHeldOut:
        if self.config.eval.by_training_rewards:
            self.held_out_rewards = self.rewards
            for reward in self.rewards.models:
                most = self.config.eval.max_new_tokens
                require_room(prompts, reward.model.max_positions, reader="reward model", max_new_tokens=most)
        return super().open_evaluator(prompts)

    # -- responses and what they are worth

    def rollouts(self, step: int, take: Take) -> tuple[list[Rollout], dict[str, float]]:
        return self.judged(take(self.prompts_per_step))

    def judged(self, prompts: Sequence[DrawnPrompt]) -> tuple[list[Rollout], dict[str, float]]:
        """This rank's share of the responses, with their rewards, and metrics. Collective."""
        rollouts, of_turns = self.sampler.draw(prompts)
        scored, of_rewards = self.rewards.score(self.sampler.answers(rollouts))
        judged = [replace(s, text=r.text) for s, r in zip(scored, rollouts, strict=True)]
        return judged, of_turns | of_rewards

    def experience(self, step: int, rollouts: Sequence[Rollout], fields: Fields) -> tuple[Fields, dict[str, float]]:
        engine_logprobs = [_rollout_logprobs(r) for r in rollouts]
        old = fields.setdefault("old_logprobs", engine_logprobs)
        weights, record = self._mismatch_weights(old, engine_logprobs)
        if weights is not None:
            fields["mismatch_weights"] = weights
        kls = None
        if "reference_logprobs" in fields:
            estimator = self.config.reward_kl.estimator
            kls = [kl_estimate(estimator, lp, ref) for lp, ref in zip(old, fields["reference_logprobs"], strict=True)]
            record |= self._kl_metrics(old, fields["reference_logprobs"])
        counted = [r for r in rollouts if self.counts(r)]
        self._responses = list(self.of_all_ranks(counted, [0.0] * len(counted)))
        scores = self._shaped(rollouts)
        made, found = self.advantages(rollouts, scores, kls if self.beta > 0 else None, fields)
        record["reward_kl_beta"] = self.beta
        if self.adaptive is not None and self.policy_learns(step):
            (number,) = self.engine.mesh.sum([len(rollouts)])
            self.adaptive = self.adaptive.updated(record["kl_per_response"], int(number))
        return fields | made, record | found

    @abstractmethod
    def advantages(
        self, rollouts: Sequence[Rollout], scores: Sequence[float], kls: Sequence[Tensor] | None, fields: Fields
    ) -> tuple[Fields, dict[str, float]]:
        """`advantages` (and a critic's `returns`) of the counted tokens of each rollout, and metrics. `kls` [n_i] are the terms
        of the KL in the reward, of weight `beta`. Collective."""

    def _shaped(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Scores after normalisation, clipping and the penalty for a response without an end. Collective."""
        shaping = self.config.shaping
        scores = [r.reward or 0.0 for r in rollouts]
        if shaping.normalise != "none":
            self.moments = self.moments.updated(scores, self.engine.mesh.sum)
            whole = torch.tensor(scores, dtype=torch.float32)
            scores = self.moments.normalised(whole, shift_mean=shaping.normalise == "whiten").tolist()
        if shaping.clip is not None:
            scores = [min(max(s, -shaping.clip), shaping.clip) for s in scores]
        return [s - shaping.missing_eos_penalty * was_cut(r) for s, r in zip(scores, rollouts, strict=True)]

    def _mismatch_weights(self, old: list[Tensor], rollout: list[Tensor]) -> tuple[list[Tensor] | None, dict[str, float]]:
        """The weights that correct for another engine's log-probs, where asked for. Collective."""
        if self.config.mismatch.correct == "off":
            return None, {}
        found = [mismatch_weights(self.config.mismatch, o, r) for o, r in zip(old, rollout, strict=True)]
        tokens, corrected = self.engine.mesh.sum([sum(len(o) for o in old), sum(number for _, number in found)])
        return [w for w, _ in found], {"mismatch_corrected": corrected / max(tokens, 1.0)}

    def _kl_metrics(self, old: Sequence[Tensor], reference: Sequence[Tensor]) -> dict[str, float]:
        """The KL to the reference (k3 per token; k1 summed over a response) and where in a response it is. Collective."""
        terms = [kl_estimate("k3", lp, ref).tolist() for lp, ref in zip(old, reference, strict=True)]
        whole = sum(float((lp - ref).double().sum()) for lp, ref in zip(old, reference, strict=True))
        rows = [(t[0], 1.0) for t in terms if t]
        quarters = [[0.0, 0.0] for _ in range(4)]
        for t in terms:
            for place, value in enumerate(t):
                quarter = quarters[4 * place // len(t)]
                quarter[0] += value
                quarter[1] += 1
        local = [len(terms), whole, sum(v for v, _ in rows), len(rows), *(x for q in quarters for x in q)]
        count, summed, first, firsts, *places = self.engine.mesh.sum(local)
        metrics = {"kl_per_response": summed / max(count, 1.0), "kl_first_token": first / max(firsts, 1.0)}
        for i in range(4):
            metrics[f"kl_quarter_{i + 1}"] = places[2 * i] / max(places[2 * i + 1], 1.0)
        tokens = sum(places[1::2])
        return metrics | {"kl_reference": sum(places[0::2]) / max(tokens, 1.0)}

    # -- updates

    def counts(self, rollout: Rollout) -> bool:
        """Whether the response is in the losses."""
        return not (self.config.shaping.mask_truncated and was_cut(rollout))

    def minibatches(self, step: int, rollouts: Sequence[Rollout]) -> Iterable[Sequence[int]]:
        """Cut from the responses of all ranks, so that it does not matter which rank holds which. Parts without a response (of
        which dynamic sampling may leave none at all) are no updates."""
        places = {key_of(r): i for i, r in enumerate(rollouts)}
        for epoch in range(self.config.updates.epochs):
            order = list(self._responses)
            if self.config.updates.minibatches > 1:
                random.Random(stable_hash("minibatches", self.config.seed, step, epoch)).shuffle(order)
            for part in _cut(order, self.config.updates.minibatches):
                if part:
                    yield [places[key] for key in part if key in places]

    def before_update(self, number: int, batches: list[Batch]) -> list[Batch]:
        self._first = number == 0
        if self.config.loss.ratio == "token":
            return batches
        filled = []
        for i, batch in enumerate(self.engine.equalise(batches)):
            logprobs = self.engine.score(batch, self.temperature)
            if i < len(batches):
                assert batch.old_logprobs is not None
                difference = (logprobs.cpu() - batch.old_logprobs).double()
                sums = torch.zeros(batch.num_sequences, dtype=torch.float64).index_add_(0, batch.sequence_index, difference)
                means = sums / torch.bincount(batch.sequence_index, minlength=batch.num_sequences).clamp(min=1)
                filled.append(replace(batch, sequence_log_ratio=means[batch.sequence_index].float()))
        return filled

    def policy_learns(self, step: int) -> bool:
        """Whether the step's updates change the policy."""
        return True

    def learners(self, step: int) -> Sequence[Learner]:
        loss = self.config.loss
        return [Learner(self.engine, self.token_loss, reduction=loss.reduction, constant_length=loss.constant_length)]

    @contextmanager
    def token_loss(self) -> Iterator[TokenLoss]:
        policy = policy_token_loss(self.config.loss, self.temperature, self.engine.model.kernels)
        if self._first:
            policy = _with_mismatch(policy)
        if self.teacher is None:
            yield policy
            return
        with self.teacher.head() as head:
            distil = divergence_token_loss(self.config.distill, head, self.temperature, self.engine.model.kernels)
            yield _both(policy, distil, self.config.distill_weight)

    def mixtures(self, step: int, number: int) -> Sequence[Mixture]:
        return [] if self.mix is None else [self.mix.draw()]

    def after_step(self) -> None:
        super().after_step()
        if self.average is not None:
            self.average.after_step()

    # -- state

    def averages(self) -> dict[str, Tensor]:
        return super().averages() | ({} if self.average is None else self.average.averages())

    def state(self) -> dict[str, Any]:
        return {
            "reward_moments": asdict(self.moments),
            "reward_kl_beta": self.beta,
            "mix": None if self.mix is None else self.mix.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.moments = RunningMoments(**state["reward_moments"])
        if self.adaptive is not None:
            self.adaptive = replace(self.adaptive, beta=state["reward_kl_beta"])
        if self.mix is not None:
            self.mix.load_state(state["mix"])

    def export(self, run_dir: Path) -> None:
        if self.average is not None:
            self.average.save_pretrained(run_dir / "model_ema")

    def close(self) -> None:
        super().close()
        self.rewards.close()
        self.sampler.close()

    def of_all_ranks(self, rollouts: Sequence[Rollout], values: Sequence[float]) -> dict[Key, float]:
        """Each response's value, of all ranks' responses in one order. Collective."""
        texts = gather_texts(json.dumps([(*key_of(r), value) for r, value in zip(rollouts, values, strict=True)]))
        return {(group, number): value for group, number, value in sorted(row for text in texts for row in json.loads(text))}


def key_of(rollout: Rollout) -> Key:
    return rollout.group, rollout.sample_index


def was_cut(rollout: Rollout) -> bool:
    return rollout.finish_reason == "length"


def _rollout_logprobs(rollout: Rollout) -> Tensor:
    """[n] fp32: raw log-probs of the counted tokens, as the engine that drew them says."""
    start = rollout.num_prompt
    return torch.tensor([rollout.logprobs_raw[p - start] for p in counted_positions(rollout)], dtype=torch.float32)


def _cut(items: Sequence[Key], parts: int) -> Iterator[Sequence[Key]]:
    """`parts` runs of about as many items each."""
    for i in range(parts):
        yield items[len(items) * i // parts : len(items) * (i + 1) // parts]


def _both(policy: TokenLoss, distil: TokenLoss, weight: float) -> TokenLoss:
    """The policy loss plus `weight` times the divergence from the teacher, over the same tokens and with their denominator."""

    def token_loss(logits: Tensor, chunk: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        per_token, metrics = policy(logits, chunk)
        divergence, of_teacher = distil(logits, chunk)
        return per_token + weight * divergence, of_teacher | metrics

    return token_loss


def _with_mismatch(policy: TokenLoss) -> TokenLoss:
    """Adds how far the trainer's log-probs are from those of the engine that drew the tokens: `mismatch_abs`, their distance;
    `mismatch_weight`, the importance weight; `mismatch_kl`, k3 of KL(engine || trainer)."""

    def token_loss(logits: Tensor, chunk: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        per_token, metrics = policy(logits, chunk)
        assert chunk.rollout_logprobs_raw is not None
        difference = metrics["logprob"] - chunk.rollout_logprobs_raw
        metrics["mismatch_abs"] = difference.abs()
        metrics["mismatch_weight"] = difference.clamp(-20, 20).exp()
        metrics["mismatch_kl"] = kl_estimate("k3", chunk.rollout_logprobs_raw, metrics["logprob"])
        return per_token, metrics

    return token_loss
