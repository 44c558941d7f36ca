"""Other caches beside kvlab's: bytes counted from the tensors themselves, the same protocol, and what cannot run is said."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import DynamicCache

from kvlab import KVCache, Strategy, keep, store
from kvlab.cache import forward
from kvlab.measure import control, quality
from kvlab.measure.compare import Compared, compare, record, storages
from kvlab.measure.peers import PEERS, Peer
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


def by_name(begin: str) -> Peer:
    return next(peer for peer in PEERS if peer.name.startswith(begin))


def test_sliding_layers_of_transformers_are_a_window_without_sinks(tiny_lab):
    """Two ways to the same cache: theirs forgets by its own layers, ours by `keep.Window`; a token sees the 255 before it."""
    ids = torch.randint(3, 97, (1, 400), generator=torch.Generator().manual_seed(1))
    against = control(tiny_lab, ids, prefill=300, step=10)
    theirs, ours = compare(
        tiny_lab, [by_name("DynamicCache, sliding"), Strategy(keep=keep.Window(size=255, sinks=0))], against, steps=1
    )
    assert theirs.why == "" and theirs.kl == pytest.approx(ours.kl, rel=1e-4) and theirs.kl > 0.001
    assert theirs.agreement == ours.agreement


def test_offloading_of_transformers_needs_a_gpu(tiny_lab, against):
    (row,) = compare(tiny_lab, [by_name("DynamicCache, offloaded")], against)
    assert torch.cuda.is_available() or row.why == "needs a GPU, and there is none"


def test_a_press_takes_tokens_and_positions_go_on(tiny_lab, against, monkeypatch):
    """A press of our own that keeps the newest fifth of the prompt: afterwards masks and positions are those of a text whose beginning nobody sees."""
    import sys
    from contextlib import contextmanager
    from types import SimpleNamespace

    class Newest:
        def __init__(self, compression_ratio):
            self.share = 1 - compression_ratio

        def forward_hook(self, module, args, kwargs, output):
            layer, new = kwargs["past_key_values"].layers[module.layer_idx], kwargs["hidden_states"].shape[1]
            if int(kwargs["cache_position"][-1]) + 1 == new:
                kept = round(self.share * new)
                layer.keys, layer.values = layer.keys[:, :, -kept:], layer.values[:, :, -kept:]
            return output

        @contextmanager
        def __call__(self, model):
            hooks = [layer.self_attn.register_forward_hook(self.forward_hook, with_kwargs=True) for layer in model.model.layers]
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()

    monkeypatch.setitem(sys.modules, "kvpress", SimpleNamespace(RandomPress=Newest))
    monkeypatch.setattr(Peer, "missing", "")
    (row,) = compare(tiny_lab, [by_name("kvpress RandomPress")], against, steps=1)
    assert row.why == "" and row.bytes == 3 * 2 * 2 * (30 + 50) * 16 * 4
    from tests.reference import masked_llama

    def allowed(layer, scores):  # the last 50 tokens do not see the first 120
        n = scores.shape[-1]
        see = torch.ones(n, n, dtype=torch.bool).tril()
        see[150:, :120] = False
        return see.expand_as(scores)

    logits = masked_llama(tiny_lab.model, against.ids, allowed)[149:199].float()
    full = against.logits.log_softmax(-1)
    want = (full.exp() * (full - logits.log_softmax(-1))).sum(-1).mean()
    assert row.kl == pytest.approx(float(want.detach()), rel=1e-3)


@pytest.mark.nightly
def test_kvpress_itself(tiny_lab, against):
    pytest.importorskip("kvpress")
    for row in compare(tiny_lab, [peer for peer in PEERS if peer.needs == "kvpress"], against, steps=1):
        assert row.why == "" and row.bytes == 3 * 2 * 2 * (int(150 * (1 - 0.8)) + 50) * 16 * 4, row
    assert compare(tiny_lab, [Strategy()], against, steps=1)[0].kl < 1e-6  # it wrapped our attention; that goes on as before
