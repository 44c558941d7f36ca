"""Resident: the cache stays where the model computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvlab.place.base import Movable, Place, PlaceState


@dataclass(frozen=True)
class Resident(Place):
    """All bytes stay on the model's device."""

    title = "resident"

    def state(self, layers: Sequence[Movable], device: torch.device) -> PlaceState:
        return PlaceState(layers)
