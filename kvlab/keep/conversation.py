"""Conversation: who speaks decides what stays. There is no canonical algorithm for it; this one is stated exactly below."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlab.keep.base import PROTECTED, ROLES, Around, Held, Room, budget, tokens_of
from kvlab.keep.heavy_hitter import HeavyHitter
from kvlab.strategy import param


@dataclass(frozen=True)
class Conversation(Around):
    """``budget`` tokens per layer and KV head, chosen by roles and turns.

    Always kept: system messages, all that the user said, and the newest ``turns`` turns (a turn is a user's message and what follows it), whoever
    speaks. The rest, old answers and tools' output, goes oldest turn first, whole turns before a part of the next; which part of that one, ``inner``'s
    evidence says. What ``inner`` itself protects (its first and newest tokens) is kept, too; its budget is not used.

    Roles come from ``lab.chat`` or ``KVCache.annotate``. A protected part that is larger than the budget is an error, when it happens, that says so.
    """

    title = "by roles and turns"
    paper = "kvlab's own rule"

    budget: int = budget(512)
    turns: int = param(1, low=1, high=64, step=1, unit="turns", help="How many of the newest turns are kept whole.")
    inner: Any = param(
        HeavyHitter(recent=0),
        title="evidence of",
        help="Whose evidence chooses within a turn that is cut; its budget is not used.",
    )

    def check(self) -> None:
        self.evidence_of(why="has no evidence")

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(self.inner.needs) | {"roles"}

    @property
    def slack(self) -> int:
        return 0

    def limit(self, room: Room) -> int:
        return tokens_of(self.budget, room, self.protected, "Conversation")

    def admit(self, roles: Tensor, turns: Tensor, limit: int) -> None:
        always = self._always(roles, turns)
        inner = self.innermost()
        always[: inner.sinks] = True
        always[max(0, len(always) - inner.recent) :] = True
        kept = int(always.sum())
        if kept > limit:
            raise ValueError(
                f"Conversation: budget={self.budget!r} has room for {limit} tokens, but {kept} are protected (system, user, the newest {self.turns} "
                f"turn(s), the first {inner.sinks} and newest {inner.recent} tokens); allowed here: {kept} or more"
            )

    def _always(self, roles: Tensor, turns: Tensor) -> Tensor:
        said = (roles == ROLES.index("system")) | (roles == ROLES.index("user"))
        return said | (turns > int(turns.max()) - self.turns)

    def priority(self, held: Held) -> Tensor:
        assert held.roles is not None and held.turns is not None
        worth = self.inner.priority(held)
        n = worth.shape[-1]
        rank = torch.empty_like(worth, dtype=torch.float64)  # a rank is all that counts within a turn
        order = worth.sort(dim=-1, stable=True).indices
        rank.scatter_(-1, order, torch.arange(n, dtype=torch.float64, device=worth.device).expand_as(worth))
        always = self._always(held.roles, held.turns)[held.columns] | (worth == PROTECTED)
        return torch.where(always, PROTECTED, held.turns[held.columns] + rank / n)
