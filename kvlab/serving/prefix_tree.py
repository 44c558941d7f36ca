"""PrefixTree: what was read once is lent again to every text that begins the same way.

A node is one full block, reached by the tokens of all blocks before it, so a block is shared only where everything before it is the same as well. Tokens are
compared as tokens: a hash finds them, equality confirms them. Each tenant has a tree of its own: with a salt nobody meets another's prefixes.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from kvlab.serving.block_pool import BlockPool

POLICIES = ("lru", "lfu")


@dataclass(eq=False)
class Node:
    """``tokens`` of one block, which lies in ``block``. ``used``: when it was met last; ``times``: how many requests began so."""

    tokens: tuple[int, ...]
    block: int
    parent: Node | None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    order: list[tuple[int, ...]] = field(default_factory=list)  # the children's tokens, sorted
    used: int = 0
    times: int = 0
    idle: bool = False  # only the tree holds it


@dataclass(frozen=True)
class Match:
    """``blocks``: full blocks that begin the text, in order. ``partial``: a further block that begins with the next ``count`` tokens: to be copied, since
    the text goes on otherwise in its middle. ``tokens``: how many the match covers.
    """

    blocks: tuple[int, ...]
    partial: int | None
    count: int
    block_size: int

    @property
    def tokens(self) -> int:
        return len(self.blocks) * self.block_size + self.count


class PrefixTree:
    """Prefixes whose blocks lie in ``pool``; the tree holds one reference to each. ``policy``: which unreferenced leaf goes first, the one used longest ago
    ("lru") or least often ("lfu", ties to the longest ago). Raises ``ValueError`` for another policy.
    """

    def __init__(self, pool: BlockPool, policy: str = "lru") -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy={policy!r} is not one of {', '.join(POLICIES)}")
        self.pool, self.policy = pool, policy
        self._roots: dict[Hashable, Node] = {}
        self._at: dict[int, Node] = {}  # by block
        self._clock = 0
        self._idle = 0
        self._ready: list[tuple[tuple[int, int], int, Node]] = []  # leaves that were idle once, by what they were worth then
        self._order = itertools.count()

    def __len__(self) -> int:
        """Blocks that the tree holds."""
        return len(self._at)

    @property
    def evictable(self) -> int:
        """Blocks that :meth:`evict` could free: only the tree holds them. (Who reads a block reads all before it, so nothing behind them is read either.)"""
        return self._idle

    def nodes(self) -> Iterator[Node]:
        """All nodes, parents before their children."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def match(self, tokens: Sequence[int], salt: Hashable = None) -> Match:
        """The longest known beginning of ``tokens``, at least one token short of all of them: the model must read one to go on.

        The caller shares the blocks before anything else happens to the pool, and copies the partial one.
        """
        size, node = self.pool.block_size, self._roots.get(salt)
        found: list[int] = []
        most = len(tokens) - 1
        while node is not None and (len(found) + 1) * size <= most:
            child = node.children.get(tuple(tokens[len(found) * size : (len(found) + 1) * size]))
            if child is None:
                break
            self._met(child)
            found.append(child.block)
            node = child
        partial, count = None, 0
        if node is not None:
            rest = tuple(tokens[len(found) * size : min(most, (len(found) + 1) * size)])
            at = bisect.bisect(node.order, rest)  # the most alike stands right before or after
            for near in node.order[max(0, at - 1) : at + 1]:
                alike = _alike(near, rest)
                if alike > count:
                    partial, count, best = node.children[near].block, alike, node.children[near]
            if partial is not None:
                self._met(best)
        return Match(tuple(found), partial, count, size)

    def insert(self, tokens: Sequence[int], blocks: Sequence[int], salt: Hashable = None) -> list[int]:
        """Remember the full blocks of ``tokens``, which lie in ``blocks`` -> the blocks to go on with.

        What is known already takes the place of the caller's copy, whose reference moves there. Raises ``ValueError`` for fewer blocks than full ones, or a
        block that nobody holds, before anything is changed.
        """
        size = self.pool.block_size
        full = len(tokens) // size
        if len(blocks) < full:
            raise ValueError(f"{len(tokens)} tokens fill {full} blocks of {size}, but {len(blocks)} are given")
        if any(not self.pool.references(block) for block in blocks):
            raise ValueError(f"blocks={list(blocks)}: one of them is free, so nothing lies in it")
        node, held = self._roots.setdefault(salt, Node((), -1, None)), list(blocks)
        for number in range(full):
            own = tuple(tokens[number * size : (number + 1) * size])
            child = node.children.get(own)
            if child is None:
                child = node.children[own] = self._at[held[number]] = Node(own, held[number], node)
                bisect.insort(node.order, own)
                self.pool.share([held[number]])
                self.pool.watch(held[number], self._changed)
                child.times = 1
            elif child.block != held[number]:
                self.pool.share([child.block])
                self.pool.release([held[number]])
                held[number] = child.block
            self._used(child)
            node = child
        return held

    def evict(self, count: int) -> int:
        """Forget leaves that only the tree holds until ``count`` blocks are free again -> how many became so, fewer where there are no more."""
        freed = 0
        while self._ready and freed < count:
            worth, _, node = heapq.heappop(self._ready)
            if self._at.get(node.block) is not node or not self._leaf(node):
                continue  # gone, read again, or with something behind it since
            if worth != self._worth(node):
                self._offer(node)  # met since
                continue
            self._forget(node)
            freed += 1
        return freed

    def clear(self) -> None:
        """Forget everything; what sequences still read stays theirs."""
        for block in list(self._at):
            self.pool.watch(block, None)
            self.pool.release([block])
        self._roots.clear()
        self._at.clear()
        self._ready.clear()
        self._idle = 0

    def _forget(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens], self._at[node.block]
        del parent.order[bisect.bisect_left(parent.order, node.tokens)]
        self._idle -= 1
        self.pool.watch(node.block, None)
        self.pool.release([node.block])
        if parent.parent is not None and self._leaf(parent):
            self._offer(parent)
        elif parent.parent is None and not parent.children:
            self._roots = {salt: root for salt, root in self._roots.items() if root is not parent}

    def _changed(self, block: int, references: int) -> None:
        """Called by the pool: who holds a block of the tree has changed, by one."""
        node = self._at[block]
        was = node.idle
        node.idle = references == 1
        self._idle += node.idle - was
        if node.idle and not node.children:
            self._offer(node)

    def _offer(self, node: Node) -> None:
        heapq.heappush(self._ready, (self._worth(node), next(self._order), node))

    def _met(self, node: Node) -> None:
        """By another request that begins so."""
        self._used(node)
        node.times += 1

    def _used(self, node: Node) -> None:
        self._clock += 1
        node.used = self._clock

    def _leaf(self, node: Node) -> bool:
        return node.idle and not node.children

    def _worth(self, node: Node) -> tuple[int, int]:
        return (node.times, node.used) if self.policy == "lfu" else (node.used, 0)


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
