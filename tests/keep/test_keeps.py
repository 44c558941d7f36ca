"""Each keep against its definition: a query at a time, lists and float64, what each head may see said by a mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kvlab import KVCache, Strategy, keep, place, store
from kvlab.cache import forward
from kvlab.geometry import Geometry
from kvlab.keep.base import Budgeted, Held, Keep, Room
from kvlab.measure import predict
from kvlab.strategy import methods
from tests import explicit as reference
from tests import zoo
from tests.conftest import make_llama
from tests.reference import ours

BUDGET, RECENT, SINKS = 12, 4, 2
TOKENS = 40


@dataclass
class Heads:
    """One layer of one row, as the definitions see it. ``weights[h]``: the newest query's, of KV head h: ``[G, held]`` in the order of ``held[h]``."""

    layer: int
    held: list[list[int]]
    weights: list[Tensor] = field(default_factory=list)
    said: list[Tensor] = field(default_factory=list)  # what was said of each token so far, float64 [n]

    def keys(self, head: int) -> Tensor:
        return reference.keys[self.layer][0, head, self.held[head]]


Judge = Callable[[Heads, int], list[dict[int, float]]]  # after a query: for each head, what each held token is worth


def fresh(model, strategy: Strategy) -> KVCache:
    """A cache that knows who speaks: four tokens of a system, then two of a user and five of an answer, again and again."""
    cache = KVCache(model, strategy)
    cache.annotate("system", 4)
    for _ in range(20):
        cache.annotate("user", 2)
        cache.annotate("assistant", 5)
    return cache


def definition(judge: Judge, limit: Callable[[int], int], recent: int = RECENT, sinks: int = SINKS, slack: int = 0):
    layers: dict[int, Heads] = {}

    def rule(layer: int, scores: Tensor, see: Tensor) -> Tensor:
        hq, n, hk = scores.shape[1], scores.shape[2], reference.keys[layer].shape[1]
        group = hq // hk
        state = layers[layer] = Heads(
            layer, [[] for _ in range(hk)], said=[torch.zeros(n, dtype=torch.float64) for _ in range(hk)]
        )
        out = torch.zeros_like(see)
        for i in range(n):
            state.weights = []
            for head in range(hk):
                state.held[head].append(i)
                rows = slice(head * group, (head + 1) * group)
                out[0, rows, i, state.held[head]] = True
                state.weights.append(scores[0, rows, i, state.held[head]].softmax(-1))
            worth = judge(state, i)
            for head in range(hk):
                if len(state.held[head]) > limit(layer):
                    while len(state.held[head]) > limit(layer) - slack:
                        free = [j for j in state.held[head] if j >= sinks and j < i + 1 - recent]
                        state.held[head].remove(min(free, key=lambda j: (worth[head][j], j)))
        return out

    return rule


def shared(judge: Judge, floor: int):
    """Two heads that share 2 x BUDGET tokens: each keeps its ``floor`` best (the protected are), the others are ranked together."""
    layers: dict[int, Heads] = {}

    def rule(layer: int, scores: Tensor, see: Tensor) -> Tensor:
        n = scores.shape[2]
        state = layers[layer] = Heads(layer, [[], []], said=[torch.zeros(n, dtype=torch.float64) for _ in range(2)])
        out = torch.zeros_like(see)
        for i in range(n):
            state.weights = []
            for head in range(2):
                state.held[head].append(i)
                rows = slice(2 * head, 2 * head + 2)
                out[0, rows, i, state.held[head]] = True
                state.weights.append(scores[0, rows, i, state.held[head]].softmax(-1))
            worth = judge(state, i)
            if sum(map(len, state.held)) > 2 * BUDGET:
                ranked = []
                for head in range(2):
                    of = {j: float("inf") if j < SINKS or j >= i + 1 - RECENT else worth[head][j] for j in state.held[head]}
                    best = sorted(of, key=lambda j: (of[j], j))
                    ranked += [(float("inf") if j in best[-floor:] else of[j], j, head) for j in best]
                stays = sorted(ranked)[-2 * BUDGET :]
                state.held = [sorted(j for _, j, of in stays if of == head) for head in range(2)]
        sizes.append([len(held) for held in state.held])
        return out

    return rule


sizes: list[list[int]] = []


def mass(state: Heads, i: int) -> list[dict[int, float]]:
    for head, weights in enumerate(state.weights):
        state.said[head][state.held[head]] += weights.sum(0)
    return [{j: float(said[j]) for j in held} for said, held in zip(state.said, state.held, strict=True)]


