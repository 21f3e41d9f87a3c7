"""The swap between training and generation, with its ledger.

`full`: every layer is gathered once into the fused copy; ranks then decode without collectives. `stream`: each layer is gathered
for each step, in lock step; ranks agree before every step whether any of them has work, and one that has none takes part.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from hybrid import rng
from hybrid.memory import checksum, free_bytes, peak_bytes
from hybrid.models import ShardedModel
from hybrid.module_copy import ModuleCopy, open_module_copy
from hybrid.runner import LockStep, Runner
from hybrid.sharding import ShardedSource, gathered, outside_inference_mode, reshard
from inference_v2.engine import InferenceEngine
from inference_v2.head import Head
from inference_v2.models.decoder import Decoder
from inference_v2.models.fallback import ModuleDecoder
from inference_v2.models.spec import DecoderSpec
from inference_v2.rope import RopeTable
from inference_v2.scoring import Scored
from inference_v2.weights import FusedWeights, ModelWeights, StreamedWeights, WeightSource

log = logging.getLogger(__name__)
Gather = Literal["full", "stream"]
OnLeave = Literal["keep", "offload", "free"]


@dataclass(frozen=True)
class Swap:
    """One stay in generation, as the ledger records it."""

    gather: Gather
    weight_version: int
    gathered_bytes: int  # received or copied out of shards, in the compute dtype; 0: the copy was still good
    copy_bytes: int  # the fused copy on the device
    enter_ms: float  # until the first prompt could be taken
    leave_ms: float
    idle_s: float  # this rank waited for others with nothing left to compute
    peak_bytes: int  # of this process: device memory on CUDA, resident memory elsewhere


class Generation:
    """The generating side of one sharded model: its decoder, its copy of the weights, its engine, and when to gather.

    on_leave: None: as rollout.on_leave says. keep_pool: whether "keep" is also for the KV pool. from_files: the copy is read from
    the model's folder, so that the model needs no shards, unless `choose` says stream. adapter: False for the base model below
    an adapter, whose one version is 0, for ever.
    """

    def __init__(
        self,
        model: ShardedModel,
        *,
        on_leave: OnLeave | None = None,
        keep_pool: bool = True,
        from_files: bool = False,
        adapter: bool = True,
    ) -> None:
        self.model = model
        self._adapter = adapter
        if not adapter:
            model.require_adapter()
        self.config = model.config.rollout
        self._on_leave = on_leave or self.config.on_leave
        self._keep_pool = keep_pool
        self._from_files = from_files
        self.dtype = getattr(torch, model.config.compute_dtype)
        self._kernels = model.kernels
        self.gather: Gather | None = None  # decided at the first swap
        self.is_open = False
        self.ledger: Swap | None = None  # the last stay
        self._decoder: Decoder | ModuleDecoder | None = None
        self._copy: FusedWeights | ModuleCopy | None = None  # None until the first swap, and where layers are streamed
        self._engine: InferenceEngine | None = None
        self._checksums: tuple[int, dict[str, int]] | None = None
        self._held_since: int | None = None  # the number of stays before `held` began
        self._number = 0  # of this object in the process group's store, agreed on at the first swap
        self._num_stays = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Copy and KV pool stay until the end, so that several stays with one version gather once."""
        self._held_since = self._num_stays
        try:
            yield
        finally:
            self._held_since = None
            if not self.is_open:
                self._leave()

    @property
    def holds_stay(self) -> bool:
        """Whether what an earlier stay gathered is still here, inside `held`."""
        return self._held_since is not None and self._num_stays > self._held_since

    def score(self, version: int, sequences: Sequence[Sequence[int]], **what: Any) -> list[Scored]:
        """`InferenceEngine.score` of this rank's sequences under the weights of `version`, in a stay of its own. Collective."""
        with self.open(version) as runner:
            return runner.score(sequences, **what)

    @property
    def keeps_copy(self) -> bool:
        """Whether the full copy outlives a stay."""
        return self.gather == "full" and self._on_leave != "free"

    def head(self, version: int) -> Head:
        """The head of the full copy, on the device. Collective where the copy is not that of `version`."""
        assert self.gather != "stream", "no copy is kept where layers are streamed"
        if self._copy is None or self._copy.version != version:
            with self.open(version):
                pass
        assert isinstance(self._copy, FusedWeights), "a registered type"
        device = self.model.mesh.device
        with self._copy.final() as final:
            head = final.head
        if head.weight.is_meta or head.weight.device == device:
            return head
        return replace(head, weight=head.weight.to(device), bias=None if head.bias is None else head.bias.to(device))

    @contextmanager
    def open(self, version: int) -> Iterator[Runner]:
        """Generate with the weights of `version`; a copy of that version that is still held is used as it is. Collective.
        Raises RuntimeError if it is open already."""
        if self.is_open:
            raise RuntimeError("already generating: use the runner of the open `generating()`, or leave it first")
        with outside_inference_mode():
            self.is_open = True
            try:
                with self._opened(version) as runner:
                    yield runner
            finally:
                self.is_open = False

    @contextmanager
    def _opened(self, version: int) -> Iterator[Runner]:
        started = time.perf_counter()
        generators = rng.capture()
        self._verify_checksums(version)
        reshard(self.model.module)
        source = self.model.source(adapter=self._adapter)
        self._num_stays += 1
        lock_step = None
        try:
            weights = self._current_weights(source, version)  # one rank's error in here leaves the others in a gather
            lock_step = LockStep(self.model.mesh)
            name = f"hybrid/{self._number}/{self._num_stays}" if self._steals() else None
            runner = Runner(self._engine_with(weights), lock_step, source if self.gather == "stream" else None, name)
            entered = time.perf_counter()
            yield runner
            runner.leave()
            leaving = time.perf_counter()
            held = 0 if self._copy is None else self._copy.nbytes
            if self._held_since is None:
                self._leave()
            times = (entered - started) * 1e3, (time.perf_counter() - leaving) * 1e3, runner.idle_s
            self._record(version, source, held, *times)
        except BaseException:
            self._drop_engine()  # its requests may be half done
            self._leave()
            if lock_step is not None:
                lock_step.fail()
            raise
        finally:
            rng.restore(generators)
            assert not gathered(self.model.module), "a group is still gathered after generation"

    def close(self) -> None:
        """Free the copy and the KV pool."""
        self._drop_engine()
        if self._copy is not None:
            self._copy.free()

    def _current_weights(self, source: ShardedSource, version: int) -> ModelWeights:
        model, config = self.model, self.config.engine
        if self._decoder is None:
            self.choose()
            self._decoder, self._copy = self._build()
        if isinstance(self._copy, FusedWeights):
            self._copy.refresh(self._files() or source, version)
            return self._copy
        if self._copy is not None:
            self._copy.refresh(source, version)
            return self._copy
        assert model.spec is not None, "only registered types are streamed"
        return StreamedWeights(
            model.spec, source, version, self.dtype, model.mesh.device, model.vocab_limit, config.batch_invariant, self._kernels
        )

    def _engine_with(self, weights: ModelWeights) -> InferenceEngine:
        model = self.model
        if self._engine is not None:
            self._engine.set_weights(weights)
            return self._engine
        assert self._decoder is not None, "built with the first weights"
        self._engine = InferenceEngine(
            self._decoder,
            weights,
            config=self.config.engine,
            eos_token_ids=model.eos_token_ids,
            tokenizer=model.tokenizer,
            vocab_limit=model.vocab_limit,
            device=model.mesh.device,
            dtype=self.dtype,
        )
        return self._engine

    def _build(self) -> tuple[Decoder | ModuleDecoder, FusedWeights | ModuleCopy | None]:
        """Made once: the decoder (its rotary table is no weight), and an empty copy unless layers are streamed."""
        model, config, device = self.model, self.config.engine, self.model.mesh.device
        if model.spec is None:
            return open_module_copy(model)
        table = RopeTable.build(model.spec.rope, model.max_positions, self.dtype, device)
        decoder = Decoder(model.spec, self._kernels, table)
        if self.gather == "stream":
            return decoder, None
        return decoder, FusedWeights(
            model.spec, self.dtype, device, None, model.vocab_limit, config.batch_invariant, self._kernels
        )

    def _leave(self) -> None:
        """What `on_leave` says becomes of the copy and the KV pool."""
        if self._on_leave != "keep" or not self._keep_pool:
            self._drop_engine()
        if self._copy is not None and self._on_leave == "offload":
            self._copy.offload()
        elif self._copy is not None and self._on_leave == "free":
            self._copy.free()

    def _drop_engine(self) -> None:
        if self._engine is not None:
            self._engine.release()
            self._engine = None

    def choose(self) -> Gather:
        """full or stream: decided once. Collective."""
        if self.gather is None:
            self.gather = self._choose()
            first = self.model.mesh.rank == 0
            store = dist.distributed_c10d._get_default_store()
            self._number = int(self.model.mesh.sum([store.add("hybrid/generations", 1) if first else 0])[0])
        return self.gather

    def _files(self) -> WeightSource | None:
        return self.model.files if self._from_files else None

    def _steals(self) -> bool:
        """Whether ranks take over requests. `auto`: where a token's bits depend on nothing that runs beside it, so that nothing
        depends on when a request was taken over."""
        if self.gather != "full" or self.model.mesh.world_size == 1 or self.config.steal == "off":
            return False
        return self.config.steal == "on" or self.config.engine.batch_invariant

    def _choose(self) -> Gather:
        model, mesh = self.model, self.model.mesh
        if model.spec is None and self.config.gather == "stream":
            raise ValueError(f"rollout.gather=stream with model_type={model.hf_config.model_type!r}, which is not registered; "
                             "allowed: full, auto")  # fmt: skip
        if self.config.gather != "auto":
            return self.config.gather
        if model.spec is None:
            return "full"
        need = copy_bytes(model, model.spec)
        if self.config.max_copy_bytes is not None:
            have, origin = self.config.max_copy_bytes, "rollout.max_copy_bytes"
        else:
            ranks = mesh.local_world_size if mesh.device.type == "cpu" else 1
            (free,) = mesh.min([free_bytes(mesh.device) / ranks / 2])
            have, origin = int(free), "half of the free memory per rank"
        gather: Gather = "full" if need <= have else "stream"
        log.info("rollout.gather=auto: %s, since a full copy of %s takes %.2f MB and %s is %.2f MB",
                 gather, model.spec.model_type, need / 1e6, origin, have / 1e6)  # fmt: skip
        return gather

    def _verify_checksums(self, version: int) -> None:
        """debug_checksums: weights of one version must be the same weights. Raises RuntimeError on every rank."""
        if not self.model.config.debug_checksums or self._from_files:
            return
        skipped = frozenset() if self._adapter else self.model.require_adapter().tensors
        now = {name: checksum(shard) for name, shard in self.model.local_shards().items() if name not in skipped}
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

    def _record(self, version: int, source: ShardedSource, held: int, enter_ms: float, leave_ms: float, idle_s: float) -> None:
        assert self.gather is not None
        peak = peak_bytes(self.model.mesh.device)
        self.ledger = Swap(self.gather, version, source.bytes_gathered, held, enter_ms, leave_ms, idle_s, peak)
        log.debug("swap: %s", self.ledger)


def copy_bytes(model: ShardedModel, spec: DecoderSpec) -> int:
    """What the fused copy takes: weights in the compute dtype, and the head's counted rows, packed or in fp32."""
    size = getattr(torch, model.config.compute_dtype).itemsize
    names = set(model.source().names()) - {spec.names.head}
    weights = sum(p.numel() for name, p in model.parameters().items() if name in names)
    rows = min(model.vocab_limit or spec.vocab_size, spec.vocab_size)
    shared = spec.tie_word_embeddings and size == 4
    per_weight = 2 if size == 2 and model.kernels.pack_linear is not None else 4
    return weights * size + (0 if shared else rows * spec.hidden_size * per_weight)
