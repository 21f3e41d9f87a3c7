"""The only training loop. It knows no algorithm: an algorithm chooses responses, names its scorers and gives a loss per token.

A step: the next prompts -> rollouts -> scorers fill named fields -> experience -> updates (forward and backward over
micro-batches, certificate, optimizer, for each model that learns) -> evaluation -> one record -> checkpoint. Every rank runs the
same sequence of collectives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybrid import rng
from hybrid.batch import Batch
from hybrid.checkpoint import prune, read_header
from hybrid.engine import HybridEngine
from hybrid.loss_head import TokenLoss
from hybrid.mesh import Mesh, open_mesh
from hybrid.monitor import Monitor
from hybrid.profiling.phases import Phase
from trainers.alarms import Alarms
from trainers.algorithm import Algorithm, Fields, Learner, Mixture
from trainers.certificate import Certifier, enforce, is_due
from trainers.config import GRPOConfig, OPSDConfig, PolicyConfig, PPOConfig, RewardRecipe, RunConfig, SFTConfig
from trainers.data.batching import make_batches
from trainers.data.order import DataPosition, PromptStream
from trainers.data.prompts import PromptSet, load_prompts
from trainers.evaluation import table_rows
from trainers.grpo import GRPO
from trainers.losses.reductions import denominator, target_weights
from trainers.opsd import OPSD
from trainers.ppo import PPO
from trainers.reward_model import RewardTraining
from trainers.run_folder import open_run, starting_model
from trainers.scoring import open_teacher
from trainers.sft import SFT
from trainers.statistics import num_sampled, rollout_statistics
from trainers.types import Rollout

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """`before` and `after` are evaluations at step 0 and at the last one (None where there was none), by metric name."""

    run_dir: Path
    steps: int  # optimizer steps taken, those of earlier processes included
    before: dict[str, float] | None
    after: dict[str, float] | None
    stopped_by_signal: bool


def train(
    config: RunConfig, *, stop: Callable[[], bool] | None = None, on_step: Callable[[int, dict[str, Any]], None] | None = None
) -> TrainResult:
    """Run a recipe to `max_steps`, from the last whole checkpoint of `output_dir` if there is one.

    `stop` is polled once a step; if any rank's says so, all ranks save that step and leave. `on_step(step, metrics)` sees each
    record. Models and data are paths here: a recipe's `model.recipe` and `teacher.recipe` were trained before.
    Raises ValueError for bad input before anything is trained; later CertificateError, and FloatingPointError for a loss or
    gradient that is not finite.
    """
    mesh = open_mesh(config.engine)
    run_dir = Path(config.output_dir).absolute()  # a user's reward may change the working directory
    checkpoint = open_run(config, run_dir, mesh)
    if checkpoint is not None and (done := _finished(checkpoint, config, run_dir)) is not None:
        if mesh.rank == 0:
            logger.warning("%s is finished: step %d of max_steps=%d; nothing to train", run_dir, done.steps, config.max_steps)
        return done
    start = starting_model(config, run_dir, resumed=checkpoint is not None)
    with ExitStack() as stack:
        engine = stack.enter_context(closing(open_engine(config, start)))
        run = Run(config, engine, start, run_dir, checkpoint, opened=stack)
        return run.to_the_end(stop or (lambda: False), on_step or (lambda step, metrics: None))


def open_algorithm(config: RunConfig, engine: HybridEngine, start: str) -> Algorithm:
    """The algorithm that a config's class names. A new one is a file, a config class and a case here."""
    match config:
        case OPSDConfig():
            teacher = open_teacher(
                config.teacher, engine, config.engine, start=start, micro_batch_tokens=config.train.micro_batch_tokens
            )
            return OPSD(config, engine, teacher)
        case SFTConfig():
            return SFT(config, engine)
        case PPOConfig():
            return PPO(config, engine, start=start)
        case GRPOConfig():
            return GRPO(config, engine, start=start)
        case RewardRecipe():
            return RewardTraining(config, engine)
    raise ValueError(f"{type(config).__name__} names no algorithm; allowed: those of trainers.config.CONFIGS")


