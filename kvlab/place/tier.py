"""Where rows wait while they are away from the compute device: a :class:`Tier`. ``disk`` and ``host`` are the two there are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from kvlab.buffer import SLACK_ROWS, SLACK_SHARE, Buffer
from kvlab.timeline import Timeline

PAGE = 16  # rows that are written together, where nobody wants others


class NotWritten(OSError):
    """Rows could not be put away, and are still on the compute device."""


class Tier(ABC):
    """Holds the first rows of buffers, whole pages of them."""

    name: str = ""
    timeline: Timeline | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def put(self, buffer: Buffer, stop: int, page: int, layer: int) -> None:
        """Bring what is held up to date: rows from ``buffer.clean`` to ``stop``, a multiple of ``page``. If it fails, nothing is lost here."""

    def forget(self, buffer: Buffer) -> None:
        """Give back what is held of a buffer of which nothing is away any more."""

    @abstractmethod
    def start(self, buffer: Buffer, layer: int) -> Any:
        """Begin to fetch all rows that are away -> a ticket for :meth:`finish`."""

    @abstractmethod
    def finish(self, ticket: Any) -> Tensor:
        """Wait for them -> as ``Home.bring`` gives them."""

    @abstractmethod
    def take(self, buffer: Buffer, index: Tensor) -> Tensor:
        """As ``Home.take``."""

    @abstractmethod
    def bytes(self, buffer: Buffer) -> int:
        """What the rows that are away take up there."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""

    def bring(self, buffer: Buffer) -> Tensor:
        return self.finish(self.start(buffer, -1))

    @staticmethod
    def room(buffer: Buffer) -> tuple[int, ...]:
        """The shape of a storage for all rows, with room to grow."""
        assert buffer.data is not None
        rows = len(buffer) + max(len(buffer) // SLACK_SHARE - 1, SLACK_ROWS if len(buffer) > SLACK_ROWS else 1)
        return (*buffer.data.shape[:2], rows, *buffer.data.shape[3:])
