"""Where keeps met something unusual and went wrong once: padding, models without RoPE, windows of the model's own, steps that fail."""

from __future__ import annotations

import pytest
import torch
import transformers

from kvlab import KVCache, Strategy, UnsupportedModel, keep, store
from kvlab.cache import forward, ropes
from kvlab.lab import Lab
from kvlab.measure.river import river
from tests import zoo
from tests.panels.conftest import Characters
from tests.reference import ours


def some(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 97, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def test_padding_of_another_row_changes_no_expectation():
    model, strategy = zoo.model("llama"), Strategy(keep=keep.ExpectedAttention(budget=20, sinks=2))
    both, padding = some(2, 60, 4), torch.ones(2, 60, dtype=torch.long)
    padding[1, :16] = 0
    cuts = [36, *range(40, 61, 4)]
    together, cache = ours(model, strategy, both, cuts, padding)
    assert cache.layers[0].remembered.count.view().flatten().tolist() == [56, 40]  # the first four of each text apart
    for row in range(2):
        first = 16 * row
        alone, _ = ours(model, strategy, both[row : row + 1, first:], [stop - first for stop in cuts])
        assert (together[row, first:] - alone[0]).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["GPTJ", "CodeGen"])
def test_a_table_of_sines_is_a_rotary_turn(name):
    config = getattr(transformers, f"{name}Config")(
        vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=256, n_ctx=256, rotary_dim=8, bos_token_id=1, eos_token_id=2
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    found = ropes(model)
    assert all(rope is not None and rope.interleaved and rope.dims == 8 for rope in found)
    assert found[0].frequencies.allclose(10000.0 ** (-torch.arange(4) / 4), rtol=1e-4)


def test_in_cache_positions_need_a_model_that_turns_its_keys():
    strategy = Strategy(keep=keep.Window(size=8, sinks=4, positions="cache"))
    for name in ("gpt2", "opt"):
        with pytest.raises(UnsupportedModel, match="does not turn its keys by position"):
            KVCache(zoo.model(name), strategy)
    logits, _ = ours(zoo.model("llama4"), strategy, some(1, 40), list(range(4, 41, 4)))  # layers without positions need no turn
    assert logits.isfinite().all()


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gemma3n", "llama4"])
def test_the_full_cache_loses_no_attention(name):
    made = river(Lab(name, zoo.model(name), Characters()), Strategy(), some(1, 60), prefill=30, step=4)
    assert made.lost.abs().max() == 0 and 0 < float(made.sinks.mean()) < 1


def test_what_inner_protects_counts_as_protected():
    talk = [("system", 4), ("user", 3), ("assistant", 10), ("user", 3), ("assistant", 10), ("user", 3), ("assistant", 6)]
    cache = KVCache(zoo.model("llama"), Strategy(keep=keep.Conversation(budget=25, inner=keep.HeavyHitter(recent=20, sinks=0))))
    for role, tokens in talk:
        cache.annotate(role, tokens)
    with pytest.raises(ValueError, match="room for 25 tokens, but 29 are protected"):
        forward(cache.model, some(1, 39), cache)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("gemma3", keep.Conversation(budget=10, inner=keep.HeavyHitter(recent=0, sinks=0))),
        ("llama", keep.PyramidKV(keep.Conversation(budget=30, inner=keep.HeavyHitter(recent=0, sinks=0)), beta=20)),
    ],
)
def test_a_refusal_comes_before_any_layer(name, method):
    model = zoo.model(name)
    cache = KVCache(model, Strategy(keep=method))
    cache.annotate("system", 4)
    cache.annotate("user", 20)
    cache.annotate("assistant", 15)
    with pytest.raises(ValueError, match="are protected"):
        forward(model, some(1, 39), cache)
    assert {layer.seen for layer in cache.layers} == {0}


