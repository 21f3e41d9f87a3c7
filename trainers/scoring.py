"""Models that read rollouts, behind one seam: a scorer fills exactly one named field of the batches, and nothing else.

To the loss a frozen checkpoint, the starting weights with a privileged context, today's weights with it, and their moving
average look alike: `teacher_hidden`, which waits on the host, and a head that is gathered while the loss runs. A reference is
the same with `reference_logprobs` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from hybrid.batch import Batch
from hybrid.config import HybridConfig
from hybrid.engine import HybridEngine
from hybrid.models import ShardedModel
from hybrid.modes import Generation, OnLeave
from inference_v2.head import Head
from trainers.config import FrozenTeacher, Reference, SelfTeacher, Teacher
from trainers.data.batching import counted_positions, group_by_length, pack, read_at
from trainers.rollout import with_privileged_prompt
from trainers.types import Rollout


class Scorer(Protocol):
    """Fills `field` of the batches."""

    field: str

    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """For each rollout of this rank's share [n_i, ...], aligned with its counted positions. Collective."""
        ...

    def after_step(self) -> None:
        """Called once the policy's weights have changed."""
        ...

    def averages(self) -> dict[str, Tensor]:
        """The moving averages that checkpoints must hold, as DTensors; none where the weights are read from elsewhere."""
        ...

    @property
    def reads_policy(self) -> bool:
        """Whether it scores with the policy's own fused copy, which a rollout of the step has gathered already."""
        ...

    def close(self) -> None:
        """Free what scoring has kept."""
        ...


class ModelScorer:
    """Reads rollouts with one model. No gradient, no dropout, and the policy's mode and generators are left alone.

    `generation`: packed prefills of the inference engine, which compute the prompt of several samples once; its fused copy is
    kept for as long as the weights are the same. None: the engine's own for `live` (the policy's copy, which a rollout of the
    same step has gathered already), else the training module, in micro-batches.
    """

    def __init__(
        self,
        model: ShardedModel,
        engine: HybridEngine,
        *,
        micro_batch_tokens: int,
        scoring: Literal["engine", "module"] = "module",
        generation: Generation | None = None,
        ema_decay: float | None = None,
        offload: bool = False,
        adapter: bool = True,
    ) -> None:
        """adapter: False for the base model below the policy's adapter."""
        self.model, self.engine, self.scoring, self.generation, self.adapter = model, engine, scoring, generation, adapter
        self.micro_batch_tokens, self.ema_decay, self.offload = micro_batch_tokens, ema_decay, offload
        self._version = 0  # of the model's own weights
        if offload:
            model.offload()

    @property
    def reads_policy(self) -> bool:
        """Whether it scores with the policy's own fused copy."""
        return self.scoring == "engine" and self.generation is None

    def _read(self, rollouts: Sequence[Rollout], *, temperature: float | None = None) -> list[Tensor]:
        """At the counted positions of each rollout: log-probs at `temperature` [n], or hidden states [n, H] without one."""
        with self._on_device():
            read = self._by_module if self.scoring == "module" else self._by_engine
            return read(rollouts, temperature)

    def _by_engine(self, rollouts: Sequence[Rollout], temperature: float | None) -> list[Tensor]:
        places = [counted_positions(r) for r in rollouts]
        starts = [min(p, default=len(r.ids)) for p, r in zip(places, rollouts, strict=True)]
        sequences = [r.ids for r in rollouts]
        hidden = temperature is None
        what: dict[str, Any] = {"starts": starts, "logprobs": not hidden, "hidden": hidden, "temperature": temperature or 1.0}
        if self.generation is None:
            scored = self.engine.score_sequences(sequences, **what)
        else:
            scored = self.generation.score(self._version, sequences, **what)
        found: list[Tensor] = []
        for result, start, wanted in zip(scored, starts, places, strict=True):
            rows = result.hidden if hidden else result.logprobs
            assert rows is not None, "asked for"
            found.append(rows if len(wanted) == len(rows) else rows[torch.tensor(wanted, dtype=torch.long) - start])
        return found

    def _by_module(self, rollouts: Sequence[Rollout], temperature: float | None) -> list[Tensor]:
        def read(batch: Batch) -> Tensor:
            if temperature is None:
                return self.model.hidden_states(batch, adapter=self.adapter)
            return self.model.token_logprobs(batch, temperature, adapter=self.adapter)

        return in_micro_batches(self.engine, self.model, rollouts, self.micro_batch_tokens, read)

    def after_step(self) -> None:
        if self.ema_decay is not None:
            with self._on_device():
                self.model.lerp_(self.engine.model, 1.0 - self.ema_decay)
            self._version += 1

    def averages(self) -> dict[str, Tensor]:
        if self.ema_decay is None:
            return {}
        self._version += 1  # a load may write to them
        return dict(self.model.parameters())

    def close(self) -> None:
        """Free the fused copy."""
        if self.generation is not None:
            self.generation.close()

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        if not self.offload:
            yield
            return
        self.model.onload()
        try:
            yield
        finally:
            self.model.offload()


