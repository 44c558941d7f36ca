"""What a keep must say: how many tokens a head may hold, and how much each held token is worth. The cache does the rest."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvlab.buffer import Buffer
from kvlab.rope import Rope
from kvlab.strategy import Method, param

LONGEST = 1_048_576  # tokens, of any budget or window
PROTECTED = float("inf")


@dataclass(frozen=True)
class Room:
    """Where a keep is asked for its limit. ``seen``: tokens the layer has read, padding included.

    ``rows_in(bytes)``: how many tokens of this layer fit into so many bytes as the store writes them, what the keep itself holds of them included.
    """

    layer: int = 0
    layers: int = 1
    seen: int = 0
    rows_in: Callable[[float], int] | None = None
    sharing: int = 0  # layers that a budget in bytes is for; 0: all of them


@dataclass(frozen=True)
class Held:
    """The tokens of one layer when the keep is asked, oldest first. ``b`` and ``h`` are 1 where all rows or heads agree.

    ``columns``: int64 ``[b, h, n]``, each token's column in the padded sequence; -1 where a head holds fewer than another.
    ``positions``: int64 ``[b, h, n]``, its number among the real tokens of its row (negative: padding).
    ``seen``: tokens the cache has seen, padding included; the newest has the column ``seen - 1``.
    ``evidence``: float32 ``[B, H, n]``, what :meth:`Keep.observe` has said of each; None unless the method ``needs`` attention.
    ``keys``, ``values``: give them as they are held, float32 ``[B, H, n, D]`` (a copy).
    ``roles``, ``turns``: of each column, as ``KVCache.annotate`` was told (int64 ``[seen]``, an index into :data:`ROLES` and the number of the turn).
    ``state``: what :meth:`Keep.state` made for this layer.
    """

    columns: Tensor
    positions: Tensor
    seen: int
    evidence: Tensor | None = None
    keys: Callable[[], Tensor] | None = None
    values: Callable[[], Tensor] | None = None
    roles: Tensor | None = None
    turns: Tensor | None = None
    state: Any = None
    limit: int | None = None  # tokens a head may hold, after this

    def protect(self, priority: Tensor, sinks: int, recent: int) -> Tensor:
        """``priority`` with the first ``sinks`` real tokens and the newest ``recent`` ones beyond reach."""
        safe = (self.positions < sinks) | (self.columns >= self.seen - recent)
        return torch.where(safe, PROTECTED, priority)


ROLES = ("system", "user", "assistant", "tool")


class KeepState:
    """What a keep remembers of one layer beside what it said of each token: nothing, unless a method says otherwise.

    ``page``: tokens that :meth:`look` chooses together; 0 where it chooses nothing.
    """

    page: int = 0

    def meet(self, query: Tensor, columns: Tensor, places: Tensor) -> None:
        """A step's queries ``[B, Hq, Q, D]``, scaled so that the square root of D is what a score is divided by, before anything is judged.

        ``columns`` int64 ``[1, 1, Q]``; ``places`` int64 ``[1 or B, Q]``, their numbers among the real tokens of their row (negative: padding).
        """

    def chooses(self, tokens: int) -> bool:
        """Whether :meth:`look` will leave any of so many stored tokens out."""
        return False

    def look(self, query: Tensor, tokens: int) -> Tensor | None:
        """Which of the stored ``tokens`` these queries ``[B, H, G, q, D]`` need: bool ``[B, H, q, tokens]``; None: all of them."""
        return None

    def write(self, keys: Tensor, start: int, real: Tensor | None) -> None:
        """Keys ``[B, H, n, D]`` of the rows from ``start`` on, which come after all others. ``real``: bool ``[B, 1, n]``, False for padding; None: all real."""

    def truncate(self, rows: int) -> None:
        """Only the first ``rows`` tokens are left."""

    def buffers(self) -> list[Buffer]:
        """Everything that holds bytes, the batch along dim 0."""
        return []


class Keep(Method, abstract=True):
    """Settings of a keep. One that ``needs`` "attention" is shown every step's attention weights in :meth:`observe`."""

    axis = "keep"
    carries: ClassVar[bool] = True  # what earlier steps observed is added to; False: each step's word replaces it
    differs: ClassVar[str] = "never"  # who may hold other tokens than another: "never", a "row" of the batch, a "head"

    merges: ClassVar[bool] = False  # evicted tokens are folded into kept ones by :meth:`fold`
    ragged: ClassVar[bool] = False  # heads share the limit: together they hold as many as if each had it
    looks: ClassVar[bool] = False  # its state says which of the stored tokens a query needs, and only those are read

    def state(self, heads: int, kv_heads: int, batch: int, dim: int, rope: Rope | None, layer: int) -> KeepState:
        """What to remember of one layer. ``heads``: query heads; ``dim``: of a key; ``rope``: how keys are turned, if the method ``needs`` it."""
        return KeepState()

    def limit(self, room: Room) -> int | None:
        """Tokens a head of this layer may hold after each step; None for no limit."""
        return None

    @property
    def endless(self) -> bool:
        """Whether a text may be longer than the model's context: no query is ever further from a token it sees than the budget."""
        return False

    @property
    def shifted(self) -> int:
        """How many of the first tokens are read as if they stood right before the other held ones; 0: every token at its true position."""
        return 0

    @property
    def slack(self) -> int:
        """How many tokens more than needed go when some must: then the next ones come without any going."""
        return 0

    @property
    def protected(self) -> int:
        """How many tokens a head always holds, whatever they are worth."""
        return 0

    def observe(self, weights: Tensor, after: int) -> Tensor:
        """What a block of queries says of the keys: softmax weights ``[B, H, G, q, n]`` (G query heads share a key) -> float32 ``[B, H, n]``.

        Blocks of one step are added up. ``after``: how many queries of the same step are newer than the block's last. Padded queries weigh nothing.
        """
        return weights.sum((2, 3))

    def counted(self, queries: int) -> int | None:
        """From which of a step's ``queries`` on :meth:`observe` adds plain weights up; None: it makes something else of them.

        Kernels that never hold the weights add them up by themselves, and :meth:`observe` is not asked.
        """
        return 0 if type(self).observe is Keep.observe else None

    def beside(self, batch: int, kv_heads: int) -> float:
        """Bytes of one layer for each held token beside the store's: its column, once any has gone, and its evidence."""
        lists = {"never": 1, "row": batch, "head": batch * kv_heads}[self.differs]
        return 4.0 * lists * ("evict" in self.needs) + 4.0 * batch * kv_heads * ("attention" in self.needs)

    def predict(self, rows: int, layer: int, batch: int, heads: int, kv_heads: int, dim: int) -> dict[str, float]:
        """Bytes by part of what :meth:`state` holds of one layer beside evidence for each token, once ``rows`` tokens are held."""
        return {}

    def priority(self, held: Held) -> Tensor:
        """float32 ``[b, h, n]``: who stays when room is short, the highest first, ties to the newest. ``PROTECTED`` never goes.

        Padding needs no care: it goes first, whatever is said here.
        """
        raise NotImplementedError

    def admit(self, roles: Tensor, turns: Tensor, limit: int) -> None:
        """Before a step is taken, where roles matter: of every token there will be. Raises ``ValueError`` if no ``limit`` tokens can be chosen."""

    def fold(self, held: Held, stay: Tensor, first: int, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Fold what goes into what stays, where ``merges``: before any row leaves.

        ``stay``: int64 ``[B, H, m]``, the rows that stay. Rows before ``first`` are written down and cannot change. ``counts``: float32 ``[B, H, n]``,
        how many tokens each row stands for. Returns the staying keys and values ``[B, H, m, D]`` and their counts ``[B, H, m]``.
        """
        raise NotImplementedError


def budget(default: int = 256) -> int:
    """The setting of that name, alike for all methods that have it."""
    return param(  # type: ignore[no-any-return]
        default,
        low=1,
        high=LONGEST,
        step=16,
        unit="tokens",
        covers=True,
        help="Tokens a head may hold, the protected ones included; or a share of the tokens read (0.2), or bytes ('4 MB') of all layers together, those with a window of the model's own apart.",
        also=_share_or_bytes,
    )


def _share_or_bytes(value: Any) -> bool:
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise ValueError("is no share of the tokens read (allowed: above 0.0 and up to 1.0)")
        return True
    if isinstance(value, str):
        return parse_bytes(value) > 0
    return False


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: str) -> int:
    """``"4 MB"`` -> 4,000,000. Raises ``ValueError`` for anything but a number above 0 and one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    size = float(found[1]) * _UNITS.get(found[2].upper(), 0) if found else 0
    if size < 1:
        raise ValueError("is no number of bytes (allowed: '4 MB', '512 KiB', ...; units B, KB, MB, GB, TB, KiB, MiB, GiB, TiB)")
    return int(size)


def tokens_of(budget: int | float | str, room: Room, least: int, owner: str) -> int:
    """A budget in any of its forms as tokens a head may hold. A share is never less than ``least``, the protected tokens.

    Raises ``ValueError`` if the bytes have no room for ``least`` tokens, or if nobody can tell how many they have room for.
    """
    if isinstance(budget, int):
        return budget
    if isinstance(budget, float):
        return max(least, 1, math.ceil(budget * room.seen - 1e-9))
    if room.rows_in is None:
        raise ValueError(
            f"{owner}: budget={budget!r} has no number of tokens without a model and a store (allowed here: tokens, or a share)"
        )
    sharing = room.sharing or room.layers
    tokens = room.rows_in(parse_bytes(budget) / sharing)
    if tokens < max(least, 1):
        raise ValueError(
            f"{owner}: budget={budget!r} has room for {tokens} tokens in each of {sharing} layers (allowed: bytes for {max(least, 1)} or more)"
        )
    return tokens


def recent(default: int = 64) -> int:
    return param(default, low=0, high=LONGEST, step=16, unit="tokens", help="How many of the newest tokens are always kept.")  # type: ignore[no-any-return]


def sinks(default: int = 4) -> int:
    return param(default, low=0, high=64, step=1, unit="tokens", help="How many of the first tokens are always kept.")  # type: ignore[no-any-return]


class Budgeted(Keep, abstract=True):
    """A keep with ``budget``, ``recent`` and ``sinks``: whatever the evidence, those are held to."""

    budget: int
    recent: int
    sinks: int

    needs = frozenset({"attention", "evict"})
    differs = "head"

    def check(self) -> None:
        least = self.protected + self.slack
        if isinstance(self.budget, int) and self.budget < max(1, least):
            why = "recent + sinks" + (" + every - 1" if self.slack else "")
            raise ValueError(f"{type(self).__name__}: budget={self.budget} is below {why} = {least} (allowed: {least} or more)")

    def limit(self, room: Room) -> int | None:
        return tokens_of(self.budget, room, self.protected + self.slack, type(self).__name__)

    @property
    def protected(self) -> int:
        return self.recent + self.sinks

    def priority(self, held: Held) -> Tensor:
        return held.protect(self.worth(held), self.sinks, self.recent)

    def worth(self, held: Held) -> Tensor:
        """float32 ``[b, h, n]``: what each token is worth by this method's evidence, protection apart."""
        assert held.evidence is not None
        return held.evidence


class Around(Keep, abstract=True):
    """A keep around another: everything is ``inner``'s, until a subclass says otherwise. Several may be put around each other."""

    inner: Any

    def innermost(self) -> Any:
        """The method that has the evidence."""
        one = self.inner
        while isinstance(one, Around):
            one = one.inner
        return one

    def evidence_of(
        self, able: Callable[[Keep], bool] = lambda _: True, why: str = "has no budget", allowed: str = "methods with a budget"
    ) -> None:
        """Raise ``ValueError`` unless the innermost method has a budget and evidence, and is ``able``."""
        one = self.inner
        while isinstance(one, Around):
            if one.merges:
                raise ValueError(
                    f"{type(self).__name__}: inner={type(one).__name__} folds what goes away, so nothing can be around it (allowed: the other way round)"
                )
            one = one.inner
        if not isinstance(one, Budgeted) or not able(one):
            raise ValueError(f"{type(self).__name__}: inner={type(self.inner).__name__} {why} (allowed: {allowed})")

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(self.inner.needs)

    @property
    def carries(self) -> bool:  # type: ignore[override]
        return bool(self.inner.carries)

    @property
    def differs(self) -> str:  # type: ignore[override]
        return str(self.inner.differs)

    @property
    def ragged(self) -> bool:  # type: ignore[override]
        return bool(self.inner.ragged)

    @property
    def slack(self) -> int:
        return int(self.inner.slack)

    @property
    def protected(self) -> int:
        return int(self.inner.protected)

    def state(self, *shape: Any) -> KeepState:
        return self.inner.state(*shape)  # type: ignore[no-any-return]

    def predict(self, rows: int, layer: int, batch: int, heads: int, kv_heads: int, dim: int) -> dict[str, float]:
        return dict(self.inner.predict(rows, layer, batch, heads, kv_heads, dim))

    def limit(self, room: Room) -> int:
        return int(self.inner.limit(room))

    def observe(self, weights: Tensor, after: int) -> Tensor:
        return self.inner.observe(weights, after)  # type: ignore[no-any-return]

    def counted(self, queries: int) -> int | None:
        return self.inner.counted(queries) if type(self).observe is Around.observe else None  # type: ignore[no-any-return]

    def priority(self, held: Held) -> Tensor:
        return self.inner.priority(held)  # type: ignore[no-any-return]

    def admit(self, roles: Tensor, turns: Tensor, limit: int) -> None:
        self.inner.admit(roles, turns, limit)


@dataclass(frozen=True)
class Visible(Keep, abstract=True):
    """A model's own window: what its attention can still see of a layer. No setting of a strategy, the cache uses it by itself."""

    size: int = 1

    def limit(self, room: Room) -> int:
        return self.size

    def priority(self, held: Held) -> Tensor:
        return held.columns.float()
