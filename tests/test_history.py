"""What left, when and why, against what the cache holds after each step."""

from __future__ import annotations

import math

import pytest
import torch

from kvlab import KVCache, Strategy, keep, store
from kvlab.cache import forward
from kvlab.measure.river import attended, river
from tests import zoo
from tests.panels.conftest import tiny_lab  # noqa: F401


@pytest.mark.many
@pytest.mark.parametrize("step", [1, 7, 60])
@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(keep=keep.Window(size=10, sinks=2)),
        Strategy(keep=keep.HeavyHitter(budget=14, recent=4, sinks=2)),
        Strategy(keep=keep.HeavyHitter(budget=24, recent=4, sinks=2, every=4), store=store.Int(bits=8, group_size=8)),
        Strategy(keep=keep.PyramidKV(keep.SnapKV(budget=14, recent=4), beta=2)),
        Strategy(keep=keep.Merge(keep.KeyNorm(budget=14, recent=4))),
        Strategy(),
    ],
    ids=str,
)
def test_it_knows_what_is_held_after_every_step(strategy, step):
    model = zoo.model("llama")
    cache, length = KVCache(model, strategy), 60
    history = cache.history()
    ids = torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(0))
    held = []
    for start in range(0, length, step):
        forward(model, ids[:, start : start + step], cache)
        held.append((cache.get_seq_length(), [layer.dense()[2][0].expand(2, -1).clone() for layer in cache.layers]))
    assert history is cache.history()
    for layer in range(3):
        gone, worth, floor = (table(layer, length, 2) for table in (history.gone, history.worth, history.floor))
        for time, columns in held:
            for head in range(2):
                alive = [c for c in range(time) if gone[head, c] == 0 or gone[head, c] > time]
                assert alive == columns[layer][head].tolist()
        assert torch.equal(worth.isnan(), gone == 0)
        left = gone > 0
        if isinstance(strategy.store, store.Dense):  # of codes, as many must go in every head
            assert (worth[left] <= floor[left]).all()  # whoever left was worth no more than any that stayed


def test_padding_leaves_first_and_is_told_so():
    model = zoo.model("llama")
    cache = KVCache(model, Strategy(keep=keep.HeavyHitter(budget=14, recent=4, sinks=2)))
    history = cache.history()
    padding = torch.ones(1, 30, dtype=torch.long)
    padding[:, :5] = 0
    forward(model, torch.full((1, 30), 9), cache, padding)
    assert (history.gone(0, 30, 2)[:, :5] == 30).all() and (history.worth(0, 30, 2)[:, :5] == -math.inf).all()
    with pytest.raises(ValueError, match="layer=3 is out of range"):
        history.gone(3, 10)


def test_a_river_by_hand(tiny_lab):  # noqa: F811
    """A window of 8 and 2 sinks, 12 tokens at once and then 4 at a time: token 2 left when 12 had been read, 3 too; 4 to 7 at 16."""
    lab = tiny_lab
    ids = torch.randint(3, 97, (1, 24), generator=torch.Generator().manual_seed(0))
    made = river(lab, Strategy(keep=keep.Window(size=8, sinks=2)), ids, prefill=12, step=4)
    full = attended(lab, ids, prefill=12, step=4)
    again = river(lab, Strategy(keep=keep.Window(size=8, sinks=2)), ids, prefill=12, step=4, full=full)
    assert torch.equal(again.lost, made.lost) and torch.equal(again.sinks, made.sinks)
    with pytest.raises(ValueError, match="allowed: the same text, 11 and 4"):
        river(lab, Strategy(), ids, prefill=11, step=4, full=full)
    assert made.tokens == 24 and made.heads == 6 and made.times.tolist() == [12, 16, 20, 24]
    assert made.gone[1, 0].tolist() == [0, 0, 12, 12, 16, 16, 16, 16, 20, 20, 20, 20, 24, 24, 24, 24] + [0] * 8
    assert made.held(16).sum().item() == 6 * 10 and made.survival().allclose(torch.tensor(10 / 24))
    shares = made.held(16).float().mean((0, 1))
    assert shares.tolist() == [1, 1, 0, 0, 0, 0, 0, 0, *[1] * 8, *[0] * 8]
    assert made.overlap().allclose(torch.ones(3, 3)) and made.reach().allclose(torch.tensor((23 + 22 + sum(range(8))) / 10))
    assert made.left(2) == [(layer, head, 12, 2.0, math.inf) for layer in range(3) for head in range(2)] and made.left(1) == []
    # lost attention of query 17 (tokens 2 to 7 were gone when it came), from transformers' own weights
    from kvlab.attention import detach

    detach(lab.model)
    before = lab.model.config._attn_implementation
    lab.model.set_attn_implementation("eager")
    weights = lab.model(ids, output_attentions=True).attentions
    lab.model.set_attn_implementation(before)
    for layer in range(3):
        for query, gone in ((17, slice(2, 8)), (11, slice(0, 0)), (12, slice(2, 4)), (23, slice(2, 12))):
            want = weights[layer][0, :, query, gone].sum(-1).view(2, 2).mean(1)
            assert (made.lost[layer, :, query] - want).abs().max() < 1e-6
        share = weights[layer][0, :, :, :4].sum(-1).mean(1).view(2, 2).mean(1)
        assert (made.sinks[layer] - share).abs().max() < 1e-6
    with pytest.raises(ValueError, match="token=24 is out of range"):
        made.left(24)
    with pytest.raises(ValueError, match=r"has 1 token\(s\)"):
        river(lab, Strategy(), ids[:, :1])