def open_engine(config: RunConfig, start: str) -> HybridEngine:
    """The model that a run trains, from the folder or hub name that it starts from."""
    steps = config.num_updates if isinstance(config, PolicyConfig) else config.max_steps
    settings = config.engine.model_copy(update={"optimizer": config.engine.optimizer.until(steps)})
    scalar = isinstance(config, RewardRecipe)
    shared = isinstance(config, PPOConfig) and config.critic.shared_weight is not None
    return HybridEngine.from_pretrained(start, settings, tokenizer=config.model.tokenizer, scalar=scalar, value_head=shared)


def _finished(checkpoint: Path, config: RunConfig, run_dir: Path) -> TrainResult | None:
    """The result of a run that reached max_steps and stands there whole, without loading a model."""
    state = read_header(checkpoint)["state"]["extra"]
    if not state.get("finished") or state["step"] < config.max_steps or not (run_dir / "model" / "config.json").is_file():
        return None
    return _result(run_dir, state["step"], state["evaluations"], stopped=False)


def _result(run_dir: Path, step: int, evaluations: dict[str, dict[str, float]], *, stopped: bool) -> TrainResult:
    last = evaluations.get("last")
    return TrainResult(
        run_dir=run_dir,
        steps=step,
        before=evaluations.get("before"),
        after=last if last is not None and last["step"] == step else None,
        stopped_by_signal=stopped,
    )


