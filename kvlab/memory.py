"""What a cache holds, in bytes: by part and by device, as used and as allocated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One kind of bytes on one device. ``name``: keys, values, codes, scales, basis, coefficients, tables, residual, columns, evidence, pages, counts."""

    name: str
    device: str
    logical: int  # bytes of the rows in use
    allocated: int  # bytes of the storages, room to grow included


@dataclass(frozen=True)
class Memory:
    """``KVCache.memory()``.

    ``high_water``: the most bytes the compute device held for this cache at any moment, new tokens and scores in flight included.
    ``reference``: bytes of a 16-bit dense cache of all ``seen`` tokens, what people deploy; ratios are taken against it.
    ``seen`` counts tokens the model has read, ``stored`` those still held. ``repacked``: how often a head's token was written anew as codes, because the
    group it lay in had lost half its tokens or was cut through; otherwise a code stays as it was written. ``evicted``: of all tokens of all layers and
    heads, the share that was evicted, whatever methods did it together; ``stored`` is the longest head's.
    """

    parts: tuple[Part, ...]
    high_water: int
    reference: int
    seen: int
    stored: int
    repacked: int = 0
    evicted: float = 0.0

    @property
    def allocated(self) -> int:
        return sum(part.allocated for part in self.parts)

    @property
    def logical(self) -> int:
        return sum(part.logical for part in self.parts)

    @property
    def ratio(self) -> float:
        """Allocated bytes over those of a 16-bit dense cache."""
        return self.allocated / self.reference if self.reference else 0.0

    @property
    def effective_bits(self) -> float:
        """Allocated bits per number of the full cache, everything included."""
        return 16 * self.ratio

    def by_part(self, logical: bool = False) -> dict[str, int]:
        """part -> bytes, over all devices."""
        return self._sum("name", logical)

    def by_device(self, logical: bool = False) -> dict[str, int]:
        """device (cpu, cuda, disk) -> bytes, over all parts."""
        return self._sum("device", logical)

    def _sum(self, key: str, logical: bool) -> dict[str, int]:
        out: dict[str, int] = {}
        for part in self.parts:
            out[getattr(part, key)] = out.get(getattr(part, key), 0) + (part.logical if logical else part.allocated)
        return out

    def __str__(self) -> str:
        lines = [f"{part.name:<9} {part.device:<5} {part.allocated:>12,} bytes ({part.logical:,} in use)" for part in self.parts]
        return "\n".join(
            [
                *lines,
                f"together  {self.allocated:>18,} bytes, {100 * self.ratio:.1f}% of a 16-bit cache of {self.seen:,} tokens; "
                f"{self.stored:,} held; high-water mark {self.high_water:,} bytes"
                + (f"; {100 * self.evicted:.1f}% of all layers' and heads' tokens evicted" if self.evicted else "")
                + (f"; {self.repacked:,} codes' tokens written again" if self.repacked else ""),
            ]
        )
