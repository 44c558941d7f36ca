"""Merging: folds against loops in float64, and attention over merged tokens against its formula."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvlab import KVCache, Strategy, attention, keep, place, store
from kvlab.cache import forward
from kvlab.keep.base import Held
from kvlab.keep.random import chance
from tests.conftest import make_llama

B, H, N, D, STAY = 2, 2, 14, 8, 6


def some_held(padded: int = 0) -> tuple[Held, Tensor, Tensor]:
    """What a layer holds, who stays, and how many tokens each row stands for."""
    torch.manual_seed(0)
    keys, values = torch.randn(B, H, N, D), torch.randn(B, H, N, D)
    keys[:, :, 9] = keys[:, :, 2] + 0.05 * torch.randn(B, H, D)  # two that are alike
    columns = torch.arange(N).view(1, 1, N)
    positions = columns.expand(B, 1, N) - torch.tensor([0, padded]).view(B, 1, 1)
    stay = torch.stack([torch.randperm(N - padded)[:STAY].sort().values + padded for _ in range(B * H)]).view(B, H, STAY)
    counts = torch.randint(1, 4, (B, H, N)).float()
    evidence = torch.rand(B, H, N)
    return Held(columns, positions, N, evidence, lambda: keys.clone(), lambda: values.clone()), stay, counts


def folded(how: str, held: Held, stay: Tensor, first: int, counts: Tensor, threshold: float, spread: int) -> list[Tensor]:
    """The same, a token at a time."""
    keys, values = held.keys().double(), held.values().double()
    out = [x.gather(2, stay[..., None].expand(-1, -1, -1, D)).clone() for x in (keys, values)]
    number = counts.double().gather(2, stay).clone()
    for b in range(B):
        for h in range(H):
            kept = stay[b, h].tolist()
            gone = [j for j in range(N) if j not in kept and held.positions[b, 0, j] >= 0]
            may = [i for i, j in enumerate(kept) if j >= first and held.positions[b, 0, j] >= 0]
            joins: dict[int, list[tuple[int, float]]] = {}
            for j in gone:
                cosine = [float(torch.cosine_similarity(keys[b, h, j], keys[b, h, kept[i]], dim=0)) for i in may]
                if not may:
                    continue
                if how == "cam":
                    after = [i for i in may if kept[i] > j][:spread]
                    if after:
                        mean = sum(float(held.evidence[b, h, kept[i]]) / (N - kept[i]) for i in after) / len(after)
                        if float(chance(torch.tensor(j), 0)) < float(held.evidence[b, h, j]) / (N - j) / mean:
                            for i in after:
                                out[1][b, h, i] += values[b, h, j] / len(after)
                elif how == "d2o":
                    at = max(range(len(may)), key=cosine.__getitem__)
                    if cosine[at] >= threshold:
                        joins.setdefault(may[at], []).append((j, math.exp(cosine[at] - 1)))
                else:
                    at = min(range(len(may)), key=lambda at: abs(kept[may[at]] - j))
                    if cosine[at] >= threshold:
                        joins.setdefault(may[at], []).append(
                            (j, float((keys[b, h, j] - keys[b, h, kept[may[at]]]).square().sum()))
                        )
            if how == "clusters":
                every = [distance for group in joins.values() for _, distance in group]
                wide = sum(every) / max(1, len(every))
                joins = {i: [(j, math.exp(-distance / (2 * wide))) for j, distance in group] for i, group in joins.items()}
            for i, group in joins.items():
                own = float(counts[b, h, kept[i]])
                weights = [weight * float(counts[b, h, j]) for j, weight in group]
                for x, y in ((out[0], keys), (out[1], values)):
                    x[b, h, i] = (
                        own * y[b, h, kept[i]] + sum(w * y[b, h, j] for w, (j, _) in zip(weights, group, strict=True))
                    ) / (own + sum(weights))
                number[b, h, i] = own + sum(float(counts[b, h, j]) for j, _ in group)
    return [*out, number]


@pytest.mark.parametrize("how", ["d2o", "clusters", "cam"])
@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize("padded", [0, 3])
def test_folding_equals_its_definition(how, first, padded):
    held, stay, counts = some_held(padded)
    got = keep.Merge(how=how, threshold=0.1, spread=3).fold(held, stay, first, counts)
    want = folded(how, held, stay, first, counts, 0.1, 3)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() < 1e-5
    before = held.values().gather(2, stay[..., None].expand(-1, -1, -1, D))
    assert (got[1] != before).any(), "nothing was merged, so nothing was tested"
    written = (stay < first)[..., None]
    assert torch.equal(got[1].masked_select(written), before.masked_select(written))


def test_equal_tokens_merge_without_loss():
    """Attention over one token with count 3 equals attention over the three equal tokens it stands for."""
    model = make_llama()
    cache = KVCache(model, Strategy(keep=keep.Merge(keep.HeavyHitter(budget=8, recent=2, sinks=2), threshold=-1.0)))
    ids = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(0))
    forward(model, ids, cache)
    layer = cache.layers[1]
    keys, values, _ = layer.dense()
    counts = layer.counts.view()
    assert counts.sum(2).eq(20).all() and counts.gt(1).any()  # whatever went is counted where it went
    new = torch.randn(2, 2, 1, 16)
    query = torch.randn(2, 4, 1, 16)
    layer.new_keys, layer.new_values, layer.seen = new, new, layer.seen + 1
    rule = attention.Rule(attention.causal_mask_function, None, {})
    out, _, _ = attention.attend(layer, query, rule, 0.25)
    for b in range(2):
        for head in range(4):
            kv = head // 2
            times = [*counts[b, kv].long().tolist(), 1]
            k = torch.cat([keys[b, kv], new[b, kv]]).double().repeat_interleave(torch.tensor(times), 0)
            v = torch.cat([values[b, kv], new[b, kv]]).double().repeat_interleave(torch.tensor(times), 0)
            want = (query[b, head, 0].double() @ k.T * 0.25).softmax(-1) @ v
            assert (out[b, head, 0] - want).abs().max() < 1e-5


@pytest.mark.parametrize("how", ["d2o", "clusters", "cam"])
@pytest.mark.parametrize("kind", [store.Dense(), store.Int(bits=8, group_size=8, residual=24)], ids=str)
@pytest.mark.parametrize("where", [place.Resident(), place.Offload()], ids=str)
def test_merging_goes_on_step_after_step(how, kind, where):
    """In pieces, padded, with codes: budgets hold, numbers stay finite, counts add up, and rows that were codes stay as they were."""
    model = make_llama()
    method = keep.Merge(keep.HeavyHitter(budget=32, recent=4, sinks=2), how=how, threshold=-1.0)
    cache = KVCache(model, Strategy(keep=method, store=kind, place=where))
    ids = torch.randint(3, 97, (2, 70), generator=torch.Generator().manual_seed(1))
    padding = (torch.arange(70) >= torch.tensor([0, 5])[:, None]).long()
    for start in range(0, 70, 7):
        logits = forward(model, ids[:, start : start + 7], cache, padding[:, : start + 7])
        assert logits[0].isfinite().all()
    for layer in cache.layers:
        keys, values, columns = layer.dense()
        assert keys.shape[2] == 32 and keys.isfinite().all() and values.isfinite().all()
        assert (columns.diff(dim=2) > 0).all()
        if how == "cam":
            assert not len(layer.counts)
        else:
            with layer.at_hand():
                counts = layer.counts.view()
            assert (counts >= 1).all() and counts.sum(2).le(70).all()
            if isinstance(kind, store.Dense):
                assert counts[0].sum(1).eq(70).all() and counts[1].sum(1).eq(65).all()
    cache.close()


def test_what_cannot_merge_is_refused():
    with pytest.raises(
        ValueError, match=r"Merge needs rewrite, which Int and Resident cannot give with these settings.*residual"
    ):
        Strategy(keep=keep.Merge(), store=store.Int(bits=2))
    with pytest.raises(ValueError, match="Merge needs rewrite"):
        Strategy(keep=keep.Merge(), store=store.PreRope())
    with pytest.raises(ValueError, match="how='cam' needs evidence of attention, which KeyDiff does not collect"):
        keep.Merge(keep.KeyDiff(), how="cam")
    with pytest.raises(ValueError, match="inner=Window evicts by no evidence"):
        keep.Merge(keep.Window())