def tova(state: Heads, i: int) -> list[dict[int, float]]:
    mean = torch.stack(state.weights).mean((0, 1))  # all heads hold the same tokens
    return [dict(zip(held, mean.tolist(), strict=True)) for held in state.held]


def snapkv(state: Heads, i: int) -> list[dict[int, float]]:
    out = []
    for summed, held in zip(mass(state, i), state.held, strict=True):
        near = [held[max(0, at - 2) : at + 3] for at in range(len(held))]
        out.append({j: max(summed[k] for k in around) for j, around in zip(held, near, strict=True)})
    return out


def scissorhands(state: Heads, i: int) -> list[dict[int, float]]:
    for head, weights in enumerate(state.weights):
        state.said[head][state.held[head]] += (weights > 1 / weights.shape[1]).sum(0).double()
    return [{j: float(said[j]) for j in held} for said, held in zip(state.said, state.held, strict=True)]


def keynorm(state: Heads, i: int) -> list[dict[int, float]]:
    return [dict(zip(held, (-state.keys(h).norm(dim=-1)).tolist(), strict=True)) for h, held in enumerate(state.held)]


def keydiff(state: Heads, i: int) -> list[dict[int, float]]:
    out = []
    for head, held in enumerate(state.held):
        keys = state.keys(head)
        keys = keys / keys.norm(dim=-1, keepdim=True)
        mean = keys.mean(0)
        out.append(dict(zip(held, (-(keys @ mean) / mean.norm()).tolist(), strict=True)))
    return out


def turned(x: Tensor, positions: Tensor, back: bool = False) -> Tensor:
    """``[.., n, D]`` turned by RoPE as complex numbers, float64: halves are a pair, theta 10,000."""
    half = x.shape[-1] // 2
    angle = positions.double()[..., None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), -angle if back else angle)
    return torch.cat([z.real, z.imag], -1)


def expected(state: Heads, i: int) -> list[dict[int, float]]:
    q, d = reference.queries[state.layer][0], reference.keys[state.layer].shape[-1]
    flat = turned(q[:, : i + 1], torch.arange(i + 1), back=True)[:, 4:]
    turns = [turned(torch.eye(d, dtype=torch.float64), torch.full((d,), float(i + 1 + step))).T for step in range(6)]
    average = sum(turns) / 6
    out = []
    for head, held in enumerate(state.held):
        keys, total = state.keys(head), 0
        for one in flat[2 * head : 2 * head + 2]:
            if not len(one):
                mean, spread = torch.zeros(d, dtype=torch.float64), torch.zeros(d, d, dtype=torch.float64)
            else:
                mean, spread = average @ one.mean(0), average @ torch.cov(one.T, correction=0).view(d, d) @ average.T
            logit = keys @ mean / d**0.5 + torch.einsum("ni,ij,nj->n", keys, spread, keys) / (2 * d)
            total = total + logit.softmax(0) / 2
        lengths = reference.values[state.layer][0, head, held].norm(dim=-1)
        out.append(dict(zip(held, (total * lengths).tolist(), strict=True)))
    return out


def quest(step: int):
    """Pages of 8, two of which are read (the newest one among them), in all layers but the first; new tokens come ``step`` at a time."""

    def rule(layer: int, scores: Tensor, see: Tensor) -> Tensor:
        keys, query = reference.keys[layer][0], reference.queries[layer][0]
        out = see.clone()
        for i in range(scores.shape[2]):
            stored = i // step * step
            pages = [list(range(start, min(start + 8, stored))) for start in range(0, stored, 8)]
            if layer == 0 or len(pages) <= 2:
                continue
            for head in range(keys.shape[0]):
                bounds = []
                for page in pages:
                    low, high = keys[head, page].amin(0), keys[head, page].amax(0)
                    of = [float(torch.maximum(q * low, q * high).sum()) for q in query[2 * head : 2 * head + 2, i]]
                    bounds.append(max(of))
                best = max(range(len(pages) - 1), key=bounds.__getitem__)
                read = {*pages[best], *pages[-1]}
                for j in range(stored):
                    if j not in read:
                        out[0, 2 * head : 2 * head + 2, i, j] = False
        return out

    return rule


