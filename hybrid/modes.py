"""The swap between training and generation, with its ledger.

`full`: every layer is gathered once into the fused copy; ranks then decode without collectives. `stream`: each layer is gathered
for each step, in lock step; ranks agree before every step whether any of them has work, and one that has none takes part.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from hybrid import rng
from hybrid.mesh import Mesh
from hybrid.models import ShardedModel
from hybrid.sharding import ShardedSource, gathered, reshard
from inference_v2.engine import InferenceEngine
from inference_v2.kernels import get_kernels
from inference_v2.models.decoder import Decoder
from inference_v2.rope import RopeTable
from inference_v2.types import Completion, EngineStats, Request, SamplingParams
from inference_v2.weights import FusedWeights, StreamedWeights

log = logging.getLogger(__name__)
Gather = Literal["full", "stream"]


@dataclass(frozen=True)
class Swap:
    """One stay in generation, as the ledger records it."""

    gather: Gather
    weight_version: int
    gathered_bytes: int  # received or copied out of shards, in the compute dtype; 0: the copy was still good
    copy_bytes: int  # the fused copy on the device
    enter_ms: float  # until the first prompt could be taken
    leave_ms: float
    peak_bytes: int  # of this process: device memory on CUDA, resident memory elsewhere


class LockStep:
    """What ranks tell each other: one small all-reduce before each streamed step, and one when they leave.

    Every rank calls `agree` until all have left or one has failed; after that, nobody does.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.over = False

    def agree(self, *, pending: bool, inside: bool, failed: bool = False) -> bool:
        """True if any rank has work. Raises RuntimeError naming the other ranks that failed."""
        table = self._mesh.table([pending, inside, failed])
        lost = [rank for rank, row in enumerate(table) if row[2]]
        self.over = bool(lost) or not any(row[1] for row in table)
        if lost and not failed:
            raise RuntimeError(f"generation failed on rank {', '.join(map(str, lost))}; its own error says why")
        return not lost and any(row[0] for row in table)


class Runner:
    """What `engine.generating()` yields: the generator with this rank's share of the prompts.

    Where layers are streamed, `step` (and so `generate`) is collective: a rank calls it until `has_work` is False on all.
    """

    def __init__(self, engine: InferenceEngine, lock_step: LockStep, source: ShardedSource | None) -> None:
        self._engine = engine
        self._lock_step = lock_step
        self._source = source  # None: nothing is gathered in a step
        self._kept: list[Completion] = []  # finished while `generate` waited for others

    def add(self, request: Request) -> int:
        return self._engine.add(request)

    def abort(self, request_id: int) -> None:
        self._engine.abort(request_id)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    @property
    def has_work(self) -> bool:
        """Of this rank."""
        return self._engine.has_work

    def step(self) -> list[Completion]:
        """Advance every running request by a step; the samples that finished."""
        if self._source is None:
            return self._engine.step()
        kept, self._kept = self._kept, []
        return kept + self._pass() if self._lock_step.agree(pending=self.has_work, inside=True) else kept

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, keys: Sequence[int] | None = None
    ) -> list[list[Completion]]:
        """Per prompt its samples in order. `keys` name the prompts for the randomness (None: their place in the list)."""
        if self._source is None:
            return self._engine.generate(prompts, sampling, keys)
        numbers = range(len(prompts)) if keys is None else keys
        ids = [self.add(Request(tuple(p), sampling, key)) for p, key in zip(prompts, numbers, strict=True)]
        found: dict[int, list[Completion]] = {i: [] for i in ids}
        while self._lock_step.agree(pending=self.has_work, inside=True):
            for completion in self._pass():
                found.get(completion.request_id, self._kept).append(completion)
        return [sorted(found[i], key=lambda c: c.sample_index) for i in ids]

    def _pass(self) -> list[Completion]:
        """One step in which every rank gathers every layer once, whatever becomes of this rank's own work."""
        assert self._source is not None
        self._source.opened = 0
        try:
            if self.has_work:
                return self._engine.step()
            self._engine.idle_step()
            return []
        finally:
            for prefix in ("", *self._source.prefixes, "")[self._source.opened :]:
                with self._source.scope(prefix):
                    pass

    def leave(self, *, failed: bool) -> None:
        """Stay in step with the ranks that still generate. Raises RuntimeError if another rank failed."""
        while not self._lock_step.over:
            if self._lock_step.agree(pending=False, inside=False, failed=failed) and self._source is not None:
                self._pass()


