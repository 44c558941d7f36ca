"""CPU RAM beside a GPU: with a GPU the real thing; without one, the same code on the CPU with streams that do everything at once."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch

from kvlab import KVCache, Strategy, keep, place, store
from kvlab.lab import Lab
from kvlab.measure import place_studies
from kvlab.place.host import HostTier
from kvlab.place.offload import Offload, OffloadState
from kvlab.strategy import numbers
from tests.reference import feed, ours


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)


class Stream:
    def __init__(self, device: object = None) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> Event:
        return Event()


@pytest.fixture
def host(device, monkeypatch):
    """``host(prefetch=1)``: a strategy's place that goes to CPU RAM."""
    if device.type == "cpu":
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", Stream)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "stream", lambda *_: contextlib.nullcontext())
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)

        def state(self: Offload, layers, device):
            return OffloadState(self, layers, HostTier(device, pin=False), numbers(self.hot_layers, ""))

        monkeypatch.setattr(Offload, "state", state)
    return lambda **settings: place.Offload(to="cpu", **settings)


STRATEGIES = [
    {},
    {"keep": keep.HeavyHitter(budget=48, recent=8, sinks=2), "store": store.Int(bits=8, group_size=8)},
    {"keep": keep.Quest(budget=32, page=8, dense=1)},
    {"keep": keep.Quest(budget=32, page=8, dense=0), "store": store.Int(bits=4, group_size=8, key_axis="token")},
]


@pytest.mark.many
@pytest.mark.parametrize("parts", STRATEGIES, ids=str)
@pytest.mark.parametrize("where", [{}, {"prefetch": 2, "hot": 24, "hot_first": 3}, {"hot_layers": "1", "pin": False}], ids=str)
def test_it_is_bit_exact(llama, device, host, parts, where):
    ids = torch.randint(3, 97, (2, 100), generator=torch.Generator().manual_seed(0)).to(device)
    cuts = [40, *range(41, 80), 90, *range(91, 101)]
    want, full = ours(llama, Strategy(**parts), ids, cuts)
    got, cache = ours(llama, Strategy(**parts, place=host(**where)), ids, cuts)
    assert torch.equal(got, want)
    assert cache.memory().logical == full.memory().logical
    away = sum(buffer.away * buffer.row_bytes for layer in cache.layers for buffer in layer.buffers())
    assert away and all(layer.store.keys is not None for layer in cache.layers)


def test_beams_and_crops(llama, device, host):
    ids = torch.randint(3, 97, (2, 60), generator=torch.Generator().manual_seed(0)).to(device)
    caches = [KVCache(llama, Strategy(place=where)) for where in (place.Resident(), host())]
    out = []
    for cache in caches:
        feed(llama, cache, ids[:, :40], [40])
        cache.crop(-7)
        cache.reorder_cache(torch.tensor([1, 0]))
        out.append(feed(llama, cache, ids[:, 40:], list(range(1, 21))))
    assert torch.equal(*out)


def test_only_what_is_new_leaves(llama, device, host):
    """Each page goes out once; what is fetched is what waits there."""
    cache = KVCache(llama, Strategy(place=host(prefetch=0)))
    if device.type == "cpu":
        cache.device = torch.device("cuda")  # so that moments are a GPU's
    feed(llama, cache, torch.full((1, 33), 5, device=device), [33])
    line = cache.timeline()
    assert line.gpu
    for _ in range(16):
        feed(llama, cache, torch.full((1, 1), 6, device=device), [1])
    row = 2 * 16 * llama.dtype.itemsize
    writes = [span for span in line.spans if span.kind == "write"]
    assert {span.bytes for span in writes} == {16 * row} and len(writes) == 3 * 2  # token 48: layers, keys and values
    assert line.bytes() == 2 * 3 * row * (15 * 32 + 48)
    own = [span for span in line.spans if span.kind == "compute"]
    assert len(own) == 16 * 3 and all(span.seconds >= 0 for span in line.spans)


def test_the_study_for_a_gpu_has_a_row_for_each_way(llama, host, monkeypatch):
    """What `make gpu` runs, on a tiny model."""
    monkeypatch.setattr(place_studies, "copy_rate", lambda device, pinned: 1e9)
    rows = list(place_studies.overlap_gpu(Lab("tiny", llama, None), lambda _: None, tokens=64, steps=2))
    names = [f"{how}, {ahead} ahead" for how in ("pinned", "pageable") for ahead in (0, 1, 2)]
    assert [row["name"] for row in rows] == names
    row = 2 * 2 * 16 * llama.dtype.itemsize * 3  # keys and values, heads, dim, layers
    assert {row["bytes"] for row in rows[::3]} == {64 * row} and all(row["step"] > 0 for row in rows)


def test_a_gpu_has_no_emulated_link(llama):
    with pytest.raises(ValueError, match="emulate and direct are about files"):
        place.Offload(to="cpu", emulate=1.0).state(KVCache(llama).layers, torch.device("cuda"))