def test_bytes_that_are_too_few_are_said_before_any_layer():
    cache = KVCache(zoo.model("llama"), Strategy(keep=keep.HeavyHitter(budget="3 KB")))
    for _ in range(2):
        with pytest.raises(ValueError, match="has room for 3 tokens in each of 3 layers"):
            forward(cache.model, some(1, 40), cache)
    assert {layer.seen for layer in cache.layers} == {0}


def test_a_step_that_failed_while_it_was_written_down_is_not_taken_for_done(monkeypatch):
    cache = KVCache(zoo.model("llama"), Strategy(keep=keep.HeavyHitter(budget=20, recent=4)))
    forward(cache.model, some(1, 30), cache)
    last = cache.layers[-1]
    monkeypatch.setattr(type(last), "_select", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()) if _[0] is last else None)
    with pytest.raises(KeyboardInterrupt):
        forward(cache.model, some(1, 1), cache)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"failed while layer 2 was written down. reset\(\) the cache"):
        forward(cache.model, some(1, 1), cache)
    cache.reset()
    forward(cache.model, some(1, 30), cache)


@pytest.mark.parametrize(
    ("name", "method", "least"),
    [
        ("llama", keep.ExpectedAttention(budget="60000 B"), 0.9),
        ("llama", keep.Merge(keep.HeavyHitter(budget="60000 B")), 0.9),
        ("gemma3", keep.HeavyHitter(budget="20000 B", recent=8), 0.9),
    ],
    ids=str,
)
def test_bytes_are_held_to_by_all_that_is_remembered(name, method, least):
    """Layers with a window of the model's own apart: they are no part of the budget."""
    cache = KVCache(zoo.model(name), Strategy(keep=method))
    for start in range(0, 320, 32):
        forward(cache.model, some(1, 320)[:, start : start + 32], cache)
    own = [layer for layer in cache.layers if type(layer.keep).__name__ != "Visible"]
    size = sum(buffer.allocated for layer in own for buffer in layer.buffers())
    wanted = int(method.budget.split()[0]) if hasattr(method, "budget") else 60_000
    assert least * wanted <= size <= 1.06 * wanted


def test_cropping_forgets_who_spoke_in_what_is_gone():
    cache = KVCache(zoo.model("llama"))
    cache.annotate("system", 4)
    cache.annotate("user", 3)
    forward(cache.model, some(1, 7), cache)
    cache.crop(-3)
    cache.annotate("assistant", 3)
    forward(cache.model, some(1, 3), cache)
    assert cache.spoken(7)[0].tolist() == [0, 0, 0, 0, 2, 2, 2]


def test_half_precision_does_not_overflow_where_scaled_queries_would_not():
    model = zoo.model("llama")
    import copy

    large = copy.deepcopy(model)
    with torch.no_grad():
        for layer in large.model.layers:
            layer.self_attn.q_proj.weight *= 40
            layer.self_attn.k_proj.weight *= 40
    large = large.half()
    logits, _ = ours(large, Strategy(store=store.Dense()), some(1, 30), [10, 20, 30])
    assert logits.isfinite().all()


def test_padding_says_nothing_of_its_page():
    """One page of padding before the second row: it chooses the pages that it chooses alone."""
    model, both, padding = zoo.model("llama"), some(2, 72, 3), torch.ones(2, 72, dtype=torch.long)
    strategy = Strategy(keep=keep.Quest(budget=16, page=8, dense=0))
    padding[1, :8] = 0
    cuts = [40, *range(41, 73)]
    together, cache = ours(model, strategy, both, cuts, padding)
    alone, own = ours(model, strategy, both[1:, 8:], [stop - 8 for stop in cuts])
    assert (together[1, 8:] - alone[0]).abs().max() < 1e-5
    for name in ("least", "largest"):
        pages, mine = (getattr(c.layers[1].remembered, name).view() for c in (cache, own))
        torch.testing.assert_close(pages[1, :, 1:], mine[0], rtol=1e-3, atol=1e-3)
        assert float(pages[1, :, 0].abs().min()) == 65504  # a bound that nothing can reach
