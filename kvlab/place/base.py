"""What a place must do: have a layer's bytes on the compute device when they are needed, and put them away after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from kvlab.buffer import Buffer
from kvlab.strategy import Method


class HasBuffers(Protocol):
    def buffers(self) -> list[Buffer]: ...


class PlaceState:
    """Moves whole layers. One for a cache; ``layers`` are in the order in which the model uses them."""

    def __init__(self, layers: Sequence[HasBuffers]) -> None:
        self.layers = layers

    def fetch(self, layer: int) -> None:
        """On return, every buffer of the layer is on the compute device."""

    def release(self, layer: int) -> None:
        """The layer is done for this step."""

    @property
    def in_flight(self) -> int:
        """Bytes already on the compute device for a layer that has not been fetched yet."""
        return 0

    def close(self) -> None:
        """Give back what the place holds (files, host memory)."""


class Place(Method, abstract=True):
    """Settings of a place."""

    axis = "place"
    lossless = True

    def state(self, layers: Sequence[HasBuffers], device: torch.device) -> PlaceState:
        raise NotImplementedError