@pytest.mark.many
@pytest.mark.parametrize("kind", methods("store").values())
def test_single_rows_are_read_as_they_lie(kind):
    small_groups = {"group_size": 8} if "group_size" in kind.settings() else {}
    if kind is store.LowRank:
        small_groups |= {"first": 16, "rank": 8}
    made = kind(store.Int(bits=4, group_size=8)) if "inner" in kind.settings() else kind(**small_groups)
    ids = torch.randint(3, 97, (2, 45), generator=torch.Generator().manual_seed(2))
    model = zoo.model("llama")
    _, cache = ours(model, Strategy(store=made), ids, [30, 38, 45])
    index = torch.stack([torch.randperm(45)[:9].sort().values for _ in range(4)]).view(2, 2, 9)
    for layer in cache.layers:
        for got, all_rows in zip(layer.store.rows_at(index), layer.dense(), strict=False):
            assert torch.allclose(got, all_rows.gather(2, index[..., None].expand(-1, -1, -1, 16)), atol=1e-5)


@pytest.mark.parametrize("step", [1, 5])
def test_each_query_reads_its_own_pages(step):
    model = zoo.model("llama")
    ids = torch.randint(3, 97, (1, TOKENS), generator=torch.Generator().manual_seed(2))
    got, cache = ours(model, Strategy(keep=keep.Quest(budget=16, page=8, dense=1)), ids, list(range(step, TOKENS + 1, step)))
    want = reference.explicit(model, ids, quest(step))
    assert (got - want).abs().max() < 1e-5
    assert all(len(layer.store) == TOKENS for layer in cache.layers)
    cache.crop(-3)
    _, again = ours(
        model, Strategy(keep=keep.Quest(budget=16, page=8, dense=1)), ids[:, : TOKENS - 3], list(range(1, TOKENS - 2))
    )
    if step == 1:
        more = [forward(model, torch.tensor([[9]]), one) for one in (cache, again)]
        assert (more[0] - more[1]).abs().max() < 1e-5


def test_pages_bound_what_their_keys_score():
    """Whatever the query: no key of a page scores more than the page's bound, but for the bounds' 16 bits."""
    model = zoo.model("llama")
    ids = torch.randint(3, 97, (2, 45), generator=torch.Generator().manual_seed(2))
    _, cache = ours(model, Strategy(keep=keep.Quest(budget=16, page=8, dense=0)), ids, [7, 8, 30, 45])
    for layer in cache.layers:
        query = torch.randn(2, 2, 3, 4, 16)
        bound = layer.remembered.bound(query)
        scores = query @ layer.dense()[0].unsqueeze(2).mT
        assert bound.shape[-1] == 6
        for page in range(6):
            assert (scores[..., 8 * page : 8 * page + 8].amax(-1) <= bound[..., page] + 0.02).all()


