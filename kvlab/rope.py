"""Rotary position embedding (RoFormer, arXiv 2104.09864): turning keys by their position, and back.

Keys come to a cache turned: each pair of channels by an angle that grows with the token's position. So a channel that is nearly constant before
looks like a wave after, which makes keys harder to write with few bits. Stores that undo the turn first need to know how a model turns; :func:`find`
finds it by trying.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvlab.errors import UnsupportedModel

TOKENS = 24  # how many equal tokens `find` wants to see


@dataclass(frozen=True, eq=False)
class Rope:
    """How one layer turns its keys. ``frequencies``: float32 ``[R / 2]``, radians a position; the first ``R`` channels of a head are turned.

    ``interleaved``: neighbours are a pair; otherwise channel ``i`` and ``i + R / 2`` are.
    """

    frequencies: Tensor
    interleaved: bool = False

    @property
    def dims(self) -> int:
        return 2 * len(self.frequencies)

    def turn(self, x: Tensor, columns: Tensor, back: bool = False, last: int | None = None) -> Tensor:
        """``x`` ``[B, H, n, D]`` turned by positions ``columns`` (int64 ``[1 or B, 1 or H, n]``), or turned back -> float32. ``last``: a bound of the positions,
        where it is known without looking."""
        x, (cos, sin) = x.float(), self._waves(columns, last)
        return self._turned(x, cos, -sin if back else sin)

    def average(self, first: int, last: int, dim: int, device: torch.device) -> Tensor:
        """The mean of the turns by ``first`` to ``last - 1`` positions, as a matrix: float32 ``[dim, dim]``, to be applied to a vector from the left."""
        cos, sin = self.table(last, device)[first:last].double().mean(0).float().chunk(2)
        return self._turned(torch.eye(dim, device=device), cos, sin).mT

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        own, rest = x[..., : self.dims], x[..., self.dims :]
        if self.interleaved:
            first, second = own[..., ::2], own[..., 1::2]
        else:
            first, second = own.chunk(2, -1)
        one, two = first * cos - second * sin, second * cos + first * sin
        turned = torch.stack([one, two], -1).flatten(-2) if self.interleaved else torch.cat([one, two], -1)
        return torch.cat([turned, rest], -1) if rest.shape[-1] else turned

    def _waves(self, columns: Tensor, last: int | None = None) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every angle, float32 ``[b, h, n, R / 2]``."""
        if last is None:
            last = int(columns.max()) if columns.numel() else 0
        waves = self.table(last + 1, columns.device)[columns]
        cos, sin = waves.chunk(2, -1)
        return cos, sin

    def table(self, positions: int, device: torch.device) -> Tensor:
        """float32 ``[positions or more, R]``: the cosines of each position and then its sines, taken in float64. It grows as it is asked for."""
        tables = _tables.setdefault(self, {})
        table = tables.get(device)
        if table is None or len(table) < positions:
            at = torch.arange(max(positions, 512) * 5 // 4, dtype=torch.float64, device=device)
            angles = at[:, None] * self.frequencies.to(device).double()
            table = tables[device] = torch.cat([angles.cos(), angles.sin()], 1).float()
        return table


#: Cosines and sines of every position so far: the model's, not any cache's, so no cache counts them as its own.
_tables: weakref.WeakKeyDictionary[Rope, dict[torch.device, Tensor]] = weakref.WeakKeyDictionary()


def find(model: nn.Module, keys: Sequence[tuple[Tensor, Tensor] | None]) -> list[Rope | None]:
    """How each layer of ``model`` turns its keys; None for a layer that does not.

    ``keys``: of each layer its keys ``[1, H, n, D]`` and their columns ``[1, 1 or H, n]`` after the model has read *one and the same token* again and
    again; None for a layer without keys. Attention over equal values gives that value, so every layer sees the same at each position, and keys
    differ by position alone: the right turn back makes them equal. The frequencies tried are those that the model's own modules hold.

    Raises ``UnsupportedModel`` if a model has such frequencies and none fits.
    """
    tried = [
        Rope(buffer.detach().float().cpu(), interleaved)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and buffer.dim() == 1
        for interleaved in (False, True)
    ]
    tried += [
        Rope(torch.atan2(*buffer[1].float().cpu().chunk(2)), True)  # GPT-J and CodeGen keep sines and cosines of every position
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name == "embed_positions" and buffer.dim() == 2 and buffer.shape[0] > 1 and buffer.shape[1] % 2 == 0
    ]
    if not tried:
        return [None] * len(keys)
    found: list[Rope | None] = []
    unsure: list[int] = []
    for number, layer in enumerate(keys):
        if layer is None:
            found.append(None)
            continue
        x, columns = layer
        bound = 1e-3 if x.dtype == torch.float32 else 4e-2
        choices = [None, *(rope for rope in tried if rope.dims <= x.shape[-1])]
        spreads = [_spread(x if rope is None else rope.turn(x, columns, back=True)) for rope in choices]
        best = min(range(len(choices)), key=spreads.__getitem__)
        found.append(choices[best])
        if spreads[best] > bound:
            unsure.append(number)
    if not unsure:
        return found
    # sinks as parameters make what a layer sees depend on how many keys there are; the first layer sees the tokens themselves
    sure = {found[i] for i in range(len(keys)) if keys[i] is not None and i not in unsure}
    if len(sure) != 1:
        raise UnsupportedModel(
            f"{type(model).__name__} turns the keys of layer {unsure[0]} by position in a way kvlab does not know (looked at {TOKENS} equal tokens, tried "
            f"{len(tried)} ways). Use a store that leaves keys as they come: Int, Rotated, Fp8."
        )
    (only,) = sure
    return [only if i in unsure else own for i, own in enumerate(found)]


def _spread(x: Tensor) -> float:
    """How much the rows of ``[1, H, n, D]`` differ from their first, against its length."""
    x = x.float()
    return float((x - x[:, :, :1]).norm(dim=-1).amax() / x[:, :, :1].norm(dim=-1).amax().clamp(min=1e-12))
