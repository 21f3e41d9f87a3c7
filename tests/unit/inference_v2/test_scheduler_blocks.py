"""Host decisions alone: a model of the pools in which every slot knows the exact prefix it was computed from."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inference_v2.blocks import BlockPool, Blocks, PrefixTable
from inference_v2.scheduler import Scheduler
from inference_v2.sequence import Sequence
from inference_v2.types import Request, SamplingParams


class Host:
    """The engine without tensors. Slots hold (weight version, tokens up to and including theirs)."""

    def __init__(self, num_blocks, windows, block_size, *, max_running=8, max_step_tokens=16, prefix_caching=True):
        self.blocks = Blocks(num_blocks, windows, block_size, prefix_caching=prefix_caching)
        self.scheduler = Scheduler(self.blocks, max_running, max_step_tokens)
        self.slots = [[[None] * block_size for _ in range(n)] for n in num_blocks]
        self.arrivals = 0
        self.finished = 0

    def sequence(self, tokens, max_new=4, request_id=None) -> Sequence:
        self.arrivals += 1
        request_id = self.arrivals if request_id is None else request_id
        request = Request(tuple(tokens), SamplingParams(max_new_tokens=max_new))
        return Sequence(request, request_id, 0, order=self.arrivals, tokens=list(tokens))

    def add(self, tokens, max_new=4, num_samples=1) -> Sequence | None:
        leader = self.sequence(tokens, max_new)
        leader.forks = [self.sequence(tokens, max_new, leader.request_id) for _ in range(num_samples - 1)]
        if self.scheduler.refusal(leader) is not None:
            return None
        self.scheduler.add(leader)
        return leader

    def step(self, sample=lambda seq: len(seq.tokens) % 3):
        plan = self.scheduler.schedule()
        used = sum(chunk.length for chunk in plan.chunks)
        assert used <= self.scheduler.max_step_tokens
        for slots, pairs in zip(self.slots, plan.copies):
            read = [list(slots[source]) for source, _ in pairs]
            for (_, target), content in zip(pairs, read):
                slots[target] = content
        for chunk in plan.chunks:
            self._write(chunk)
        for chunk in plan.chunks:
            self._read(chunk)
        self.scheduler.commit(plan)
        for chunk in plan.chunks:
            if chunk.is_last:
                self._take(chunk.seq, sample)
        return plan

    def _write(self, chunk):
        size = self.blocks.block_size
        for group, table in enumerate(chunk.seq.tables):
            for p in range(chunk.start, chunk.end):
                block = table.ids[p // size]
                assert self.blocks.pools[group].refs[block] == 1, "a shared block is written"
                self.slots[group][block][p % size] = (self.blocks.version, tuple(chunk.seq.tokens[: p + 1]))

    def _read(self, chunk):
        size = self.blocks.block_size
        for group, (table, window) in enumerate(zip(chunk.seq.tables, self.blocks.windows)):
            first = 0 if window is None else max(0, chunk.start - window + 1)
            for p in range(first, chunk.end):
                assert p // size >= table.num_dropped, "a block in the window was given back"
                expected = (self.blocks.version, tuple(chunk.seq.tokens[: p + 1]))
                assert self.slots[group][table.ids[p // size]][p % size] == expected, "a wrong or stale key is read"

    def _take(self, leader, sample):
        forks, leader.forks = leader.forks, []
        for seq in (*forks, leader):
            seq.tokens.append(sample(seq))
            over = seq.num_output >= seq.request.sampling.max_new_tokens
            self.finished += over
            if seq is not leader and not over:
                self.scheduler.fork(leader, seq)
            elif seq is leader and over:
                self.scheduler.finish(seq)

    def check(self):
        """Reference counts equal what the running sequences hold; free blocks are those without a reference."""
        for group, pool in enumerate(self.blocks.pools):
            held = Counter()
            for seq in self.scheduler.running:
                table = seq.tables[group]
                held.update(table.ids[table.num_dropped :])
            assert pool.refs == [held[block] for block in range(len(pool.refs))]
            assert pool.num_free == sum(refs == 0 for refs in pool.refs)
        assert len(self.scheduler.running) <= self.scheduler.max_running
        assert not any(seq.tables or seq.computed for seq in self.scheduler.waiting)
        for queue in (self.scheduler.running, self.scheduler.waiting):
            assert [seq.order for seq in queue] == sorted(seq.order for seq in queue)

    def drain(self, limit=5000):
        steps = 0
        while self.scheduler.running or self.scheduler.waiting:
            self.step()
            self.check()
            steps += 1
            assert steps < limit, "no end"
        assert self.blocks.num_free == self.blocks.num_total


POOLS = [((9,), (None,)), ((40,), (None,)), ((12, 8), (None, 6)), ((7,), (5,)), ((14, 6, 9), (None, 4, 9))]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        pool=st.sampled_from(POOLS),
        max_running=st.integers(1, 6),
        max_step_tokens=st.integers(1, 20),
        prefix_caching=st.booleans(),
    )
    def start(self, pool, max_running, max_step_tokens, prefix_caching):
        self.host = Host(
            *pool, 4, max_running=max_running, max_step_tokens=max_step_tokens, prefix_caching=prefix_caching
        )  # fmt: skip

    @rule(
        head=st.sampled_from([(), (1, 1, 1, 1), (2, 2, 2, 2, 1, 1, 1, 1)]),
        tail=st.lists(st.integers(1, 2), min_size=1, max_size=9),
        max_new=st.integers(1, 9),
        num_samples=st.integers(1, 4),
    )
    def add(self, head, tail, max_new, num_samples):
        self.host.add([*head, *tail], max_new, num_samples)

    @rule(pick=st.integers(0, 30))
    def abort(self, pick):
        alive = [*self.host.scheduler.running, *self.host.scheduler.waiting]
        if alive:
            self.host.scheduler.abort(alive[pick % len(alive)].request_id)

    @precondition(lambda self: self.host.scheduler.running)
    @rule()
    def preempt_newest(self):
        self.host.scheduler._preempt(self.host.scheduler.running[-1])

    @rule()
    def change_weights(self):
        self.host.scheduler.restart(self.host.blocks.version + 1)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.host.step()

    @invariant()
    def consistent(self):
        if hasattr(self, "host"):
            self.host.check()

    def teardown(self):
        if hasattr(self, "host"):
            self.host.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("pool", POOLS)
def test_every_block_is_free_after_a_thousand_random_operations(pool):
    rng = random.Random(7)
    host = Host(*pool, 4, max_running=5, max_step_tokens=11)
    for _ in range(1000):
        kind = rng.choice(("add", "add", "abort", "preempt", "step", "step", "step"))
        alive = [*host.scheduler.running, *host.scheduler.waiting]
        if kind == "add" and len(alive) < 20:
            shared = [1] * rng.choice((0, 4, 8))
            host.add(shared + [rng.randint(0, 2) for _ in range(rng.randint(1, 9))], rng.randint(1, 8), rng.randint(1, 4))
        elif kind == "abort" and alive:
            host.scheduler.abort(rng.choice(alive).request_id)
        elif kind == "preempt" and host.scheduler.running:
            host.scheduler._preempt(host.scheduler.running[-1])
        else:
            host.step()
        host.check()
    host.drain()
    assert host.finished > 50
    assert host.scheduler.counters.tokens_hit > 0
    assert host.scheduler.counters.blocks_copied > 0


def test_two_half_prefilled_prompts_that_do_not_fit_together_both_finish():
    host = Host((4,), (None,), 4, max_step_tokens=3)
    for start in (0, 5):
        assert host.add([start + i for i in range(10)], max_new=2) is not None  # 3 blocks each
    host.drain(limit=40)
    assert host.finished == 2


def test_a_sequence_that_can_never_fit_is_refused_with_the_numbers():
    host = Host((4,), (None,), 4)
    error = host.scheduler.refusal(host.sequence(range(17)))
    assert error is not None
    assert "5 KV blocks of 4" in error
    assert "the pool has 4" in error
    assert host.scheduler.refusal(host.sequence(range(13), max_new=4)) is None  # the last token is never cached
    assert host.scheduler.refusal(host.sequence(range(13), max_new=5)) is not None


def test_a_windowed_group_serves_what_is_longer_than_its_pool():
    host = Host((3,), (6,), 4, max_step_tokens=64)
    assert host.add([i % 5 for i in range(50)], max_new=30) is not None
    host.drain(limit=200)
    assert host.finished == 1


def test_the_newest_is_preempted_and_the_oldest_runs_on():
    host = Host((5,), (None,), 4, max_step_tokens=32, prefix_caching=False)
    first = host.add([1] * 7, max_new=9)
    second = host.add([2] * 7, max_new=9)
    while not host.scheduler.counters.preemptions:
        host.step()
    assert host.scheduler.running == [first]
    assert host.scheduler.waiting == [second]
    assert second.num_output > 0
    host.drain()
    assert host.finished == 2


def test_samples_share_the_prompt_and_copy_only_the_tail():
    host = Host((40,), (None,), 16, max_step_tokens=64)
    host.add(list(range(100)), max_new=8, num_samples=4)
    host.step()
    host.step()
    assert len(host.scheduler.running) == 4
    assert host.blocks.num_total - host.blocks.num_free == 7
    host.drain()
    counters = host.scheduler.counters
    assert counters.prompt_tokens_prefilled == 100
    assert counters.blocks_copied == 3
    assert counters.output_tokens_computed == 4 * 7
    assert counters.max_step_tokens == 64


def test_a_prompt_that_fills_its_blocks_is_forked_without_a_copy():
    host = Host((40,), (None,), 16, max_step_tokens=128)
    host.add(list(range(96)), max_new=8, num_samples=4)
    host.drain()
    assert host.scheduler.counters.blocks_copied == 0


def test_a_hit_leaves_one_token_to_compute():
    host = Host((40,), (None,), 4, max_step_tokens=64)
    for _ in range(2):
        host.add(list(range(16)), max_new=2)
        host.drain()
    assert host.scheduler.counters.tokens_hit == 12
    assert host.scheduler.counters.prompt_tokens_prefilled == 16 + 4


def test_no_block_of_other_weights_is_found():
    host = Host((40,), (None,), 4, max_step_tokens=64)
    host.add(list(range(16)), max_new=4)
    host.step()
    host.step()
    host.scheduler.restart(1)
    host.drain()
    host.add(list(range(16)), max_new=4)
    host.drain()
    assert host.scheduler.counters.tokens_hit == 12  # of the second request, in blocks of version 1


def test_a_waiting_sequence_that_was_looked_up_forgets_the_old_weights_too():
    host = Host((40,), (None,), 4, max_step_tokens=64)
    host.add(list(range(16)), max_new=4)
    host.drain()
    waiting = host.add(list(range(16)), max_new=4)
    assert host.blocks.find(waiting).num_tokens == 12
    host.scheduler.restart(1)
    host.drain()
    assert host.scheduler.counters.tokens_hit == 0


def test_a_windowed_hit_needs_the_whole_window():
    host = Host((20, 20), (None, 6), 4, max_step_tokens=64)
    prompt = list(range(20))
    host.add(prompt, max_new=1)
    host.drain()
    again = host.sequence([*prompt[:16], 99, 98])
    hit = host.blocks.find(again)
    assert hit.num_tokens == 16
    assert hit.tables[0].num_dropped == 0
    assert hit.tables[1].num_dropped == 2  # position 16 sees 11 to 16: blocks 2 and 3
    windowed = host.blocks.pools[1]
    windowed._holds[windowed._block_of.pop(again.chain[2])] = None  # lose a block inside the window
    assert host.blocks.find(again).num_tokens == 8
    windowed._holds[windowed._block_of.pop(again.chain[0])] = None
    assert host.blocks.find(again).num_tokens == 0  # a hit of 8 would need block 0: position 8 sees 3 to 8


def test_every_token_of_a_prefix_is_compared():
    prefixes = PrefixTable()
    one = prefixes.extend(prefixes.extend(0, (1, 2)), (3, 4))
    assert prefixes.extend(prefixes.extend(0, (1, 2)), (3, 4)) is one
    assert prefixes.extend(prefixes.extend(0, (9, 2)), (3, 4)) is not one
    assert prefixes.extend(prefixes.extend(1, (1, 2)), (3, 4)) is not one  # other weights


def test_blocks_are_reused_least_recently_used_first():
    pool, prefixes = BlockPool(3), PrefixTable()
    names = [prefixes.extend(0, (i,)) for i in range(3)]
    for name in names:
        pool.remember(name, pool.take())
    for block in (1, 0, 2):
        pool.drop(block)
    pool.share(1)
    pool.drop(1)  # used again: now the latest
    assert [pool.take() for _ in range(2)] == [0, 2]
    assert pool.find(names[1]) == 1
    assert pool.find(names[0]) is None


def test_late_requests_join_and_every_step_keeps_the_budget():
    host = Host((60,), (None,), 4, max_running=8, max_step_tokens=6)
    host.add([1] * 20, max_new=12)
    for _ in range(5):
        host.step()
    host.add([2] * 3, max_new=6)
    plan = host.step()
    assert [chunk.length for chunk in plan.chunks] == [1, 3]
    host.drain()


def test_work_that_cannot_advance_raises_instead_of_spinning():
    host = Host((2,), (None,), 4)
    host.scheduler.add(host.sequence(range(12)))  # past the door
    with pytest.raises(RuntimeError, match="no progress"):
        host.step()
