"""Where the time of a cache goes: writing tokens down, reading them, choosing who stays, bringing bytes back."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvlab import attention
from kvlab.layer import Layer
from kvlab.place.offload import OffloadState


@dataclass
class Phases:
    """Seconds. ``read``: attention over what is stored, in which codes become numbers in registers: dequantizing cannot be told apart from it. ``write``:
    appending and quantizing. ``select``: judging and dropping, repacks included. ``fetch``: bringing layers to the compute device and putting them away.

    Of the thread that ran the model; on a GPU this is the time to launch, not to compute.
    """

    read: float = 0.0
    write: float = 0.0
    select: float = 0.0
    fetch: float = 0.0


class _Clock:
    """One thread's measurement: what it spent, and for each call that is open what was spent under another name within."""

    def __init__(self) -> None:
        self.spent, self.inside = Phases(), list[float]()

    def run(self, name: str, plain: Callable[..., Any], args: Any, options: Any) -> Any:
        start = time.perf_counter()
        self.inside.append(0.0)
        try:
            return plain(*args, **options)
        finally:
            took = time.perf_counter() - start
            setattr(self.spent, name, getattr(self.spent, name) + took - self.inside.pop())
            if self.inside:
                self.inside[-1] += took


_lock = threading.Lock()
_clocks: dict[int, _Clock] = {}  # by thread; the parts are watched while there is any
_plain: list[tuple[Any, str, Any]] = []


@contextlib.contextmanager
def phases() -> Iterator[Phases]:
    """``with phases() as spent:`` — what caches spend inside, in this thread; other threads may measure beside it. ``RuntimeError`` where this one does already."""
    thread, clock = threading.get_ident(), _Clock()
    with _lock:
        if thread in _clocks:
            raise RuntimeError("phases() is already on in this thread: one measurement at a time")
        if not _clocks:
            for owner, attribute, name in _PARTS:
                plain = getattr(owner, attribute)
                _plain.append((owner, attribute, plain))
                setattr(owner, attribute, _watched(name, plain))
        _clocks[thread] = clock
    try:
        yield clock.spent
    finally:
        with _lock:
            del _clocks[thread]
            while not _clocks and _plain:
                owner, attribute, plain = _plain.pop()
                setattr(owner, attribute, plain)


def _watched(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(*args: Any, **options: Any) -> Any:
        clock = _clocks.get(threading.get_ident())
        return plain(*args, **options) if clock is None else clock.run(name, plain, args, options)

    return call


_PARTS: list[tuple[Any, str, str]] = [
    (attention, "attend", "read"),
    (Layer, "_commit", "write"),
    (Layer, "_select", "select"),
    (Layer, "_priority", "select"),
    (Layer, "_survivors", "select"),
    (OffloadState, "fetch", "fetch"),
    (OffloadState, "release", "fetch"),
]
