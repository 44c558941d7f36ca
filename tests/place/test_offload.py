"""Offloading moves bytes and changes nothing: bit for bit, with the bytes really away, and nothing left behind."""

import os
import subprocess
import sys

import pytest
import torch

from kvlab import KVCache, Strategy, keep, place, store
from kvlab.cache import forward
from kvlab.place.offload import PREFIX, sweep
from tests.reference import feed, ours

STRATEGIES = [
    {},
    {"keep": keep.HeavyHitter(budget=16, recent=4, sinks=2)},
    {"store": store.Int(bits=4, group_size=8)},
    {"keep": keep.HeavyHitter(budget=16, recent=8, sinks=2), "store": store.Int(bits=8, group_size=8)},
]


@pytest.mark.parametrize("parts", STRATEGIES, ids=lambda p: "+".join(type(v).__name__ for v in p.values()) or "dense")
@pytest.mark.parametrize("to", ["auto", "disk"])
def test_offload_is_bit_exact_over_200_steps(llama, device, parts, to):
    if to == "auto" and device.type == "cpu" and parts:
        pytest.skip("without a GPU the same as 'disk'")
    ids = torch.randint(3, 97, (2, 240), generator=torch.Generator().manual_seed(0)).to(device)
    cuts = [40, *range(41, 241)]
    want, _ = ours(llama, Strategy(**parts), ids, cuts)
    got, cache = ours(llama, Strategy(**parts, place=place.Offload(to=to)), ids, cuts)
    assert torch.equal(got, want)
    away = "disk" if to == "disk" or device.type == "cpu" else "cpu"
    assert set(cache.memory().by_device()) == {away}


def test_the_device_holds_one_layer_at_a_time(llama, device, ids):
    _resident, full = ours(llama, Strategy(), ids, [40])
    _away, cache = ours(llama, Strategy(place=place.Offload(to="disk")), ids, [40])
    one = full.memory().allocated // 3
    assert cache.high_water <= 2.1 * one < full.high_water


def test_cpu_to_cpu_is_refused(llama, device):
    if device.type != "cpu":
        pytest.skip("the model is on a GPU")
    with pytest.raises(ValueError, match="to='cpu' moves nothing here"):
        KVCache(llama, Strategy(place=place.Offload(to="cpu")))


def test_a_folder_that_cannot_be_written(llama, tmp_path):
    missing = tmp_path / "nowhere"
    with pytest.raises(OSError, match="cannot write in the folder"):
        KVCache(llama, Strategy(place=place.Offload(to="disk", folder=str(missing))))


def test_a_full_disk_loses_nothing(llama, ids, tmp_path, monkeypatch):
    """The write fails, the error says so, and the tokens are still there when there is room again."""
    strategy = Strategy(place=place.Offload(to="disk", folder=str(tmp_path)))
    want, _ = ours(llama, Strategy(), ids, [20, 40])
    cache = KVCache(llama, strategy)
    first = feed(llama, cache, ids, [20])
    real = os.replace
    calls = iter(range(1000))

    def full(*args):
        if next(calls) >= 1:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="nothing is lost"):
        forward(llama, ids[:, 20:40], cache)
    monkeypatch.setattr(os, "replace", real)
    assert all(b.data is not None for b in cache.layers[0].buffers() if b.rows)
    assert not list(tmp_path.rglob("*.new"))
    assert torch.equal(first, want[:, :20])


def test_files_go_with_the_cache(llama, ids, tmp_path):
    cache = KVCache(llama, Strategy(place=place.Offload(to="disk", folder=str(tmp_path))))
    feed(llama, cache, ids, [40])
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith(PREFIX) and oct(folder.stat().st_mode)[-3:] == "700"
    assert sum(f.stat().st_size for f in folder.iterdir()) == cache.memory().allocated
    del cache
    assert not list(tmp_path.iterdir())


def test_folders_of_crashed_processes_are_swept(tmp_path):
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    dead = tmp_path / f"{PREFIX}{done.pid}-x"
    alive = tmp_path / f"{PREFIX}{os.getpid()}-x"
    other = tmp_path / "kvlab-notes"
    for folder in (dead, alive, other):
        folder.mkdir()
    sweep(tmp_path)
    assert not dead.exists() and alive.exists() and other.exists()
