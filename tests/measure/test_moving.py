"""A cache that was filled is the cache that read, and what was moved is what was counted."""

from __future__ import annotations

import pytest
import torch

from kvlab import KVCache, Strategy, keep, place, store
from kvlab.cache import forward
from kvlab.lab import Lab
from kvlab.measure import inspect
from kvlab.measure.moving import fill, moved
from kvlab.measure.place_studies import disk_rate
from tests.panels.conftest import Characters


@pytest.fixture
def lab(llama):
    return Lab("tiny", llama, Characters())


@pytest.fixture
def ids():
    return torch.randint(3, 97, (1, 70), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(),
        Strategy(store=store.Int(bits=4, group_size=8), place=place.Offload()),
        Strategy(keep=keep.Quest(budget=0.5, page=8, dense=1), place=place.Offload(prefetch=0)),
        Strategy(keep=keep.Window(size=20, sinks=2)),
    ],
    ids=str,
)
def test_filling_is_reading_without_computing(lab, ids, strategy):
    want, got = KVCache(lab.model, strategy), KVCache(lab.model, strategy)
    forward(lab.model, ids, want)
    fill(got, inspect.record(lab, ids).layers)
    for _ in range(4):
        torch.testing.assert_close(
            forward(lab.model, ids[:, :1], got), forward(lab.model, ids[:, :1], want), rtol=1e-4, atol=1e-5
        )
    assert got.memory().parts == want.memory().parts


def test_bytes_are_those_of_the_pages(lab, ids):
    layers = inspect.record(lab, ids[:, :64]).layers
    page = 16 * 2 * 2 * 16 * 4  # tokens, keys and values, heads, dim, float32: of one layer
    made = moved(lab, Strategy(place=place.Offload(prefetch=0)), layers, steps=3)
    assert made.tokens == 64 + 2 + 3 and made.bytes == 3 * 4 * page and len(made.seconds) == 3
    assert made.line.steps(3).spans == [] and made.resident < made.cache and made.high_water < made.cache
    assert moved(lab, Strategy(place=place.Offload(prefetch=0, hot=32)), layers, steps=3).bytes == 3 * 2 * page
    assert moved(lab, Strategy(place=place.Offload(prefetch=0, hot_layers="0-1")), layers, steps=3).bytes == 4 * page
    assert moved(lab, Strategy(), layers, steps=3).bytes == 0
    half = moved(lab, Strategy(keep=keep.Quest(budget=0.5, dense=0), place=place.Offload()), layers, steps=3)
    # of five pages three are read: the newest, which is not full and stays here, and two more
    assert half.bytes == 3 * 2 * page


def test_what_cannot_be_filled_is_said(lab, ids):
    layers = inspect.record(lab, ids).layers
    for method in (keep.HeavyHitter(budget=32, recent=8), keep.ExpectedAttention(budget=32)):
        with pytest.raises(ValueError, match="judges by"):
            fill(KVCache(lab.model, Strategy(keep=method)), layers)
    cache = KVCache(lab.model)
    with pytest.raises(ValueError, match="keys and values of 2 layers, the model has 3"):
        fill(cache, layers[:2])
    fill(cache, layers)
    with pytest.raises(ValueError, match="has read 70 tokens"):
        fill(cache, layers)
    for wrong, words in [
        ([(keys[..., :8], values) for keys, values in layers], "layer 0 has keys and values"),
        ([(keys.half(), values) for keys, values in layers], "layer 0 has keys and values"),
        ([layers[0], layers[1], (layers[2][0][:, :, :9], layers[2][1][:, :, :9])], "one number of tokens"),
        ([(keys[:, :, :0], values[:, :, :0]) for keys, values in layers], "none of them 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            fill(KVCache(lab.model), wrong)
    with pytest.raises(ValueError, match="steps='a'"):
        moved(lab, Strategy(), layers, steps="a")
    with pytest.raises(ValueError, match="steps=0"):
        moved(lab, Strategy(), layers, steps=0)


def test_files_are_read_in_two_ways(tmp_path):
    (tmp_path / "0").write_bytes(bytes(2 << 20))
    (tmp_path / "small").write_bytes(bytes(10))
    try:
        rate = disk_rate(tmp_path)
    except Exception as error:
        pytest.skip(f"no direct reads here: {error}")
    assert 1e6 < rate < 1e11
