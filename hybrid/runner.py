"""How ranks generate side by side: the runner that `engine.generating()` yields, and the lock step of streamed weights."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid.mesh import Mesh
from hybrid.sharding import ShardedSource
from inference_v2.engine import InferenceEngine
from inference_v2.types import Completion, EngineStats, Request, SamplingParams


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

    def fail(self) -> None:
        """This rank has failed: the others hear of it, unless all is over already."""
        if not self.over:
            self.agree(pending=False, inside=False, failed=True)


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

    def leave(self) -> None:
        """Stay in step with the ranks that still generate. Raises RuntimeError if another rank failed."""
        while not self._lock_step.over:
            if self._lock_step.agree(pending=False, inside=False) and self._source is not None:
                self._pass()
