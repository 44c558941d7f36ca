"""Offload: layers leave the compute device between two uses, to CPU RAM or to disk (FlexGen, arXiv 2303.06865)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from kvlab.buffer import Buffer
from kvlab.place.base import Movable, Place, PlaceState
from kvlab.place.disk import DiskTier
from kvlab.place.host import HostTier
from kvlab.place.tier import PAGE, Tier
from kvlab.strategy import numbers, param
from kvlab.timeline import Timeline

SMALL = 8  # a part of a layer that is less than one in so many of its bytes stays (scales, tables, positions)


@dataclass(frozen=True)
class Offload(Place):
    """Only the layers that compute now or next are on the compute device; the others wait in CPU RAM (of a GPU machine) or in files.

    Whole pages of 16 tokens leave, once; what is newer stays until its page is full, and so do parts that are small beside the rest (scales, say). While a layer computes, the next ``prefetch`` layers are on their
    way back. A part may stay for good: some layers (``hot_layers``, such as "0-1, 29"), the first and the newest tokens of each (``hot_first``, ``hot``). With ``keep.Quest`` only the pages that a query reads
    come back, as they lie (codes stay codes). ``direct`` reads files past the system's cache; ``pin`` is about CPU RAM beside a GPU; ``emulate`` slows
    reads down to a link of so many GB/s. Where a layer cannot be written it stays in memory, and the next step raises ``OSError`` before it begins.
    """

    title = "offload"
    paper = "FlexGen, arXiv 2303.06865"

    to: str = param(
        "auto", choices=("auto", "cpu", "disk"), help="Where tokens wait. auto: CPU RAM beside a GPU, disk beside a CPU."
    )
    prefetch: int = param(1, low=0, high=16, step=1, unit="layers", help="How many of the next layers are fetched ahead.")
    hot: int = param(
        0, low=0, high=65536, step=16, unit="tokens", title="hot tokens", help="The newest tokens of each layer that stay here."
    )
    hot_first: int = param(
        0, low=0, high=4096, step=4, unit="tokens", title="hot first tokens", help="So many of the first tokens stay here, too."
    )
    hot_layers: str = param("", title="hot layers", help="Layers that stay here whole: 0-1, 29.")
    folder: str = param("", help="Where files go when offloading to disk. Empty: the system's folder for temporary files.")
    direct: bool = param(
        False, title="direct reads", help="Read files past the system's cache, which may otherwise hold them in RAM."
    )
    pin: bool = param(True, title="pinned", help="Pin the CPU RAM beside a GPU, so that copies run beside computing.")
    emulate: float = param(
        0.0,
        low=0.0,
        high=64.0,
        step=0.25,
        unit="GB/s",
        title="emulated link",
        help="Slow reads from disk down to a link of this speed, to see what it would do. 0: as fast as they are.",
    )

    def check(self) -> None:
        numbers(self.hot_layers, "Offload: hot_layers")

    @property
    def ahead(self) -> int:  # type: ignore[override]
        return self.prefetch

    def stays(self, layer: int, rows: int, parts: dict[str, float]) -> float:
        if layer in numbers(self.hot_layers, "Offload: hot_layers"):
            return sum(parts.values())
        here = min(rows, self.hot_first + rows - max(0, rows - self.hot) // PAGE * PAGE) / max(1, rows)
        small = sum(parts.values()) / SMALL
        buffers = {
            "codes": 2,
            "scales": 2,
            "residual": 2,
            "coefficients": 2,
            "basis": 2,
        }  # of keys and of values; what is small stays
        room = 1.07  # they have few rows, of which the eight that a buffer may have to spare are many
        return sum(
            room * size if size / buffers.get(part, 1) < small or part == "pages" else size * here for part, size in parts.items()
        )

    def state(self, layers: Sequence[Movable], device: torch.device) -> PlaceState:
        to = self.to
        if to == "auto":
            to = "disk" if device.type == "cpu" else "cpu"
        if to == "cpu" and device.type == "cpu":
            raise ValueError(
                "Offload: to='cpu' moves nothing here, the model already runs on the CPU (allowed here: 'disk', 'auto')"
            )
        if to == "cpu" and (self.emulate or self.direct):
            raise ValueError("Offload: emulate and direct are about files (allowed with to='disk')")
        hot = numbers(self.hot_layers, "Offload: hot_layers")
        if hot and max(hot) >= len(layers):
            raise ValueError(
                f"Offload: hot_layers={self.hot_layers!r} names layer {max(hot)}, the model has {len(layers)} (allowed: 0 to {len(layers) - 1})"
            )
        if to == "disk":
            tier: Tier = DiskTier(device, self.folder, direct=self.direct, speed=1e9 * self.emulate)
        else:
            tier = HostTier(device, pin=self.pin)
        return OffloadState(self, layers, tier, hot)


class OffloadState(PlaceState):
    """Decides what leaves and what is fetched ahead; a :class:`kvlab.place.tier.Tier` does it."""

    def __init__(self, settings: Offload, layers: Sequence[Movable], tier: Tier, hot: set[int]) -> None:
        super().__init__(layers)
        self.settings, self.tier, self.hot = settings, tier, hot
        self._coming: dict[Buffer, Any] = {}

    def record(self, timeline: Timeline | None) -> None:
        self.timeline = self.tier.timeline = timeline

    def fetch(self, layer: int, whole: bool = True) -> None:
        line, item = self.timeline, self.layers[layer]
        began = None if line is None else line.turn(layer)
        waited = False
        if layer not in self.hot:
            away = [buffer for buffer in item.moving() if buffer.away]
            if whole or any(buffer in self._coming for buffer in away):
                waited = bool(away)
                self._bring(away, layer)
        if line is not None and began is not None:
            there = line.ready(layer)
            if waited:
                line.note("stall", layer, began, there)
        self._ahead(layer, whole)

    def _bring(self, away: list[Buffer], layer: int) -> None:
        try:
            for buffer in away:
                self._start(buffer, layer)
            for buffer in away:
                buffer.arrive(self.tier.finish(self._coming.pop(buffer)))
        except torch.OutOfMemoryError as error:
            count = sum(buffer.away * buffer.row_bytes for buffer in away)
            raise torch.OutOfMemoryError(
                f"Offload: no room on the device for the {count:,} bytes of layer {layer} that come back. They still wait where they were; make room "
                "(prefetch less, park other conversations), reset() the cache and read the text again."
            ) from error

    def _start(self, buffer: Buffer, layer: int) -> None:
        if buffer not in self._coming:
            self._coming[buffer] = self.tier.start(buffer, layer)

    def _ahead(self, layer: int, whole: bool) -> None:
        count = len(self.layers)
        for distance in range(1, min(self.settings.prefetch, count - 1) + 1):
            number = (layer + distance) % count
            item = self.layers[number]
            if number in self.hot or (item.page and not (whole and self.layers[layer].page and number > layer)):
                continue  # of a layer that looks pages up nobody knows yet which ones
            with suppress(torch.OutOfMemoryError):  # then it comes when its turn comes
                for buffer in item.moving():
                    if buffer.away:
                        self._start(buffer, number)

    def release(self, layer: int) -> None:
        item = self.layers[layer]
        if layer not in self.hot:
            page = item.page or PAGE
            leaving = []
            buffers = item.moving()
            little = sum(buffer.logical for buffer in buffers) // SMALL
            for buffer in buffers:
                if buffer.logical < little and not buffer.away:
                    self.tier.forget(buffer)  # moving it would take more time than it is worth
                    continue
                first, stop = self._cold(buffer, item.held, page)
                if stop <= first:
                    self.tier.forget(buffer)
                else:
                    self.tier.put(
                        buffer, stop, page, layer
                    )  # write all first: if the disk is full, the whole layer is still here
                    leaving.append((buffer, first, stop))
            for buffer, first, stop in leaving:
                self._coming.pop(buffer, None)  # begun before this step: out of date
                buffer.leave(first, stop - first, self.tier)
        if self.timeline is not None and layer == len(self.layers) - 1:
            self.timeline.rest()  # what comes until the next step is nobody's computing

    def _cold(self, buffer: Buffer, held: int, page: int) -> tuple[int, int]:
        """The rows of a buffer that are to be away, first and behind the last; a row may stand for several tokens (scales)."""
        rows = len(buffer)
        if not rows or not held:
            return 0, 0
        first, hot = (-(-count * min(rows, held) // held) for count in (self.settings.hot_first, self.settings.hot))
        stop = max(0, rows - hot) // page * page
        if buffer.away:
            first, stop = buffer.first, max(stop, buffer.first + buffer.away)
        return first, stop

    @property
    def in_flight(self) -> int:
        return sum(ticket.data.nbytes for ticket in self._coming.values())

    def close(self) -> None:
        self._coming.clear()
        self.tier.close()
