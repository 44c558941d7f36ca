"""Other caches beside kvlab's: bytes counted from the tensors themselves, the same protocol, and what cannot run is said."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import DynamicCache

from kvlab import KVCache, Strategy, keep, store
from kvlab.cache import forward
from kvlab.measure import control, quality
from kvlab.measure.compare import PEERS, Compared, Peer, compare, record, storages
from kvlab.store.base import Store
from kvlab.strategy import methods


@pytest.fixture(scope="module")
def against(tiny_lab):
    ids = torch.randint(3, 97, (1, 200), generator=torch.Generator().manual_seed(0))
    return control(tiny_lab, ids, prefill=150, step=10)


@pytest.mark.parametrize("name", methods("store"))
def test_bytes_are_counted_alike_from_outside_and_inside(llama, name):
    """What `memory()` adds up part by part is what a walk through all tensors finds."""
    method: type[Store] = methods("store")[name]
    cache = KVCache(
        llama, Strategy(keep=keep.Window(size=150, sinks=4) if "evict" in method().offers else keep.Everything(), store=method())
    )
    generator = torch.Generator().manual_seed(0)
    for n in (140, 1, 30):
        forward(llama, torch.randint(3, 97, (1, n), generator=generator), cache)
    assert sum(storages(cache).values()) == cache.memory().allocated


def test_bytes_of_a_dynamic_cache(llama):
    cache = DynamicCache(config=llama.config)
    forward(llama, torch.randint(3, 97, (1, 50)), cache)
    assert sum(storages(cache).values()) == 3 * 2 * 2 * 50 * 16 * 4  # layers, sides, heads, tokens, dim, float32


def test_the_full_caches_agree_and_a_strategy_is_measured_as_ever(tiny_lab, against):
    strategy = Strategy(store=store.Int(bits=4, group_size=16))
    dynamic, static, full, own = compare(tiny_lab, [*PEERS[:2], Strategy(), strategy], against, steps=2)
    for row in (dynamic, static, full):
        assert row.kl < 1e-6 and row.agreement == 1.0 and abs(row.perplexity_change) < 1e-5 and row.step > 0
    assert dynamic.effective_bits == 32.0 and dynamic.bytes == 3 * 2 * 2 * 200 * 16 * 4
    want = quality(tiny_lab, strategy, against)
    assert (own.kl, own.agreement, own.bytes) == (want.mean_kl, want.agreement, want.memory.allocated)
    assert own.effective_bits == pytest.approx(want.memory.effective_bits)


def test_what_cannot_run_is_said(tiny_lab, against, tmp_path):
    def broken(config, room):
        raise NotImplementedError("no such thing here")

    peers = [Peer("absent", broken, "a-library-that-is-not-there"), Peer("broken", broken)]
    absent, failed = compare(tiny_lab, peers, against)
    assert absent.why == "not installed: a-library-that-is-not-there" and failed.why == "NotImplementedError: no such thing here"
    record(tmp_path / "rows.jsonl", [absent, Compared("one", 10.0, 0.5)], tiny_lab, against, "test")
    line = json.loads((tmp_path / "rows.jsonl").read_text())
    assert line["rows"][0]["kl"] is None and line["rows"][1]["effective_bits"] == 8.0 and line["scored"] == 50
    with pytest.raises(ValueError, match="steps=0"):
        compare(tiny_lab, peers, against, steps=0)
