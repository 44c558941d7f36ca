"""BlockPool: memory for many sequences, in blocks of a fixed number of tokens (PagedAttention, arXiv 2309.06180).

A block belongs to everybody who holds a reference to it: a sequence that reads it, the prefix tree that may lend it again. The pool knows numbers only, no
tensors; the same class serves the engine, whose pages lie at these numbers, and the simulator, where nothing lies anywhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from kvlab.keep.base import parse_bytes


class OutOfBlocks(RuntimeError):
    """There are not so many free blocks; nothing was taken."""


class BlockPool:
    """``blocks`` blocks of ``block_size`` tokens each.

    Free blocks are handed out in the order in which they became free, the longest free first. Raises ``ValueError`` for fewer than 1 of either.
    """

    def __init__(self, blocks: int, block_size: int = 16) -> None:
        for name, value in (("blocks", blocks), ("block_size", block_size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} is out of range (allowed: 1 or more)")
        self.blocks, self.block_size = blocks, block_size
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._references = [0] * blocks
        self._watched: dict[int, Callable[[int, int], None]] = {}

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        return self.blocks - len(self._free)

    @property
    def usage(self) -> float:
        """Used blocks as a share of all: what servers call KV usage."""
        return self.used / self.blocks

    def references(self, block: int) -> int:
        """How many hold the block. Raises ``ValueError`` for a number that is no block's."""
        return self._references[self._known(block)]

    def needed(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens take."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int = 1) -> list[int]:
        """``count`` blocks with one reference each, all or none. Raises :class:`OutOfBlocks`, ``ValueError`` for a negative count."""
        if count < 0:
            raise ValueError(f"count={count} is out of range (allowed: 0 or more)")
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks are wanted, {len(self._free)} of {self.blocks} are free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each. Raises ``ValueError`` for a block that nobody holds: what lay in it may be gone."""
        asked = list(blocks)
        for block in asked:
            if not self._references[self._known(block)]:
                raise ValueError(f"block {block} is free: nobody can share what is no longer there")
        for block in asked:
            self._references[block] += 1
            self._tell(block)

    def release(self, blocks: Iterable[int]) -> list[int]:
        """One reference less to each -> those that are free now. Raises ``ValueError`` for a block that nobody holds, before anything is changed."""
        asked = list(blocks)
        for block in set(asked):
            if self._references[self._known(block)] < asked.count(block):
                raise ValueError(f"block {block} is released more often than it is held ({self._references[block]})")
        freed = []
        for block in asked:
            self._references[block] -= 1
            self._tell(block)
            if not self._references[block]:
                self._free[block] = None
                freed.append(block)
        return freed

    def own(self, block: int) -> tuple[int, bool]:
        """A block that one holder of ``block`` may write: itself where nobody else holds it, else a new one.

        -> the block, and whether its content must be copied there (copy on write); the holder then releases ``block`` once that is done. Raises
        :class:`OutOfBlocks` where there is none to copy to, ``ValueError`` for a block that nobody holds.
        """
        if self.references(block) == 0:
            raise ValueError(f"block {block} is free: nobody can write to it")
        if self._references[block] == 1:
            return block, False
        return self.allocate()[0], True

    def watch(self, block: int, changed: Callable[[int, int], None] | None) -> None:
        """Call ``changed(block, references)`` whenever the number of references to ``block`` changes; None ends it."""
        if changed is None:
            self._watched.pop(block, None)
        else:
            self._watched[self._known(block)] = changed

    def _tell(self, block: int) -> None:
        if block in self._watched:
            self._watched[block](block, self._references[block])

    def _known(self, block: int) -> int:
        if not 0 <= block < self.blocks:
            raise ValueError(f"block {block} is out of range (allowed: 0 to {self.blocks - 1})")
        return block


def memory_of(kv_memory: int | str) -> int:
    """Bytes, from a number or a text such as "64 MB". Raises ``ValueError`` for what is neither."""
    if isinstance(kv_memory, str):
        try:
            return parse_bytes(kv_memory)
        except ValueError as error:
            raise ValueError(f"kv_memory={kv_memory!r} {error}") from error
    if not isinstance(kv_memory, int) or isinstance(kv_memory, bool) or kv_memory < 1:
        raise ValueError(f"kv_memory={kv_memory!r} is out of range (allowed: 1 byte or more, or a text such as '64 MB')")
    return kv_memory
