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


_lock = threading.Lock()


@contextlib.contextmanager
def phases() -> Iterator[Phases]:
    """``with phases() as spent:`` — what caches of this process spend inside, in this thread. Not twice at once (``RuntimeError``)."""
    if not _lock.acquire(blocking=False):
        raise RuntimeError("phases() is already on: one measurement at a time")
    spent, thread = Phases(), threading.get_ident()
    inside: list[float] = []

    def timed(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def call(*args: Any, **options: Any) -> Any:
            if threading.get_ident() != thread:
                return plain(*args, **options)
            start = time.perf_counter()
            inside.append(0.0)  # what is spent under another name within
            try:
                return plain(*args, **options)
            finally:
                took = time.perf_counter() - start
                own = took - inside.pop()
                setattr(spent, name, getattr(spent, name) + own)
                if inside:
                    inside[-1] += took

        return call

    patched: list[tuple[Any, str, Any]] = []
    try:
        for owner, attribute, name in _PARTS:
            plain = getattr(owner, attribute)
            patched.append((owner, attribute, plain))
            setattr(owner, attribute, timed(name, plain))
        yield spent
    finally:
        for owner, attribute, plain in reversed(patched):
            setattr(owner, attribute, plain)
        _lock.release()


_PARTS: list[tuple[Any, str, str]] = [
    (attention, "attend", "read"),
    (Layer, "_commit", "write"),
    (Layer, "_select", "select"),
    (Layer, "_priority", "select"),
    (Layer, "_survivors", "select"),
    (OffloadState, "fetch", "fetch"),
    (OffloadState, "release", "fetch"),
]
