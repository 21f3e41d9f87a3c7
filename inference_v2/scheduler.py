"""Which sequences compute how many tokens in the next step. Plain Python, no torch; deterministic given the order of calls.

One rule, no phases: a sequence has `computed` of its `total` tokens, and a step gives a share of its token budget to those whose
computed trails total. Prefill, chunked prefill, decode and recompute after preemption are all this rule.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from inference_v2.blocks import Blocks, Hit
from inference_v2.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start : start + length of one sequence."""

    seq: Sequence
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def is_last(self) -> bool:
        """The sequence has caught up: its next token can be drawn."""
        return self.end == self.seq.total

    @property
    def wanted(self) -> range:
        """Positions whose hidden states are needed."""
        if self.seq.score_start is not None:
            return range(max(self.start, self.seq.score_start - 1), self.end)
        return range(self.end - 1, self.end) if self.is_last else range(0)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: the work, and per cache group the (from, to) blocks to copy first."""

    chunks: tuple[Chunk, ...] = ()
    copies: tuple[tuple[tuple[int, int], ...], ...] = ()


@dataclass(slots=True)
class Counters:
    """What has happened since the engine was made."""

    prompt_tokens_prefilled: int = 0
    output_tokens_computed: int = 0
    tokens_hit: int = 0
    blocks_copied: int = 0
    preemptions: int = 0
    max_step_tokens: int = 0


@dataclass(slots=True)
class Scheduler:
    """Running and waiting sequences, both ordered by age. Older ones go first; the newest is preempted first."""

    blocks: Blocks
    max_running: int
    max_step_tokens: int
    running: list[Sequence] = field(default_factory=list)
    waiting: list[Sequence] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)

    def refusal(self, seq: Sequence) -> str | None:
        """Why this sequence can never run, with the numbers, or None."""
        for g, pool in enumerate(self.blocks.pools):
            need, have = self.blocks.footprint(g, seq.max_cached), len(pool.refs)
            if need > have:
                return (
                    f"{seq.max_cached} cached tokens need {need} KV blocks of {self.blocks.block_size} in cache group {g}; "
                    f"the pool has {have}; shorten the request or raise cache_bytes"
                )
        return None

    def add(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=_age)

    def schedule(self) -> Plan:
        """Plan the next step, at most `max_step_tokens` tokens. Raises RuntimeError when work is left but none can advance."""
        chunks: list[Chunk] = []
        copies: list[list[tuple[int, int]]] = [[] for _ in self.blocks.pools]
        budget = self.max_step_tokens
        preempted = self.counters.preemptions

        index = 0
        while index < len(self.running) and budget > 0:
            seq = self.running[index]
            while self.blocks.room(seq) == 0:
                victim = self.running[-1]
                self._preempt(victim)
                if victim is seq:
                    break
            else:
                budget -= self._give(seq, budget, chunks, copies)
                index += 1

        if preempted == self.counters.preemptions:
            while budget > 0 and (admitted := self._admit_next()) is not None:
                budget -= self._give(admitted, budget, chunks, copies)

        if not chunks and (self.running or self.waiting):
            raise RuntimeError(
                f"scheduler: no progress with {len(self.running)} running and {len(self.waiting)} waiting sequences"
            )
        self.counters.max_step_tokens = max(self.counters.max_step_tokens, self.max_step_tokens - budget)
        return Plan(tuple(chunks), tuple(tuple(pairs) for pairs in copies))

    def commit(self, plan: Plan) -> None:
        """The step has been computed: move `computed` forward."""
        for chunk in plan.chunks:
            self.blocks.commit(chunk.seq, chunk.length)
            num_prompt = max(0, min(chunk.end, chunk.seq.num_prompt) - chunk.start)
            self.counters.prompt_tokens_prefilled += num_prompt
            self.counters.output_tokens_computed += chunk.length - num_prompt

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Start a further sample from what its running parent has computed; it waits where `max_running` is reached."""
        if len(self.running) < self.max_running:
            self.blocks.fork(parent, child)
            insort(self.running, child, key=_age)
        else:
            insort(self.waiting, child, key=_age)

    def finish(self, seq: Sequence) -> None:
        self.blocks.release(seq)
        self.running.remove(seq)

    def abort(self, request_id: int) -> list[Sequence]:
        """Take every sample of a request out; returns them, those that never started included."""
        removed: list[Sequence] = []
        for queue in (self.running, self.waiting):
            removed += [seq for seq in queue if seq.request_id == request_id]
            queue[:] = [seq for seq in queue if seq.request_id != request_id]
        for seq in removed:
            self.blocks.release(seq)
        return sorted([*removed, *(fork for seq in removed for fork in seq.forks)], key=_age)

    def restart(self, version: int) -> None:
        """Start over with an empty cache under these weights: all running sequences are recomputed, and no older block is found
        again, not even under a version that comes back."""
        self.blocks.version = version
        while self.running:
            self._preempt(self.running[-1])
        self.blocks.forget_all()
        for seq in self.waiting:
            seq.chain = []

    def _preempt(self, seq: Sequence) -> None:
        self.finish(seq)
        insort(self.waiting, seq, key=_age)
        self.counters.preemptions += 1

    def _give(self, seq: Sequence, budget: int, chunks: list[Chunk], copies: list[list[tuple[int, int]]]) -> int:
        length = min(seq.total - seq.computed, budget, self.blocks.room(seq))
        assert length > 0, f"sequence {seq.order} cannot advance: {seq.computed} of {seq.total} tokens computed, budget {budget}"
        new = self.blocks.grow(seq, length)
        for pairs, copy in zip(copies, new):
            if copy is not None:
                pairs.append(copy)
        self.counters.blocks_copied += any(copy is not None for copy in new)
        chunks.append(Chunk(seq, seq.computed, length))
        return length

    def _admit_next(self) -> Sequence | None:
        """The oldest waiting sequence, if all its tokens fit beside what the running ones still need: no half-filled prompts."""
        if not self.waiting or len(self.running) >= self.max_running:
            return None
        seq = self.waiting[0]
        hit = self.blocks.find(seq)
        if not all(self._fits(g, seq, hit) for g in range(len(self.blocks.pools))):
            return None
        self.waiting.pop(0)
        self.blocks.admit(seq, hit)
        insort(self.running, seq, key=_age)
        self.counters.tokens_hit += hit.num_tokens
        return seq

    def _fits(self, group: int, seq: Sequence, hit: Hit) -> bool:
        pool, table = self.blocks.pools[group], hit.tables[group]
        found = table.ids[table.num_dropped :]
        need = max(self.blocks.footprint(group, seq.total), len(found)) - sum(pool.refs[block] > 0 for block in found)
        return need <= pool.num_free - sum(self.blocks.missing(group, other) for other in self.running)


def _age(seq: Sequence) -> int:
    return seq.order