class TeacherScorer(ModelScorer):
    """`teacher_hidden`: the teacher's final hidden states at the counted positions, with the privileged prompt (where a row has
    one) in place of the student's."""

    field = "teacher_hidden"

    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        return self._read([with_privileged_prompt(r) for r in rollouts])

    @contextmanager
    def head(self) -> Iterator[Head]:
        """The teacher's head, gathered and detached, for as long as the loss runs; a forward of the teacher would free it."""
        if self.generation is not None and self.generation.keeps_copy:
            yield self.generation.head(self._version)
            return
        if self.model is not self.engine.model and not self.offload:
            with self.model.head() as head:
                yield head
            return
        # The student's own passes free and gather a live teacher's head again; an offloaded one's leaves the device.
        with self._on_device(), self.model.head() as head:
            copy = replace(head, weight=head.weight.clone(), bias=None if head.bias is None else head.bias.clone())
        yield copy


class ReferenceScorer(ModelScorer):
    """`reference_logprobs`: raw log-probs of the counted tokens at the policy's temperature, under weights that stay."""

    field = "reference_logprobs"
    temperature = 1.0

    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        return self._read(rollouts, temperature=self.temperature)


class OldLogprobs:
    """`old_logprobs`: raw log-probs under the policy's weights of now, by its training forward (without dropout)."""

    field = "old_logprobs"
    reads_policy = False

    def __init__(self, engine: HybridEngine, *, temperature: float, micro_batch_tokens: int) -> None:
        self.engine, self.temperature, self.micro_batch_tokens = engine, temperature, micro_batch_tokens

    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        def read(batch: Batch) -> Tensor:
            return self.engine.score(batch, self.temperature)

        return in_micro_batches(self.engine, self.engine.model, rollouts, self.micro_batch_tokens, read)

    def after_step(self) -> None: ...

    def averages(self) -> dict[str, Tensor]:
        return {}

    def close(self) -> None: ...


def in_micro_batches(
    engine: HybridEngine,
    model: ShardedModel,
    rollouts: Sequence[Rollout],
    micro_batch_tokens: int,
    read: Callable[[Batch], Tensor],
    places: Sequence[Sequence[int]] | None = None,
) -> list[Tensor]:
    """`read` [N, ...] of micro-batches over this rank's rollouts, back by rollout, on the host. With `places`, read at those
    tokens of each instead of before its counted ones. Collective: ranks with fewer micro-batches read empty ones."""
    lengths = [len(r.ids) for r in rollouts]
    groups = group_by_length(lengths, micro_batch_tokens, packed=model.packs)
    counts = [len(p) for p in places] if places is not None else [len(counted_positions(r)) for r in rollouts]
    batches = []
    for group in groups:
        batch = pack([rollouts[i] for i in group])
        batches.append(batch if places is None else read_at(batch, [places[i] for i in group]))
    found: list[Tensor] = [torch.empty(0)] * len(rollouts)
    for number, batch in enumerate(engine.equalise(batches)):
        rows = read(batch).to("cpu")
        group = groups[number] if number < len(groups) else []
        for i, part in zip(group, rows.split([counts[i] for i in group]), strict=True):
            found[i] = part
    return found


