"""Who owns which KV block: reference counts, the prefix cache, copy-on-write and sliding windows. Plain Python, no torch.

Layers that share an attention window form a cache group. Each group has its own pool of blocks, and a sequence has a block
table in each; block i of every table holds the same tokens, so the groups grow together and agree on the length of a hit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from weakref import WeakValueDictionary

from inference_v2.sequence import BlockTable, Prefix, Sequence


class PrefixTable:
    """Interns prefixes, so that looking one up compares weight version, parent and tokens themselves: no hash, however weak, can
    serve another prompt's cache. A prefix lives as long as a block, a sequence or a longer prefix refers to it."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[tuple[Prefix | int, tuple[int, ...]], Prefix] = WeakValueDictionary()

    def extend(self, parent: Prefix | int, tokens: tuple[int, ...]) -> Prefix:
        prefix = self._known.get((parent, tokens))
        if prefix is None:
            prefix = self._known[parent, tokens] = Prefix(parent, tokens)
        return prefix


class BlockPool:
    """The blocks of one cache group. A free block may still hold a known prefix; it is found again until it is reused."""

    def __init__(self, num_blocks: int) -> None:
        self.refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # least recently used first
        self._holds: list[Prefix | None] = [None] * num_blocks
        self._block_of: dict[Prefix, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free block to write to; whatever it held is forgotten."""
        block, _ = self._free.popitem(last=False)
        held = self._holds[block]
        if held is not None:
            del self._block_of[held]
            self._holds[block] = None
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        if self.refs[block] == 0:
            del self._free[block]
        self.refs[block] += 1

    def drop(self, block: int) -> None:
        self.refs[block] -= 1
        assert self.refs[block] >= 0, f"block {block} dropped more often than shared"
        if self.refs[block] == 0:
            self._free[block] = None
            if self._holds[block] is None:  # nothing to find again: reuse it first
                self._free.move_to_end(block, last=False)

    def find(self, prefix: Prefix) -> int | None:
        return self._block_of.get(prefix)

    def remember(self, prefix: Prefix, block: int) -> None:
        """From now on `prefix` is found in this full block. Does nothing where the block or the prefix is already known."""
        if prefix not in self._block_of and self._holds[block] is None:
            self._block_of[prefix] = block
            self._holds[block] = prefix

    def forget_all(self) -> None:
        self._block_of.clear()
        self._holds = [None] * len(self._holds)


@dataclass(frozen=True, slots=True)
class Hit:
    """A cached prefix of `num_tokens` tokens: per group, the block table to start from."""

    num_tokens: int
    tables: tuple[BlockTable, ...]


class Blocks:
    """The pools of all cache groups, `num_blocks[g]` and `windows[g]` each (None: full attention)."""

    def __init__(
        self, num_blocks: Seq[int], windows: Seq[int | None], block_size: int, *, prefix_caching: bool = True, version: int = 0
    ) -> None:
        self.block_size = block_size
        self.windows = tuple(windows)
        self.pools = tuple(BlockPool(n) for n in num_blocks)
        self.version = version  # root of every prefix: KV of other weights is never found
        self._prefix_caching = prefix_caching
        self._prefixes = PrefixTable()

    @property
    def num_free(self) -> int:
        return sum(pool.num_free for pool in self.pools)

    @property
    def num_total(self) -> int:
        return sum(len(pool.refs) for pool in self.pools)

    def footprint(self, group: int, num_tokens: int) -> int:
        """Blocks without which a sequence of so many tokens cannot be computed, one token at a time."""
        window = self.windows[group]
        whole = -(-num_tokens // self.block_size)
        return whole if window is None else min(whole, -(-(window - 1) // self.block_size) + 1)

    def missing(self, group: int, seq: Sequence) -> int:
        """Blocks a running sequence still needs to have all its present tokens computed."""
        table = seq.tables[group]
        return max(0, self.footprint(group, seq.total) - (len(table.ids) - table.num_dropped)) + self._tail_is_shared(group, seq)

    def room(self, seq: Sequence) -> int:
        """Tokens that a running sequence can have computed now, as far as blocks go."""
        return max(0, min(self._room(g, seq) for g in range(len(self.pools))))

    def _room(self, group: int, seq: Sequence) -> int:
        blocks = len(seq.tables[group].ids) + self.pools[group].num_free - self._tail_is_shared(group, seq)
        return blocks * self.block_size - seq.computed

    def _tail_is_shared(self, group: int, seq: Sequence) -> bool:
        """The next token goes to a partly filled block that another sequence holds too."""
        if seq.computed % self.block_size == 0:
            return False
        return self.pools[group].refs[seq.tables[group].ids[seq.computed // self.block_size]] > 1

    # -- a sequence's life -------------------------------------------------------------------------------------------------

    def find(self, seq: Sequence) -> Hit:
        """The longest cached prefix that every group holds: all of its blocks, or those in the window of the next token."""
        n = max(0, seq.hit_limit) // self.block_size if self._prefix_caching else 0
        self._extend_chain(seq, n)
        while n:
            reach = min(self._reach(g, seq, n) for g in range(len(self.pools)))
            if reach == n:
                break
            n = reach
        tables = []
        for g, pool in enumerate(self.pools):
            dropped = self._first_needed(g, n * self.block_size)
            found = [pool.find(prefix) for prefix in seq.chain[dropped:n]]
            tables.append(BlockTable([0] * dropped + [block for block in found if block is not None], dropped))
        return Hit(n * self.block_size, tuple(tables))

    def admit(self, seq: Sequence, hit: Hit) -> None:
        """Give a waiting sequence its block tables, which start with the hit."""
        for pool, table in zip(self.pools, hit.tables):
            for block in table.ids[table.num_dropped :]:
                pool.share(block)
        seq.tables = list(hit.tables)
        seq.computed = hit.num_tokens

    def grow(self, seq: Sequence, num_tokens: int) -> list[tuple[int, int] | None]:
        """Make place for the next tokens. Returns per group the (from, to) blocks to copy before writing, or None."""
        copies: list[tuple[int, int] | None] = []
        for g, (pool, table) in enumerate(zip(self.pools, seq.tables)):
            copy = None
            if self._tail_is_shared(g, seq):
                tail = seq.computed // self.block_size
                copy = (table.ids[tail], pool.take())
                pool.drop(copy[0])
                table.ids[tail] = copy[1]
            while len(table.ids) * self.block_size < seq.computed + num_tokens:
                table.ids.append(pool.take())
            copies.append(copy)
        return copies

    def commit(self, seq: Sequence, num_tokens: int) -> None:
        """The next tokens are computed now: full blocks can be found by others, blocks behind the window go back."""
        before = seq.computed // self.block_size
        seq.computed += num_tokens
        after = seq.computed // self.block_size
        if self._prefix_caching:
            self._extend_chain(seq, after)
        for g, (pool, table) in enumerate(zip(self.pools, seq.tables)):
            if self._prefix_caching:
                for i in range(max(before, table.num_dropped), after):
                    pool.remember(seq.chain[i], table.ids[i])
            for i in range(table.num_dropped, self._first_needed(g, seq.computed)):
                pool.drop(table.ids[i])
                table.ids[i] = 0
                table.num_dropped = i + 1

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child starts with all that the parent has computed, in shared blocks."""
        child.tables = [BlockTable(list(table.ids), table.num_dropped) for table in parent.tables]
        child.chain = list(parent.chain)
        child.computed = parent.computed
        for pool, table in zip(self.pools, child.tables):
            for block in table.ids[table.num_dropped :]:
                pool.share(block)

    def release(self, seq: Sequence) -> None:
        """Give back everything, tail first, so that the beginnings, which others may share, are reused last."""
        for pool, table in zip(self.pools, seq.tables):
            for block in reversed(table.ids[table.num_dropped :]):
                pool.drop(block)
        seq.tables = []
        seq.chain = []
        seq.computed = 0

    def forget_all(self) -> None:
        """Empty the prefix cache."""
        for pool in self.pools:
            pool.forget_all()

    # -- prefixes and windows ----------------------------------------------------------------------------------------------

    def _extend_chain(self, seq: Sequence, num_blocks: int) -> None:
        size = self.block_size
        for i in range(len(seq.chain), num_blocks):
            parent = seq.chain[-1] if seq.chain else self.version
            seq.chain.append(self._prefixes.extend(parent, tuple(seq.tokens[i * size : (i + 1) * size])))

    def _first_needed(self, group: int, position: int) -> int:
        """The first block that a query at `position` or later can see."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def _reach(self, group: int, seq: Sequence, num_blocks: int) -> int:
        """The longest hit of at most `num_blocks` blocks in this group."""
        pool = self.pools[group]
        if self.windows[group] is None:
            return next((i for i in range(num_blocks) if pool.find(seq.chain[i]) is None), num_blocks)
        n = num_blocks
        while n:
            first = self._first_needed(group, n * self.block_size)
            gap = next((i for i in range(n - 1, first - 1, -1) if pool.find(seq.chain[i]) is None), None)
            if gap is None:
                break
            n = gap
        return n