class Generation:
    """The generating side of one sharded model: its fused copy, its engine, and when to gather."""

    def __init__(self, model: ShardedModel) -> None:
        self.model = model
        self.config = model.config.rollout
        self.dtype = getattr(torch, model.config.compute_dtype)
        self.gather: Gather | None = None  # decided at the first swap
        self.ledger: list[Swap] = []
        self._engine: InferenceEngine | None = None
        self._copy: FusedWeights | None = None
        self._checksums: tuple[int, dict[str, int]] | None = None

    @contextmanager
    def open(self, version: int) -> Iterator[Runner]:
        """Generate with the weights of `version`; a copy of that version that is still held is used as it is. Collective."""
        started = time.perf_counter()
        generators = rng.capture()
        self._verify_checksums(version)
        reshard(self.model.module)
        if self.gather is None:
            self.gather = self._choose()
        source = self.model.source()
        runner = None
        try:
            engine = self._enter(source, version)
            runner = Runner(engine, LockStep(self.model.mesh), source if self.gather == "stream" else None)
            entered = time.perf_counter()
            yield runner
        except BaseException:
            self._abandon()
            if runner is not None:
                runner.leave(failed=True)
            raise
        else:
            runner.leave(failed=False)
            leaving = time.perf_counter()
            copy_bytes = self._copy.nbytes if self._copy is not None else 0
            self._leave()
            self._record(version, source, copy_bytes, (entered - started) * 1e3, (time.perf_counter() - leaving) * 1e3)
        finally:
            rng.restore(generators)
            assert not gathered(self.model.module), "a group is still gathered after generation"

    def _enter(self, source: ShardedSource, version: int) -> InferenceEngine:
        model, config = self.model, self.config.engine
        if self.gather == "stream":
            weights = StreamedWeights(
                model.spec, source, version, self.dtype, model.mesh.device, model.vocab_limit, config.batch_invariant
            )
        else:
            if self._copy is None:
                self._copy = FusedWeights(
                    model.spec, self.dtype, model.mesh.device, None, model.vocab_limit, config.batch_invariant
                )
            self._copy.refresh(source, version)
            weights = self._copy
        if self._engine is None:
            positions = config.max_model_len or model.spec.max_position_embeddings
            decoder = Decoder(
                model.spec,
                get_kernels(config.kernels),
                RopeTable.build(model.spec.rope, positions, self.dtype, model.mesh.device),
            )
            self._engine = InferenceEngine(
                decoder,
                weights,
                config=config,
                eos_token_ids=model.eos_token_ids,
                tokenizer=model.tokenizer,
                vocab_limit=model.vocab_limit,
                device=model.mesh.device,
                dtype=self.dtype,
            )
        else:
            self._engine.set_weights(weights)
        return self._engine

    def _leave(self) -> None:
        """What `on_leave` says becomes of the copy and the KV pool."""
        if self.config.on_leave == "keep":
            return
        assert self._engine is not None
        self._engine.release()
        self._engine = None
        if self._copy is None:
            return
        if self.config.on_leave == "offload":
            self._copy.offload()
        else:
            self._copy.free()

    def close(self) -> None:
        """Free the fused copy and the KV pool."""
        self._abandon()
        if self._copy is not None:
            self._copy.free()

    def _abandon(self) -> None:
        """After an exception requests may be half done: the next entry starts with a fresh engine."""
        if self._engine is not None:
            self._engine.release()
            self._engine = None

    def _choose(self) -> Gather:
        if self.config.gather != "auto":
            return self.config.gather
        mesh, spec = self.model.mesh, self.model.spec
        need = copy_bytes(self.model)
        if self.config.max_copy_bytes is not None:
            have, origin = self.config.max_copy_bytes, "rollout.max_copy_bytes"
        else:
            ranks = mesh.local_world_size if mesh.device.type == "cpu" else 1
            (free,) = mesh.min([free_bytes(mesh.device) / ranks / 2])
            have, origin = int(free), "half of the free memory per rank"
        gather: Gather = "full" if need <= have else "stream"
        log.info("rollout.gather=auto: %s, since a full copy of %s takes %d bytes and %s is %d",
                 gather, spec.model_type, need, origin, have)  # fmt: skip
        return gather

    def _verify_checksums(self, version: int) -> None:
        """debug_checksums: weights of one version must be the same weights. Raises RuntimeError on every rank."""
        if not self.model.config.debug_checksums:
            return
        now = {name: checksum(shard) for name, shard in self.model.local_shards().items()}
        before = now
        if self._checksums is not None and self._checksums[0] == version:
            before = self._checksums[1]
        self._checksums = (version, now)
        changed = [name for name in now if now[name] != before[name]]
        if any(self.model.mesh.max([len(changed)])):
            raise RuntimeError(
                f"weights changed though weight_version is still {version}: {', '.join(changed[:3]) or 'on another rank'}; "
                "do not assert unchanged=True after an edit"
            )

    def _record(self, version: int, source: ShardedSource, held: int, enter_ms: float, leave_ms: float) -> None:
        assert self.gather is not None
        swap = Swap(self.gather, version, source.bytes_gathered, held, enter_ms, leave_ms, peak_bytes(self.model.mesh.device))
        self.ledger.append(swap)
        log.debug("swap: %s", swap)


def copy_bytes(model: ShardedModel) -> int:
    """What the fused copy takes: weights in the compute dtype, and the head's counted rows in fp32."""
    size = getattr(torch, model.config.compute_dtype).itemsize
    names = set(model.source().names()) - {model.spec.names.head}
    weights = sum(p.numel() for name, p in model.parameters().items() if name in names)
    rows = min(model.vocab_limit or model.spec.vocab_size, model.spec.vocab_size)
    shared = model.spec.tie_word_embeddings and size == 4
    return weights * size + (0 if shared else rows * model.spec.hidden_size * 4)


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken on this device; on CPU also within the limit of the process's control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return free


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def checksum(tensor: torch.Tensor) -> int:
    """Of the bits: equal for equal tensors, almost surely different otherwise. Each element's bits are weighted by its place."""
    if tensor.numel() == 0:
        return 0
    bits = tensor.contiguous().flatten().view(torch.uint8).to(torch.int64)
    places = torch.arange(1, bits.numel() + 1, device=bits.device)
    return int((bits * (places * 2654435761 % 4294967291)).sum())