class Run:
    """One process's part of one run."""

    def __init__(
        self, config: RunConfig, engine: HybridEngine, start: str, run_dir: Path, checkpoint: Path | None, *, opened: ExitStack
    ) -> None:
        """`opened` closes what is opened here, also where something later is refused."""
        self.config, self.engine, self.run_dir = config, engine, run_dir
        self.mesh: Mesh = engine.mesh
        if engine.tokenizer is None:
            raise ValueError(f"model {start} has no tokenizer, which training data needs; set model.tokenizer")
        data = self._load_data(held_out=False)
        self.algorithm = opened.enter_context(closing(open_algorithm(config, engine, start)))
        self.algorithm.check(data.prompts)
        self.evaluator = None
        if config.data.eval is not None:
            held_out = self._load_data(held_out=True)
            self.evaluator = opened.enter_context(closing(self.algorithm.open_evaluator(held_out.prompts)))
        rng.seed_all(config.seed, engine.rank)
        state = self._load(checkpoint) if checkpoint else {}
        self.step: int = state.get("step", 0)
        self.evaluations: dict[str, dict[str, float]] = state.get("evaluations", {})  # "before", "last"
        position = DataPosition(**state["data"]) if state else DataPosition()
        self.stream = PromptStream(data.prompts, seed=config.seed, shuffle=config.data.shuffle, position=position)
        settings = config.model_dump(mode="json")
        monitor = Monitor(run_dir, config.log, rank=engine.rank, total_steps=config.max_steps, settings=settings)
        self.monitor = opened.enter_context(closing(monitor))
        self.monitor.truncate(self.step if state else -1)
        self.certified = False
        self.alarms = Alarms()
        if checkpoint and engine.rank == 0:
            logger.info("going on from %s, after step %d", checkpoint, self.step)

    def to_the_end(self, stop: Callable[[], bool], on_step: Callable[[int, dict[str, Any]], None]) -> TrainResult:
        stopped = False
        if self.step >= self.config.max_steps:  # a finished run that lost its model/
            if self.step > self.config.max_steps and self.engine.rank == 0:
                logger.warning("%s stands at step %d, beyond max_steps=%d: it is exported as it is", self.run_dir, self.step,
                               self.config.max_steps)  # fmt: skip
            self._export()
        if self.step == 0 and self.config.eval.before and self.evaluator is not None:
            record = self._evaluate("before")
            self.monitor.log(0, record)
            on_step(0, record)
        while self.step < self.config.max_steps and not stopped:
            record = self._step()
            self.monitor.log(self.step, record)
            on_step(self.step, record)
            for line in self.alarms.look(self.step, record) if self.engine.rank == 0 else ():
                logger.warning(line)
            stopped = bool(self.mesh.max([float(stop())])[0]) and self.step < self.config.max_steps
            every = self.config.checkpoint.every
            finished = self.step == self.config.max_steps
            if finished:  # before its checkpoint: a run whose last checkpoint stands has its model
                self._export()
            if stopped or finished or (every is not None and self.step % every == 0):
                self._save()
        return _result(self.run_dir, self.step, self.evaluations, stopped=stopped)

    # -- one step

    def _step(self) -> dict[str, Any]:
        config, engine, algorithm, monitor = self.config, self.engine, self.algorithm, self.monitor
        step = self.step + 1
        held = algorithm.samples_again or any(s.reads_policy for s in algorithm.scorers)
        with engine.holding() if held else nullcontext():
            before = engine.ledger
            with monitor.phase("rollout") as phase:
                rollouts, record = algorithm.rollouts(step, self.stream.take)
                phase.tokens += num_sampled(rollouts)
            swap = self._swap() if engine.ledger is not before else {}
            with monitor.phase("score") as phase:
                fields = {scorer.field: scorer.score(rollouts) for scorer in algorithm.scorers}
                fields, found = algorithm.experience(step, rollouts, fields)
                phase.tokens += sum(len(r.ids) for r in rollouts) if fields else 0
        statistics = rollout_statistics(rollouts, self.mesh)
        record = {"epoch": self.stream.position.epoch, **statistics, **record, **found, **swap}
        updates = []
        with monitor.phase("train") as phase:
            for number, places in enumerate(algorithm.minibatches(step, rollouts)):
                updates.append(self._update(step, number, [rollouts[i] for i in places], _at(fields, places), phase))
            algorithm.after_step()
        record |= {"updates": len(updates), **_averaged(updates)}
        self.step = step
        if config.log.completions:
            monitor.completions(step, table_rows("train", rollouts[: config.log.completions]))
        if self._evaluation_due():
            record |= self._evaluate("last")
        return record

    def _update(self, step: int, number: int, rollouts: list[Rollout], fields: Fields, phase: Phase) -> dict[str, float]:
        """One optimizer step of each model that learns, on one mini-batch."""
        engine, algorithm = self.engine, self.algorithm
        batches = algorithm.before_update(number, self._batches(rollouts, fields, algorithm.with_prompt))
        record: dict[str, float] = {}
        for learner in algorithm.learners(step):
            policy = learner.engine is engine
            certifier = self._certifier(step, rollouts) if policy and number == 0 else None
            with learner.on_device():
                with learner.token_loss() as token_loss:
                    loss = certifier.watch(token_loss) if certifier else token_loss
                    means = self._forward_backward(learner, batches, loss)
                phase.tokens += sum(b.num_tokens for b in batches)
                if certifier is not None:
                    means |= self._certify(certifier, step)
                for mixture in algorithm.mixtures(step, number) if policy else ():
                    means |= self._mix(mixture)
                means |= learner.engine.optim_step()
            record |= {f"{learner.prefix}{name}": value for name, value in means.items()}
        return record

    def _batches(self, rollouts: Sequence[Rollout], fields: Fields, with_prompt: bool) -> list[Batch]:
        return make_batches(
            rollouts,
            self.config.train.micro_batch_tokens,
            with_prompt=with_prompt,
            packed=all(engine.model.packs for engine in (self.engine, *self.algorithm.others.values())),
            fields=fields,
            unit=self.algorithm.unit,
        )

    def _swap(self) -> dict[str, float]:
        """Of the stay in generation that sampled the step's responses; `rollout_idle_s`: seconds in which a rank had nothing left
        to compute and waited for others. Collective."""
        swap = self.engine.ledger
        assert swap is not None, "the engine has generated"
        idle = [row[0] for row in self.mesh.table([swap.idle_s])]
        return {
            "swap_ms": swap.enter_ms + swap.leave_ms,
            "swap_bytes": swap.gathered_bytes,
            "rollout_idle_s_min": min(idle),
            "rollout_idle_s_mean": sum(idle) / len(idle),
            "rollout_idle_s_max": max(idle),
        }

    def _forward_backward(self, learner: Learner, batches: list[Batch], token_loss: TokenLoss) -> dict[str, float]:
        reduction, length = learner.reduction, learner.constant_length
        weights, count = None, None
        if reduction != "token_mean":
            weights = [target_weights(batch, reduction, length) for batch in batches]
            count = sum(denominator(batch, reduction) for batch in batches)
        means = learner.engine.forward_backward(
            batches,
            token_loss,
            weights=weights,
            denominator=count,
            value_loss=learner.value_loss,
            value_weight=learner.value_weight,
        )
        return self.algorithm.summarise(means)

    def _mix(self, mixture: Mixture) -> dict[str, float]:
        """Adds the gradient of weight x mean loss over the mixture's own tokens."""
        batches = self._batches(mixture.rollouts, {}, mixture.with_prompt)
        weights = [torch.full((b.num_targets,), mixture.weight) for b in batches]
        count = float(sum(b.num_targets for b in batches))
        means = self.engine.forward_backward(batches, mixture.token_loss, weights=weights, denominator=count)
        return {f"{mixture.name}_loss": means["loss"], f"{mixture.name}_tokens": means["tokens"]}

    def _certifier(self, step: int, rollouts: Sequence[Rollout]) -> Certifier | None:
        """Where a certificate is due, for a mini-batch with tokens that were sampled (on whatever rank)."""
        if not is_due(self.config.certificate, step, first=not self.certified) or not self.mesh.sum([num_sampled(rollouts)])[0]:
            return None
        # Another engine's log-probs are judged as bf16's are, whatever the dtype.
        dtype = "bfloat16" if self.algorithm.samples_elsewhere else self.config.engine.compute_dtype
        return Certifier(self.config.certificate, temperature=self.algorithm.temperature, compute_dtype=dtype)

    def _certify(self, certifier: Certifier, step: int) -> dict[str, float]:
        """The certificate's metrics. Raises CertificateError before a weight changes."""
        certificate = certifier.certificate(self.mesh)
        enforce(certificate, self.config.certificate, step, rank=self.engine.rank)
        self.certified = True
        return certificate.metrics()

    def _evaluation_due(self) -> bool:
        if self.evaluator is None:
            return False
        every = self.config.eval.every
        last = self.step == self.config.max_steps and self.config.eval.after
        return last or (every is not None and self.step % every == 0)

    def _evaluate(self, name: str) -> dict[str, float]:
        assert self.evaluator is not None
        evaluation = self.evaluator.run(self.engine)
        self.monitor.completions(self.step, table_rows("eval", evaluation.samples))
        self.evaluations[name] = {"step": self.step, **evaluation.metrics()}
        return evaluation.metrics()

    # -- state

    def _export(self) -> None:
        self.engine.save_pretrained(self.run_dir / "model")
        if self.engine.model.adapter is not None:
            self.engine.save_adapter(self.run_dir / "adapter")
        self.algorithm.export(self.run_dir)

    def _load_data(self, *, held_out: bool) -> PromptSet:
        engine = self.engine
        found = load_prompts(self.config.data, engine.tokenizer, held_out=held_out, eos_token_ids=engine.model.eos_token_ids)
        if engine.rank == 0:
            dropped = found.num_rows - len(found)
            logger.log(logging.WARNING if dropped else logging.INFO, "%s data: %s", "held-out" if held_out else "training", found)
        return found

    def _load(self, checkpoint: Path) -> dict[str, Any]:
        algorithm = self.algorithm
        state = self.engine.load(checkpoint, ema=algorithm.averages() or None, others=algorithm.others, seed=self.config.seed)
        algorithm.load_state(state.get("algorithm", {}))
        return state

    def _save(self) -> None:
        algorithm = self.algorithm
        state = {
            "step": self.step,
            "finished": self.step >= self.config.max_steps,  # then model/ is of this step
            "data": self.stream.position.to_json(),
            "evaluations": self.evaluations,
            "algorithm": algorithm.state(),
        }
        path = self.run_dir / "checkpoints" / f"step_{self.step}"
        self.engine.save(path, state, ema=algorithm.averages() or None, others=algorithm.others)
        if self.engine.rank == 0:
            prune(self.run_dir, self.config.checkpoint.keep)


def _at(fields: Fields, places: Sequence[int]) -> Fields:
    return {name: [values[i] for i in places] for name, values in fields.items()}


def _averaged(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over the updates of a step; of lr the last, of tokens the sum."""
    record: dict[str, float] = {}
    for name in dict.fromkeys(n for update in updates for n in update):
        values = [update[name] for update in updates if name in update]
        if name.endswith("tokens"):
            record[name] = sum(values)
        else:
            record[name] = values[-1] if name.endswith("lr") else sum(values) / len(values)
    return record