def streaming(size: int, sinks: int):
    """Keys turned anew by their place in the cache, and so the query: StreamingLLM as its paper says it."""

    def rule(layer: int, scores: Tensor, see: Tensor) -> Tensor:
        n = scores.shape[2]
        at = torch.arange(n)
        keys, query = (turned(x[layer][0], at, back=True) for x in (reference.keys, reference.queries))
        out = torch.zeros_like(see)
        for i in range(n):
            held = [j for j in range(i) if j < sinks or j >= i - size] + [i]
            places = torch.arange(len(held))
            k = turned(keys[:, held], places).repeat_interleave(query.shape[0] // keys.shape[0], 0)
            q = turned(query[:, i : i + 1], places[-1:])
            scores[0, :, i, held] = (q @ k.mT)[:, 0] * q.shape[-1] ** -0.5
            out[0, :, i, held] = True
        return out

    return rule


def flat(_: int) -> int:
    return BUDGET


COMMON = dict(budget=BUDGET, recent=RECENT, sinks=SINKS)
CASES: list[tuple[Keep, Callable]] = [
    (keep.HeavyHitter(**COMMON), lambda: definition(mass, flat)),
    (keep.HeavyHitter(**COMMON, every=5), lambda: definition(mass, flat, slack=4)),
    (keep.TOVA(**COMMON), lambda: definition(tova, flat)),
    (keep.TOVA(budget=BUDGET), lambda: definition(tova, flat, 0, 0)),
    (keep.SnapKV(**COMMON, pool=5), lambda: definition(snapkv, flat)),
    (keep.Scissorhands(**COMMON), lambda: definition(scissorhands, flat)),
    (keep.KeyNorm(**COMMON), lambda: definition(keynorm, flat)),
    (keep.ExpectedAttention(**COMMON, ahead=6), lambda: definition(expected, flat)),
    (keep.Quest(budget=16, page=8, dense=1), lambda: quest(1)),
    (keep.Window(size=10, sinks=3, positions="cache"), lambda: streaming(10, 3)),
    (keep.KeyDiff(**COMMON), lambda: definition(keydiff, flat)),
    # 6 beside the protected, beta 3: the last layer has 2 of them, the first 10, the one between 6
    (keep.PyramidKV(keep.HeavyHitter(**COMMON), beta=3), lambda: definition(mass, lambda layer: 6 + (10, 6, 2)[layer])),
]  # fmt: skip


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("where", [place.Resident(), place.Offload()], ids=str)
def test_heads_that_share_a_budget(page, where):
    model = zoo.model("llama")
    ids = torch.randint(3, 97, (1, TOKENS), generator=torch.Generator().manual_seed(2))
    method = keep.AdaKV(keep.HeavyHitter(**COMMON), floor=0.7)
    got, cache = ours(model, Strategy(keep=method, store=store.Paged(page=page), place=where), ids, list(range(1, TOKENS + 1)))
    sizes.clear()
    want = reference.explicit(model, ids, shared(mass, int(0.7 * BUDGET)))
    assert (got - want).abs().max() < 1e-5
    assert any(one != two for one, two in sizes), "no head held more than the other: nothing was tested"
    for layer, (one, two) in zip(cache.layers, sizes, strict=True):
        assert (layer.dense()[2] >= 0).sum(2)[0].tolist() == [one, two]
        pages = sum(-(-length // page) for length in (one, two))
        assert sum(b.logical for b in layer.store.pages) == pages * page * 2 * 16 * 4  # what a head does not hold takes no room


def test_two_prunings_report_what_they_removed_together():
    """A pyramid over three layers, and heads that share within each: 40 tokens, 12 a head on average, so 28 of 40 are gone in all."""
    model = zoo.model("llama")
    ids = torch.randint(3, 97, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    both = keep.AdaKV(keep.PyramidKV(keep.HeavyHitter(**COMMON), beta=3))
    other = keep.PyramidKV(keep.AdaKV(keep.HeavyHitter(**COMMON)), beta=3)
    for method in (both, other):
        _, cache = ours(model, Strategy(keep=method, store=store.Paged(page=4)), ids, [20, 30, TOKENS])
        held = [(layer.dense()[2] >= 0).sum((1, 2)).tolist() for layer in cache.layers]
        assert held == [[2 * (6 + n)] * 2 for n in (10, 6, 2)]
        assert cache.memory().evicted == pytest.approx(28 / 40)
        assert "70.0% of all layers' and heads' tokens evicted" in str(cache.memory())
    _, cache = ours(model, Strategy(keep=keep.Window(size=8, sinks=2)), ids, [20, 30, TOKENS])
    assert cache.memory().evicted == pytest.approx(30 / 40)
    _, cache = ours(model, Strategy(), ids, [TOKENS])
    assert cache.memory().evicted == 0
    with pytest.raises(ValueError, match="inner=Merge folds what goes away"):
        keep.PyramidKV(keep.Merge())


def test_heads_share_in_batches_with_padding_and_pieces():
    """Rows alone and together, in one piece and then token by token: the same logits, budgets held by each row."""
    model = zoo.model("llama")
    ids = torch.randint(3, 97, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    padding = (torch.arange(TOKENS) >= torch.tensor([0, 9])[:, None]).long()
    strategy = Strategy(keep=keep.AdaKV(keep.HeavyHitter(**COMMON)), store=store.Paged(page=4))
    cuts = [20, 21, 30, *range(31, TOKENS + 1)]
    both, cache = ours(model, strategy, ids, cuts, padding)
    for row in range(2):
        alone, _ = ours(model, strategy, ids[row : row + 1], cuts, padding[row : row + 1])
        assert (both[row] - alone[0]).abs().max() < 1e-5
    for layer in cache.layers:
        assert (layer.dense()[2] >= 0).sum((1, 2)).tolist() == [2 * BUDGET] * 2
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    again = forward(model, torch.full((3, 1), 7), cache, torch.cat([padding[[1, 1, 0]], torch.ones(3, 1, dtype=torch.long)], 1))
    assert (again[0] - again[1]).abs().max() < 1e-6 and (again[0] - again[2]).abs().max() > 1e-3


@pytest.mark.many
@pytest.mark.parametrize("where", [place.Resident(), place.Offload()], ids=str)
@pytest.mark.parametrize(("method", "rule"), CASES, ids=lambda x: str(x) if isinstance(x, Keep) else "")
def test_each_equals_its_definition_token_by_token(method, rule, where):
    model = zoo.model("llama")
    ids = torch.randint(3, 97, (1, TOKENS), generator=torch.Generator().manual_seed(2))
    got, _ = ours(model, Strategy(keep=method, place=where), ids, list(range(1, TOKENS + 1)))
    want = reference.explicit(model, ids, rule())
    assert (got - want).abs().max() < 1e-5


def test_a_prompt_is_judged_by_its_last_queries():
    """SnapKV on a prompt in one piece: top tokens by the last 4 queries' weights, smoothed over 5 neighbours, straight from the definition."""
    model, seen = zoo.model("llama"), {}
    ids = torch.randint(3, 97, (1, TOKENS), generator=torch.Generator().manual_seed(3))

    def look(layer, scores, see):
        seen[layer] = reference.weights_of(scores)[0].view(2, 2, TOKENS, TOKENS)
        return see

    reference.explicit(model, ids, look)
    _, cache = ours(model, Strategy(keep=keep.SnapKV(budget=12, recent=4, sinks=2, pool=5)), ids, [TOKENS])
    _, counted = ours(model, Strategy(keep=keep.Scissorhands(budget=12, recent=4, sinks=2, history=9)), ids, [TOKENS])
    for layer in range(3):
        for head in range(2):
            weights = seen[layer][head]
            summed = weights[:, -4:].sum((0, 1))
            smooth = torch.stack([summed[max(0, j - 2) : j + 3].max() for j in range(TOKENS)])
            counts = sum((weights[:, i] * (i + 1) > 1).sum(0) for i in range(TOKENS - 9, TOKENS))
            for one, worth in ((cache, smooth), (counted, counts)):
                best = sorted(range(2, TOKENS - 4), key=lambda j: (float(worth[j]), j))[-6:]
                assert one.layers[layer].dense()[2][0, head].tolist() == [0, 1, *sorted(best), *range(TOKENS - 4, TOKENS)]


def test_a_pyramid_keeps_the_average():
    for layers in (2, 3, 30, 31):
        method = keep.PyramidKV(keep.HeavyHitter(budget=256, recent=32, sinks=4), beta=20)
        limits = [method.limit(Room(layer, layers)) for layer in range(layers)]
        assert abs(sum(limits) - 256 * layers) <= layers and limits == sorted(limits, reverse=True)
        assert limits[-1] == 36 + 11 and limits[0] == 36 + 429  # 220 / 20 and 2 x 220 - 11
    assert [keep.PyramidKV(beta=1).limit(Room(layer, 4)) for layer in range(4)] == [256] * 4
    with pytest.raises(ValueError, match="Window has no budget to spread"):
        keep.PyramidKV(keep.Window())


def test_chance_is_fair_and_repeats():
    columns = torch.arange(4096).view(1, 1, -1)
    worth = [keep.Random(seed=seed).worth(Held(columns, columns, 4096)) for seed in (0, 0, 1)]
    assert torch.equal(worth[0], worth[1]) and not torch.equal(worth[0], worth[2])
    best = worth[0][0, 0].topk(1024).indices
    for quarter in range(4):  # each quarter of the text keeps about its share: 256, give or take four standard deviations
        assert abs(int((best // 1024 == quarter).sum()) - 256) < 4 * (1024 * 0.25 * 0.75 * 0.75) ** 0.5
    assert len(worth[0].unique()) > 4000


EVICTING = [cls for cls in methods("keep").values() if "evict" in cls().needs]


def small(cls: type[Keep], tokens: int = 16) -> Keep:
    if cls is keep.Window:
        return cls(size=tokens - 2, sinks=2)
    if cls is keep.AdaKV:
        return cls(keep.HeavyHitter(budget=tokens, recent=3, sinks=2))
    if cls is keep.Merge:
        return cls(keep.HeavyHitter(budget=tokens, recent=3, sinks=2))
    if cls is keep.Conversation:
        return cls(budget=tokens, inner=keep.HeavyHitter(recent=3, sinks=2))
    if cls is keep.PyramidKV:
        return cls(keep.SnapKV(budget=tokens, recent=3), beta=2)
    return cls(budget=tokens, recent=3, sinks=2)


def kind(cls: type[Keep]) -> store.Dense | store.Paged:
    return store.Paged(page=4) if cls is keep.AdaKV else store.Dense()


@pytest.mark.many
@pytest.mark.parametrize("cls", EVICTING)
@pytest.mark.parametrize("chunk", [1, 7, 60])
def test_the_budget_holds_and_positions_stay_sorted(cls, chunk):
    model, rows = make_llama(), 1 if cls is keep.Conversation else 2
    ids = torch.randint(3, 97, (rows, 60), generator=torch.Generator().manual_seed(0))
    padding = (torch.arange(60) >= torch.tensor([0, 9][:rows])[:, None]).long()
    cache = fresh(model, Strategy(keep=small(cls, 40), store=kind(cls)))
    for start in range(0, 60, chunk):
        forward(model, ids[:, start : start + chunk], cache, padding[:, : start + chunk])
        for number, layer in enumerate(cache.layers):
            columns = layer.dense()[2]
            held = (columns >= 0).sum(2)
            assert held.float().mean(1).max() <= small(cls, 40).limit(Room(number, 3))
            assert ((columns.diff(dim=2) > 0) | (columns[..., :-1] < 0)).all()
    total = sum(float((layer.dense()[2] >= 0).sum(2).float().mean(1).min()) for layer in cache.layers)
    assert total >= 3 * 40 - 3


@pytest.mark.parametrize("cls", [*EVICTING, keep.Quest], ids=lambda cls: cls.__name__)
def test_bytes_are_as_predicted(cls):
    """Before and after eviction, everything that a keep remembers counted."""
    model = make_llama()
    method = keep.Quest(budget=32, page=8, dense=1) if cls is keep.Quest else small(cls, 40)
    strategy = Strategy(keep=method, store=kind(cls))
    cache = fresh(model, strategy)
    ids = torch.randint(3, 97, (1, 70), generator=torch.Generator().manual_seed(0))
    for start, stop in ((0, 30), (30, 60), *((n, n + 1) for n in range(60, 70))):
        forward(model, ids[:, start:stop], cache)
        want = sum(predict(Geometry.from_config(model.config), strategy, stop, bits=32).values())
        rest = 3 * 2 * 2 * 3 * 16 * 4 if cls is keep.AdaKV else 0  # a few tokens in pages of 4 that are not full
        assert abs(cache.memory().logical - want) <= 0.01 * want + rest


@pytest.mark.parametrize("cls", EVICTING)
def test_a_later_token_changes_nothing_before_it(cls):
    """Two texts that differ in their last token: what was held before it is the same."""
    model = make_llama()
    ids = torch.randint(3, 97, (1, 41), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[0, 40] = (other[0, 40] - 2) % 90 + 3
    logits = []
    for text in (ids, other):
        cache = fresh(model, Strategy(keep=small(cls, 30), store=kind(cls)))
        logits.append([forward(model, text[:, a:b], cache) for a, b in ((0, 20), (20, 40), (40, 41))])
    assert all(torch.equal(a, b) for a, b in zip(logits[0][:2], logits[1][:2], strict=True))
    assert not torch.equal(logits[0][2], logits[1][2])


@pytest.mark.parametrize("cls", [cls for cls in EVICTING if issubclass(cls, Budgeted)])
@pytest.mark.parametrize("length", [1, 2])
def test_short_prompts_and_tight_budgets(cls, length):
    model = make_llama()
    cache = KVCache(model, Strategy(keep=cls(budget=5, recent=3, sinks=2), store=store.Int(bits=8, group_size=8)))
    for start in range(0, 12, length):
        forward(model, torch.full((1, length), 5 + start), cache)
    assert [len(layer.store) for layer in cache.layers] == [5] * 3
    with pytest.raises(ValueError, match=r"budget=4 is below recent \+ sinks = 5"):
        cls(budget=4, recent=3, sinks=2)


def test_bad_settings():
    with pytest.raises(ValueError, match="pool=4 is even"):
        keep.SnapKV(pool=4)
    with pytest.raises(ValueError, match="recent=0 observes nothing"):
        keep.SnapKV(recent=0)
    with pytest.raises(ValueError, match=r"budget=10 is below recent \+ sinks \+ every - 1 = 12"):
        keep.HeavyHitter(budget=10, recent=4, sinks=4, every=5)
