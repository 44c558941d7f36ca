"""What a place must do: have a layer's bytes on the compute device when they are needed, and put them away after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from kvlab.buffer import Buffer
from kvlab.strategy import Method
from kvlab.timeline import Timeline


class Movable(Protocol):
    """What a place sees of a layer."""

    @property
    def held(self) -> int:
        """Tokens it holds."""

    @property
    def page(self) -> int:
        """Tokens that are read together where single ones are looked up; 0: none are."""

    def moving(self) -> list[Buffer]:
        """What may leave the compute device between two steps."""


class PlaceState:
    """Moves whole layers. One for a cache; ``layers`` are in the order in which the model uses them. ``timeline``: what it records, once asked to."""

    def __init__(self, layers: Sequence[Movable]) -> None:
        self.layers = layers
        self.timeline: Timeline | None = None

    def record(self, timeline: Timeline | None) -> None:
        """Note what happens from now on."""
        self.timeline = timeline

    def fetch(self, layer: int, whole: bool = True) -> None:
        """On return the layer's bytes are on the compute device; without ``whole`` they may stay away, and each buffer fetches what it is asked for."""
        if self.timeline is not None:
            self.timeline.turn(layer)
            self.timeline.ready(layer)

    def release(self, layer: int) -> None:
        """The layer is done for this step. Raises ``NotWritten`` where it cannot be put away; it is then still here, whole."""
        if self.timeline is not None and layer == len(self.layers) - 1:
            self.timeline.rest()

    @property
    def in_flight(self) -> int:
        """Bytes already on the compute device for layers that have not been fetched yet."""
        return 0

    def close(self) -> None:
        """Give back what the place holds (files, threads, host memory)."""


class Place(Method, abstract=True):
    """Settings of a place."""

    axis = "place"
    lossless = True
    ahead = 0  # layers that are on their way while one computes

    def stays(self, layer: int, rows: int, parts: dict[str, float]) -> float:
        """Predicted bytes of a layer with ``rows`` tokens, ``parts`` bytes of each part, that remain on the compute device between two steps."""
        return sum(parts.values())

    def state(self, layers: Sequence[Movable], device: torch.device) -> PlaceState:
        raise NotImplementedError