def open_teacher(
    teacher: Teacher, engine: HybridEngine, config: HybridConfig, *, start: str, micro_batch_tokens: int
) -> TeacherScorer:
    """The scorer that `teacher` describes. `start` is the folder the student started from (also on a resume). Raises ValueError
    where student and teacher do not share a vocabulary. Collective."""
    if isinstance(teacher, SelfTeacher) and teacher.weights == "live":
        scoring = _scoring(teacher.scoring, engine.model)
        return TeacherScorer(engine.model, engine, scoring=scoring, micro_batch_tokens=micro_batch_tokens)
    if isinstance(teacher, SelfTeacher) and teacher.weights == "start" and _is_below_adapter(engine, teacher.compute_dtype):
        options = _open_base(engine, scoring=teacher.scoring, offload=teacher.offload)
        return TeacherScorer(engine=engine, micro_batch_tokens=micro_batch_tokens, **options)
    decay = teacher.ema_decay if isinstance(teacher, SelfTeacher) and teacher.weights == "ema" else None
    path = teacher.path if isinstance(teacher, FrozenTeacher) else start
    if path is None:
        raise ValueError("teacher.recipe is not trained yet; run it first and set teacher.path to its model folder")
    compute = teacher.compute_dtype or config.compute_dtype
    settings = config.model_copy(update={"compute_dtype": compute})
    options = _open_model(
        path,
        engine,
        settings,
        check=isinstance(teacher, FrozenTeacher),
        scoring=teacher.scoring,
        offload=teacher.offload,
        is_average=decay is not None,
        with_adapter=isinstance(teacher, SelfTeacher) and _starts_from_adapter(engine),
    )
    return TeacherScorer(engine=engine, micro_batch_tokens=micro_batch_tokens, ema_decay=decay, **options)


def open_reference(
    reference: Reference, engine: HybridEngine, config: HybridConfig, *, start: str, temperature: float, micro_batch_tokens: int
) -> ReferenceScorer:
    """A frozen copy of `reference.path`, or of what the policy started from: `start`, with the adapter of `engine.lora.path`; the
    base below a new adapter needs no copy. Raises ValueError for another vocabulary. Collective."""
    if reference.path is None and _is_below_adapter(engine, None):
        options = _open_base(engine, scoring="auto", offload=reference.offload)
    else:
        options = _open_model(
            reference.path or start,
            engine,
            config,
            check=reference.path is not None,
            scoring="auto",
            offload=reference.offload,
            with_adapter=reference.path is None and _starts_from_adapter(engine),
            roles=("policy", "reference"),
        )
    scorer = ReferenceScorer(engine=engine, micro_batch_tokens=micro_batch_tokens, **options)
    scorer.temperature = temperature
    return scorer


def _is_below_adapter(engine: HybridEngine, compute_dtype: str | None) -> bool:
    """Whether the weights that the policy started from are those below its adapter, in this dtype."""
    config = engine.config
    fresh = config.lora is not None and config.lora.path is None
    return fresh and compute_dtype in (None, config.compute_dtype)


def _starts_from_adapter(engine: HybridEngine) -> bool:
    return engine.config.lora is not None and engine.config.lora.path is not None


def _open_base(engine: HybridEngine, *, scoring: Literal["auto", "engine", "module"], offload: bool) -> dict[str, Any]:
    """What a ModelScorer of the base model below the policy's adapter is made of: it needs no shards of its own."""
    chosen = _scoring(scoring, engine.model)
    if chosen == "module":
        return {"model": engine.model, "scoring": chosen, "adapter": False}
    generation = Generation(
        engine.model,
        on_leave="offload" if offload else "keep",
        keep_pool=False,
        from_files=engine.model.files is not None,
        adapter=False,
    )
    return {"model": engine.model, "scoring": chosen, "generation": generation, "adapter": False}


