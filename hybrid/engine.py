"""HybridEngine: one sharded model that generates, scores and trains, behind a handful of verbs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from hybrid import in_flight, lora, sharding
from hybrid.batch import Batch
from hybrid.checkpoint import Trained, load_checkpoint, save_checkpoint
from hybrid.config import HybridConfig, resolve
from hybrid.export import save_pretrained
from hybrid.loss_head import TokenLoss, chunked_loss, pack_head, tokens_per_chunk
from hybrid.mesh import check_same_module, describe, gather_texts, open_mesh, raise_together
from hybrid.models import VALUE_HEAD, ShardedModel
from hybrid.modes import Generation, Swap
from hybrid.optim.gradients import in_words
from hybrid.optim.host import HostMirror
from hybrid.optim.optimizers import make_optimizer
from hybrid.optim.schedules import Schedule
from hybrid.optim.update import Update
from hybrid.policy import empty_batch, mode
from hybrid.runner import Runner
from hybrid.sharding import outside_inference_mode
from inference_v2.head import Head
from inference_v2.scoring import Scored
from inference_v2.types import Completion, SamplingParams

Config = HybridConfig | Mapping[str, Any] | str | os.PathLike[str] | None
EXPORT_DTYPES = ("float32", "bfloat16", "float16")


class HybridEngine:
    """One model, two modes. All verbs are collective: every rank calls them in the same order, each with its own share.

    `weight_version` rises with every optimizer step, load and entry to generation; completions carry it.
    """

    def __init__(self, model: ShardedModel) -> None:
        config = model.config
        self.model, self.config, self.mesh = model, config, model.mesh
        parameters = model.parameters()
        self.optimizer = make_optimizer(config.optimizer, parameters)
        self._mirror: HostMirror | None = None
        if config.offload_optimizer:
            self._mirror = HostMirror(parameters.values(), pin=True)
            self._mirror.adopt(self.optimizer)
        self.lr_scheduler = Schedule(config.optimizer, self.optimizer)
        self._update = Update(
            parameters,
            self.optimizer,
            self.lr_scheduler,
            self.mesh,
            max_norm=config.optimizer.max_grad_norm,
            mirror=self._mirror,
        )
        self.weight_version = 0
        self._generation = Generation(model)
        self._base: Generation | None = None  # of the base below an adapter, when first asked for

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        config: Config = None,
        *,
        tokenizer: str | None = None,
        scalar: bool = False,
        value_head: bool = False,
    ) -> HybridEngine:
        """A HF folder or hub name, with the tokenizer beside it or the one of another folder. scalar: with a head of one row in
        place of the vocabulary's (a value or reward model), which trains and scores but does not generate; value_head: with one
        beside it. Raises ValueError for a bad config, folder or device."""
        config = resolve(config)
        mesh = open_mesh(config)
        return cls(
            ShardedModel.from_pretrained(os.fspath(path), config, mesh, tokenizer=tokenizer, scalar=scalar, value_head=value_head)
        )

    @classmethod
    def from_module(cls, module: nn.Module, config: Config = None, *, tokenizer: Any = None) -> HybridEngine:
        """A HF module in memory, or a PeftModel (LoRA), sharded in place; all ranks take rank 0's weights."""
        config = resolve(config)
        mesh = open_mesh(config)
        check_same_module(module)
        return cls(ShardedModel.from_module(module, config, mesh, tokenizer=tokenizer))

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer

    @property
    def rank(self) -> int:
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    @property
    def step_count(self) -> int:
        """Optimizer steps taken."""
        return self.lr_scheduler.step_count

    @property
    def max_model_len(self) -> int:
        """Prompt and new tokens of one request, at most."""
        return self.model.max_positions

    @property
    def ledger(self) -> Swap | None:
        """The last stay in generation."""
        return self._generation.ledger

    # -- generation and scoring

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        keys: Sequence[int] | None = None,
        *,
        unchanged: bool = False,
    ) -> list[list[Completion]]:
        """Per prompt of this rank's share its samples; shares may be unequal or empty. `unchanged` as in `generating`."""
        with self.generating(unchanged=unchanged) as runner:
            return runner.generate(prompts, sampling, keys)

    def generate_together(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, keys: Sequence[int] | None = None
    ) -> dict[int, list[Completion]]:
        """The same from the prompts of all ranks, given on each: who computes which is settled between the ranks, and each gets
        samples of about as many tokens, by place in the list (Runner.generate_together)."""
        with self.generating() as runner:
            return runner.generate_together(prompts, sampling, keys)

    def score_sequences(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        starts: Sequence[int] | None = None,
        temperature: float = 1.0,
        logprobs: bool = True,
        hidden: bool = False,
        unchanged: bool = False,
        adapter: bool = True,
    ) -> list[Scored]:
        """fp32 log-probs of each sequence's tokens from `starts` on (default 1), and with `hidden` the final hidden states that
        predict them, under the current weights: one packed prefill, what sequences begin with alike computed once
        (InferenceEngine.score). Each rank has its own sequences, as many as it likes. `unchanged` as in `generating`.

        adapter: False for the base model below an adapter, whose fused copy is another (rollout.on_leave says for how long) and
        stays valid whatever is trained. Raises ValueError for that without an adapter.
        """
        if not adapter:
            self._require_closed()
            if self._base is None:
                self._base = Generation(self.model, keep_pool=False, adapter=False)
            return self._base.score(0, sequences, starts=starts, temperature=temperature, logprobs=logprobs, hidden=hidden)
        with self.generating(unchanged=unchanged) as runner:
            return runner.score(sequences, starts=starts, temperature=temperature, logprobs=logprobs, hidden=hidden)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Stays in generation inside share one gather, whatever rollout.on_leave says, as long as this engine trains and loads
        nothing; the caller asserts that nobody else touches the weights (`unchanged` of all but the first entry)."""
        with self._generation.held():
            yield

    @contextmanager
    def generating(self, *, unchanged: bool = False) -> Iterator[Runner]:
        """One swap for several calls. Module modes, gradient-checkpointing flags and random states are left as they were.

        unchanged: the caller asserts that no weight was touched since the last entry, other than by this engine; a copy
        that is still held then serves without a gather, and its prefix cache stays valid. Raises RuntimeError where one is open
        already, as do the verbs that change weights.
        """
        self._require_closed()
        if self.model.is_scalar:
            raise ValueError("a scalar model (scalar=True) has scores and no vocabulary to generate from; use model.scores")
        if not (unchanged or self._generation.holds_stay):
            self.weight_version += 1
        with self._generation.open(self.weight_version) as runner:
            yield runner

    def _require_closed(self) -> None:
        if self._generation.is_open:
            raise RuntimeError("still inside `generating()`: leave it before you generate anew or change weights")

    def score(self, batch: Batch, temperature: float = 1.0, *, adapter: bool = True) -> Tensor:
        """[N] fp32 log-probs of the counted targets under the current weights, without dropout or gradient. adapter: False for
        those of the base model below an adapter."""
        return self.model.token_logprobs(batch, temperature, adapter=adapter)

    def equalise(self, batches: Sequence[Batch]) -> list[Batch]:
        """This rank's micro-batches with empty ones added, so that every rank has as many as the longest list."""
        (most,) = self.mesh.max([len(batches)])
        return [*batches, *(empty_batch() for _ in range(int(most) - len(batches)))]

    # -- training

    def forward_backward(
        self,
        batches: Sequence[Batch],
        token_loss: TokenLoss,
        *,
        weights: Sequence[Tensor] | None = None,
        denominator: float | None = None,
        value_loss: TokenLoss | None = None,
        value_weight: float = 1.0,
    ) -> dict[str, float]:
        """Add the gradient of the mean loss over all counted tokens of all ranks and micro-batches.

        With `weights`, one [N] per micro-batch, the loss is sum(weight x loss) / D over everything; D is the sum over ranks of
        `denominator` (None: of the weights). `value_loss` is of the value head's scores [N, 1] at the same places: `value_weight`
        times it is added, with the same weights and denominator; its metrics' names begin with "critic/". Returns global means:
        "loss", each metric per token, and "tokens", their number.

        Lists may differ in length between ranks, and be empty. Raises on every rank: ValueError for batches that do not fit
        the model, before anything runs; with the gradients dropped, FloatingPointError if the loss is not finite, and what
        a loss raised (on the other ranks RuntimeError). An error in a layer's forward (out of memory, say) is raised on
        its own rank alone; the others then wait in a collective until that process ends, or for config.timeout_s.
        """
        error = self._misfit(batches, weights, denominator)
        own = sum(batch.num_targets for batch in batches)
        if denominator is None:
            denominator = float(own) if weights is None else float(sum(w.double().sum() for w in weights))
        table = self.mesh.table([len(batches), own, denominator, error is not None])
        if any(row[3] for row in table):
            raise_together(error)
        of_values = None if value_loss is None else (value_loss, value_weight)
        rounds = int(max(row[0] for row in table))
        tokens = int(sum(row[1] for row in table))
        divisor = sum(row[2] for row in table) or 1.0
        sums: dict[str, Tensor] = {}
        failed: list[Exception] = []
        with (
            outside_inference_mode(),
            torch.enable_grad(),
            mode(self.model.module, train=self.config.dropout),
            self._dropping_gradients_on_error(),
        ):
            for i in range(rounds):
                batch = batches[i] if i < len(batches) else empty_batch()
                weight = weights[i] if weights is not None and i < len(batches) else None
                sharding.set_sync(self.model.module, self.config.zero_stage, last=i == rounds - 1)
                loss, metrics = self._loss(batch.to(self.mesh.device), token_loss, weight, failed, of_values)
                (loss / divisor).backward()
                for name, value in (metrics | {"loss": loss.detach()}).items():
                    sums[name] = sums.get(name, 0.0) + value
            names = self._agree(sums, failed)
            total = self.mesh.sum([float(sums.get(name, 0.0)) for name in names])
            means = {name: value / max(tokens, 1) for name, value in zip(names, total, strict=True)}
            means["loss"] *= max(tokens, 1) / divisor
            if not math.isfinite(means["loss"]):
                raise FloatingPointError(
                    f"step {self.step_count + 1}: the loss is {means['loss']}; no weight was changed; look at this step's batch"
                )
        return means | {"tokens": float(tokens)}

    def _misfit(self, batches: Sequence[Batch], weights: Sequence[Tensor] | None, denominator: float | None) -> ValueError | None:
        """Why this rank's micro-batches cannot be used."""
        if weights is not None and (given := [len(w) for w in weights]) != (needed := [b.num_targets for b in batches]):
            return ValueError(f"forward_backward: weights of lengths {given} for targets {needed}; give one [N] per micro-batch")
        if denominator is not None and not 0 <= denominator < math.inf:
            return ValueError(f"forward_backward: denominator={denominator}; allowed: finite, 0 or more")
        return next((error for batch in batches if (error := self.model.misfit(batch)) is not None), None)

    def _loss(
        self,
        batch: Batch,
        token_loss: TokenLoss,
        weight: Tensor | None,
        failed: list[Exception],
        value: tuple[TokenLoss, float] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Summed loss of one micro-batch with its graph, and metric sums. What a loss raises waits in `failed`, since the
        other ranks expect this one in the collectives of the backward pass; the batch counts as empty then."""
        weight = None if weight is None else weight.to(self.mesh.device)

        def summed(hidden: Tensor, head: Head, loss: TokenLoss, chunk_tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
            try:
                return chunked_loss(hidden, head, batch, loss, chunk_tokens, weight)
            except Exception as error:  # whatever it is: the other ranks must hear of it
                failed.append(error)
                return chunked_loss(hidden[:0], head, batch.select(0, 0), loss, chunk_tokens)

        def of_values(hidden: Tensor, head: Head) -> tuple[Tensor, dict[str, Tensor]]:
            assert value is not None
            return summed(hidden, head, value[0], max(batch.num_targets, 1))

        def head_function(hidden: Tensor, head: Head) -> tuple[Tensor, dict[str, Tensor]]:
            head = pack_head(head, self.model.kernels)
            chunk_tokens = tokens_per_chunk(head, self.config.loss_chunk_tokens)
            if self.model.is_scalar:  # all scores of a batch in one chunk: a loss may compare them
                chunk_tokens = max(batch.num_targets, 1)
            loss, metrics = summed(hidden, head, token_loss, chunk_tokens)
            if value is not None:
                value_head = self.model.module.value_head
                assert value_head is not None, "made with value_head=True"
                of_value, found = value_head(hidden, of_values)
                loss = loss + value[1] * of_value
                metrics |= {f"critic/{name}": sums for name, sums in found.items()}
            return loss, metrics

        return self.model.module(batch, head_function)

    def _agree(self, sums: dict[str, Tensor], failed: list[Exception]) -> list[str]:
        """The metrics' names over all ranks: one that saw no token knows none. Raises on every rank where any has `failed`."""
        notes = gather_texts(json.dumps({"metrics": sorted(sums), "error": describe(failed[0]) if failed else None}))
        of_ranks = [json.loads(note) for note in notes]
        if failed:
            raise failed[0]
        for rank, note in enumerate(of_ranks):
            if note["error"] is not None:
                raise RuntimeError(f"the loss function failed on rank {rank}: {note['error']}")
        return sorted({"loss"}.union(*(note["metrics"] for note in of_ranks)))

    @contextmanager
    def _dropping_gradients_on_error(self) -> Iterator[None]:
        """After an exception the module can train and generate again, without half a gradient."""
        try:
            yield
        except BaseException:
            in_flight.abandon(self.model.module)
            in_flight.discard_waiting(self.model.module)
            self.optimizer.zero_grad()
            raise

    def optim_step(self) -> dict[str, float]:
        """Clip, update, advance the schedule, free what is gathered. Returns grad_norm (before clipping) and lr.

        Raises FloatingPointError on every rank, before any weight changes, naming the step and the gradients that are not finite.
        """
        self._require_closed()
        self.model.parameters()  # frees the weights that stages 1 and 2 kept

        def refuse(names: list[str]) -> None:
            raise FloatingPointError(
                f"step {self.step_count + 1}: gradient of {in_words(names)} is not finite; no weight was changed; lower the "
                "learning rate or look at this step's batch"
            )

        with self._dropping_gradients_on_error():
            stepped = self._update.step(refuse)
        self.weight_version += 1
        return {"grad_norm": stepped.grad_norm, "lr": stepped.lr}

    # -- checkpoints

    def save(
        self,
        path: str | os.PathLike[str],
        extra: Mapping[str, Any] | None = None,
        *,
        ema: Mapping[str, Tensor] | None = None,
        others: Mapping[str, HybridEngine] = MappingProxyType({}),
    ) -> None:
        """A sharded checkpoint of weights, optimizer, schedule, random states and `extra` (JSON); weights, optimizer and schedule
        of `others` too, by name. Of a model with an adapter, the base is not stored but named by a fingerprint."""
        for engine in (self, *others.values()):
            engine._update.take()
        save_checkpoint(
            path,
            model=self._stored(),
            optimizer=self.optimizer,
            ema=ema,
            others={name: engine._trained() for name, engine in others.items()},
            state={
                "schedule": self.lr_scheduler.state_dict(),
                "extra": dict(extra or {}),
                "others": {name: engine.lr_scheduler.state_dict() for name, engine in others.items()},
                "bases": self._bases(others),
            },
            weight_version=self.weight_version,
        )

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        ema: Mapping[str, Tensor] | None = None,
        others: Mapping[str, HybridEngine] = MappingProxyType({}),
        seed: int = 0,
    ) -> dict[str, Any]:
        """Fill everything from a checkpoint, at any rank count; returns its `extra`. `seed` is used where the random states
        cannot be restored (another rank count). Raises ValueError for what does not fit, and for adapters of another base model,
        before anything changes."""
        self._require_closed()
        bases = self._bases(others)

        def check_bases(state: dict[str, Any]) -> None:
            if differing := [name for name, base in bases.items() if state.get("bases", {}).get(name) != base]:
                raise ValueError(
                    f"{path}: its adapter was trained on another base model than the {differing[0]}'s here; use the model, "
                    "compute_dtype and target_modules of that run"
                )

        loaded = load_checkpoint(
            path,
            model=self._stored(),
            optimizer=self.optimizer,
            ema=ema,
            others={name: engine._trained() for name, engine in others.items()},
            state_keys=("schedule", "extra"),
            check_state=check_bases,
            seed=seed,
        )
        for engine in (self, *others.values()):
            if engine._mirror is not None:
                engine._mirror.push()
        self.lr_scheduler.load_state_dict(loaded.state["schedule"])
        self.weight_version = max(self.weight_version + 1, loaded.weight_version)
        for name, engine in others.items():
            engine.lr_scheduler.load_state_dict(loaded.state["others"][name])
            engine.weight_version += 1
        return loaded.state["extra"]

    def _trained(self) -> Trained:
        return Trained(self._stored(), self.optimizer)

    def _stored(self) -> dict[str, nn.Parameter]:
        """What a checkpoint holds, as the optimizer has it."""
        stored = self.model.stored_parameters()
        return stored if self._mirror is None else self._mirror.named(stored)

    def _bases(self, others: Mapping[str, HybridEngine]) -> dict[str, str]:
        """Fingerprints of the models that are not stored themselves."""
        found = {name: engine.model.base_fingerprint() for name, engine in {"policy": self, **others}.items()}
        return {name: base for name, base in found.items() if base is not None}

    def save_pretrained(
        self, path: str | os.PathLike[str], dtype: str | None = None, *, weights: Mapping[str, Tensor] | None = None
    ) -> None:
        """A HF folder that the model's own auto class loads, in `dtype` (None: the compute dtype). What text never runs (a
        vision tower) is copied from the source folder bit for bit. An adapter is merged: W + s B A, from fp32. `weights`: these
        in place of the model's, an average of `effective_shards` say."""
        if dtype is not None and dtype not in EXPORT_DTYPES:
            raise ValueError(f"save_pretrained: dtype={dtype!r}; allowed: {', '.join(EXPORT_DTYPES)}")
        model = self.model
        towers = model.towers if model.files else ()
        low_rank = model.adapter.low_rank if model.adapter else ()
        tensors = model.parameters() if weights is None else weights
        tensors = {name: p for name, p in tensors.items() if name != VALUE_HEAD}
        copied = [name for name, _ in model.module.named_hf_parameters() if name.startswith(towers)] if towers else []
        save_pretrained(
            path,
            ((name, p.detach()) for name, p in tensors.items() if name not in low_rank and not name.startswith(towers)),
            model.hf_config,
            architecture=type(model.module.hf).__name__,
            tokenizer=model.tokenizer,
            source=model.path,
            copied=[(name, model.files.get(name)) for name in copied] if model.files else (),
            dtype=getattr(torch, dtype or self.config.compute_dtype),
            value=model.adapter.effective if model.adapter and weights is None else None,
        )

    def save_adapter(self, path: str | os.PathLike[str]) -> None:
        """The adapter alone, as peft's folder, which PeftModel.from_pretrained(base model, path) and `lora.path` load. Raises
        ValueError for a model without one and for a `path` that holds something else."""
        model = self.model
        lora.save_adapter(Path(path), model.require_adapter(), model.parameters(), base=model.name)

    def close(self) -> None:
        """Free the generator's memory. The process group stays: other engines may use it."""
        self._generation.close()
        if self._base is not None:
            self._base.close()
