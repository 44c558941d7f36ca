"""What a place did and when: fetches, the waiting for them, the computing between, and writes."""

from __future__ import annotations

import dataclasses
import threading
import time
from dataclasses import dataclass

import torch

KINDS = ("fetch", "stall", "compute", "write")


@dataclass(frozen=True)
class Span:
    """One stretch of time of a layer in a step. ``kind``: "fetch" (bytes on their way in, beside computing), "stall" (the model waits for them),
    "compute" (from the moment a layer's bytes are there to the next layer's turn), "write" (bytes on their way out). ``start``, ``stop``: seconds since the
    recording began. ``bytes``: moved in it.
    """

    kind: str
    layer: int
    step: int
    start: float
    stop: float
    bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.stop - self.start


Mark = float | torch.cuda.Event  # a moment: time.perf_counter(), or when a GPU comes to it


class Timeline:
    """What ``KVCache.timeline()`` records, until ``stop()``. With ``gpu`` moments are those of the current GPU stream."""

    def __init__(self, gpu: bool = False) -> None:
        self.step, self.on, self.gpu = 0, True, gpu
        self._zero = time.perf_counter()
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._later: list[tuple[Span, torch.cuda.Event, torch.cuda.Event]] = []
        self._last_layer = -1
        self._computing: tuple[int, int, Mark] | None = None
        self._event: torch.cuda.Event | None = None
        if gpu:
            torch.cuda.synchronize()
            self._event = self._stamp()
            torch.cuda.synchronize()
            self._zero = time.perf_counter()  # both clocks begin here, within what one synchronization takes

    def stop(self) -> None:
        """Record nothing more."""
        self.on = False

    def mark(self) -> Mark:
        """Now: on the current stream of a GPU, when it comes to it."""
        return self._stamp() if self.gpu else time.perf_counter()

    @staticmethod
    def _stamp() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def note(self, kind: str, layer: int, start: Mark, stop: Mark, bytes: int = 0, step: int | None = None) -> None:
        """Add a span, from any thread."""
        if not self.on:
            return
        span = Span(kind, layer, self.step if step is None else step, 0.0, 0.0, bytes)
        with self._lock:
            if isinstance(start, float) and isinstance(stop, float):
                self._spans.append(dataclasses.replace(span, start=start - self._zero, stop=stop - self._zero))
            else:
                assert not isinstance(start, float) and not isinstance(stop, float)
                self._later.append((span, start, stop))

    def turn(self, layer: int) -> Mark:
        """A layer's turn begins: what went before was the last one's computing; a layer that is not after the last one begins a step."""
        now = self.mark()
        if self._computing is not None:
            last, step, since = self._computing
            self.note("compute", last, since, now, step=step)
            self._computing = None
        if layer <= self._last_layer:
            self.step += 1
        self._last_layer = layer
        return now

    def ready(self, layer: int) -> Mark:
        """A layer's bytes are there, and it computes."""
        now = self.mark()
        self._computing = (layer, self.step, now)
        return now

    def rest(self) -> None:
        """The step is over: what comes until the next turn is nobody's computing."""
        if self._computing is not None:
            self.turn(self._last_layer + 1)
            self._last_layer -= 1

    @property
    def layer(self) -> int:
        """Whose turn it is; -1 before the first."""
        return self._last_layer

    @property
    def spans(self) -> list[Span]:
        """All that was recorded, by start."""
        with self._lock:
            for span, start, stop in self._later:
                assert self._event is not None
                stop.synchronize()
                begin, end = (self._event.elapsed_time(mark) / 1e3 for mark in (start, stop))
                self._spans.append(dataclasses.replace(span, start=begin, stop=end))
            self._later.clear()
            return sorted(self._spans, key=lambda span: span.start)

    def steps(self, first: int = 0, last: int | None = None) -> Timeline:
        """Only the steps from ``first`` to ``last`` (none: all later ones)."""
        part = Timeline()
        part.stop()
        part._spans = [span for span in self.spans if span.step >= first and (last is None or span.step <= last)]
        return part

    def seconds(self, kind: str) -> float:
        """All spans of one kind together. Raises ``ValueError`` for another kind than :data:`KINDS`."""
        return sum(span.seconds for span in self._of(kind))

    def bytes(self, kind: str = "fetch") -> int:
        return sum(span.bytes for span in self._of(kind))

    def _of(self, kind: str) -> list[Span]:
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r} is not one of {', '.join(KINDS)}")
        return [span for span in self.spans if span.kind == kind]

    @property
    def bandwidth(self) -> float:
        """Bytes a second while something was on its way in: bytes fetched over the time in which at least one fetch ran. NaN where nothing was."""
        busy = union([(span.start, span.stop) for span in self._of("fetch")])
        return self.bytes() / busy if busy > 0 else float("nan")

    @property
    def hidden(self) -> float:
        """Of the time that fetching takes, the share that passed beside computing: 1 - stall / fetch. NaN where nothing was fetched."""
        fetch = union([(span.start, span.stop) for span in self._of("fetch")])
        return 1 - min(1.0, self.seconds("stall") / fetch) if fetch > 0 else float("nan")

    @property
    def hideable(self) -> float:
        """The share that could have: of each step's fetching, no more than its computing lasts. NaN where nothing was fetched."""
        could = total = 0.0
        for step in sorted({span.step for span in self.spans}):
            part = self.steps(step, step)
            fetch = union([(span.start, span.stop) for span in part._of("fetch")])
            could, total = could + min(fetch, part.seconds("compute")), total + fetch
        return could / total if total > 0 else float("nan")

    def rows(self) -> list[dict[str, float | int | str]]:
        """The spans as plain rows, for tables."""
        return [dataclasses.asdict(span) for span in self.spans]


def union(spans: list[tuple[float, float]]) -> float:
    """How long at least one of the spans lasts."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        if stop > end:
            total += stop - max(start, end)
            end = stop
    return total