def _open_model(
    path: str,
    engine: HybridEngine,
    config: HybridConfig,
    *,
    check: bool,
    scoring: Literal["auto", "engine", "module"],
    offload: bool,
    is_average: bool = False,
    with_adapter: bool = False,
    roles: tuple[str, str] = ("student", "teacher"),
) -> dict[str, Any]:
    """What a ModelScorer of a folder's weights is made of; `with_adapter`, with the adapter that the policy starts from.

    A frozen model that is scored by the inference engine has no shards: its fused copy is read from the folder. Only where
    that does not fit (rollout.gather), or where the folder's weights are not all, are its shards made.
    """
    limit = engine.model.vocab_limit
    settings = config.model_copy(update={"master_dtype": "float32", "vocab_limit": limit, "dropout": False})
    # Only an average needs fp32 masters: a frozen copy is held in the dtype it computes in.
    model = ShardedModel.from_pretrained(path, settings, engine.mesh, trainable=False, masters=is_average, load=False)
    if check:
        vocabulary = None if model.tokenizer is None else model.tokenizer.get_vocab()
        check_same_vocabulary(engine.tokenizer.get_vocab(), vocabulary, path, roles=roles)
        rows = model.hf_config.get_text_config().vocab_size
        if limit is not None and rows < limit:
            role = roles[1]
            raise ValueError(f"{role} {path} has {rows} rows of logits, the tokenizer needs {limit}; use a matching {role}")
    chosen = _scoring(scoring, model)
    generation, in_shards = None, chosen == "module" or is_average or with_adapter
    if chosen == "engine":
        on_leave: OnLeave = "offload" if offload else config.rollout.on_leave if is_average else "keep"
        generation = Generation(model, on_leave=on_leave, keep_pool=False, from_files=not in_shards)
        in_shards = in_shards or generation.choose() == "stream"
    if in_shards:
        model.load()
        if with_adapter:
            model.lerp_(engine.model, 1.0)
    elif generation is not None:
        generation.head(version=0)  # a folder that does not fit its config is met at the start
    offload = offload and not (generation is not None and generation.keeps_copy)
    return {"model": model, "scoring": chosen, "generation": generation, "offload": offload}


def _scoring(asked: Literal["auto", "engine", "module"], model: ShardedModel) -> Literal["engine", "module"]:
    if asked == "engine" and model.spec is None:
        raise ValueError(f"teacher.scoring=engine with model_type={model.hf_config.model_type!r}, which is not registered; "
                         "allowed: module, auto")  # fmt: skip
    return "module" if asked == "module" or model.spec is None else "engine"


def check_same_vocabulary(
    student: Mapping[str, int],
    teacher: Mapping[str, int] | None,
    name: str,
    show: int = 3,
    *,
    roles: tuple[str, str] = ("student", "teacher"),
) -> None:
    """Raises ValueError naming the first ids whose tokens differ: to one model they would be other tokens. `roles` are what the
    two are called there; `name` is the second's folder."""
    one, other = roles
    if teacher is None:
        raise ValueError(f"{other} {name} has no tokenizer to compare with the {one}'s; put the tokenizer beside its weights")
    if student == teacher:
        return
    mine, theirs = ({i: token for token, i in vocab.items()} for vocab in (student, teacher))
    differing = [i for i in sorted(mine.keys() | theirs.keys()) if mine.get(i) != theirs.get(i)]
    shown = "; ".join(f"{i}: {one} {mine.get(i)!r}, {other} {theirs.get(i)!r}" for i in differing[:show])
    raise ValueError(
        f"{one} and {other} {name}: their tokenizers differ in {len(differing)} ids ({shown}); use a {other} with the same one"
    )
