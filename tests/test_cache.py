"""One cache, exact: with a budget that covers the sequence nothing is lost, whatever the strategy, batch, padding or pieces."""

import inspect

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from kvlab import KVCache, Strategy, UnsupportedModel, attach, detach, keep, place, store
from kvlab.cache import forward
from tests.reference import feed, masked_llama, ours, plain

BIG = 4096
ARGUMENT = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
FULL = [
    Strategy(),
    Strategy(keep=keep.Window(size=BIG)),
    Strategy(keep=keep.HeavyHitter(budget=BIG)),
    Strategy(place=place.Offload()),
    Strategy(store=store.Int(residual=BIG)),
    Strategy(keep=keep.HeavyHitter(budget=BIG), store=store.Int(bits=4, residual=BIG), place=place.Offload()),
]
CUTS = [[40], [30, 31, 32, 40], [1, 2, 40], [16, 32, 33, 34, 35, 36, 37, 38, 39, 40]]


@pytest.mark.parametrize("strategy", FULL, ids=str)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_a_full_budget_loses_nothing(llama, ids, strategy, cuts, padded):
    padding = None
    if padded:
        padding = torch.ones_like(ids)
        padding[0, :7] = 0
    want = plain(llama, ids, cuts, padding)
    got, cache = ours(llama, strategy, ids, cuts, padding)
    assert (got - want).abs().max() < 1e-5
    assert cache.get_seq_length() == 40


def window_rule(size, sinks):
    def allowed(layer, scores):
        n = scores.shape[-1]
        i, j = torch.arange(n, device=scores.device)[:, None], torch.arange(n, device=scores.device)[None]
        return ((j <= i) & ((j < sinks) | (j >= i - size))).expand_as(scores)

    return allowed


@pytest.mark.parametrize("where", [place.Resident(), place.Offload()], ids=str)
def test_window_and_sinks_equal_a_mask(llama, ids, where):
    """Token by token, query i still sees the ``size`` newest tokens before it, itself and the sinks."""
    strategy = Strategy(keep=keep.Window(size=9, sinks=3), place=where)
    got, cache = ours(llama, strategy, ids[:1], list(range(1, 41)))
    want = masked_llama(llama, ids[:1], window_rule(9, 3))
    assert (got[0] - want).abs().max() < 1e-5
    assert cache.memory().stored == 12
    assert cache.layers[1].dense()[2][0, 0].tolist() == [0, 1, 2, *range(31, 40)]


def h2o_rule(budget, recent, sinks, group):
    """H2O by its definition, one query at a time, with full matrices: an independent way to the same kept sets."""

    def allowed(layer, scores):
        hq, n = scores.shape[0], scores.shape[1]
        see = torch.zeros((hq, n, n), dtype=torch.bool, device=scores.device)
        for kv in range(hq // group):
            held: list[int] = []
            mass = torch.zeros(n, dtype=torch.float64)
            heads = range(kv * group, (kv + 1) * group)
            for i in range(n):
                held.append(i)
                for head in heads:
                    see[head, i, held] = True
                    mass[held] += scores[head, i, held].softmax(-1).detach().cpu()
                while len(held) > budget:
                    free = [j for j in held if j >= sinks and j < i + 1 - recent]
                    held.remove(min(free, key=lambda j: (mass[j].item(), j)))
        return see

    return allowed


@pytest.mark.parametrize("where", [place.Resident(), place.Offload()], ids=str)
def test_heavy_hitters_equal_their_definition(llama, ids, where):
    strategy = Strategy(keep=keep.HeavyHitter(budget=12, recent=4, sinks=2), place=where)
    got, cache = ours(llama, strategy, ids[:1], list(range(1, 41)))
    want = masked_llama(llama, ids[:1], h2o_rule(12, 4, 2, 2))
    assert (got[0] - want).abs().max() < 1e-5
    columns = cache.layers[2].dense()[2]
    assert columns.shape == (1, 2, 12)
    assert (columns.diff(dim=2) > 0).all(), "positions stay sorted"
    assert columns[0, 0].tolist() != columns[0, 1].tolist(), "heads choose for themselves"


def test_the_prompt_is_judged_by_its_own_attention(llama, ids):
    """After one piece of 30 tokens, the kept set is the top of the column sums of the exact attention matrix."""
    _, cache = ours(llama, Strategy(keep=keep.HeavyHitter(budget=10, recent=3, sinks=1)), ids[:1, :30], [30])
    seen = {}

    def everything(layer, scores):
        see = torch.ones(30, 30, dtype=torch.bool, device=scores.device).tril().expand_as(scores)
        weights = scores.masked_fill(~see, float("-inf")).softmax(-1)
        seen[layer] = weights.view(2, 2, 30, 30).sum((1, 2))
        return see

    masked_llama(llama, ids[:1, :30], everything)
    for layer in range(3):
        columns = cache.layers[layer].dense()[2]
        for head in range(2):
            best = seen[layer][head, 1:27].topk(6).indices + 1
            assert columns[0, head].tolist() == sorted([0, 27, 28, 29, *best.tolist()])


def test_evidence_does_not_see_the_future(llama, ids):
    """What layer 0 keeps after 30 tokens does not depend on token 31."""
    other = ids.clone()
    other[:, 30:] = 5
    sets = []
    for text in (ids, other):
        _, cache = ours(llama, Strategy(keep=keep.HeavyHitter(budget=10, recent=3, sinks=1)), text[:, :30], [30])
        sets.append(cache.layers[0].dense()[2])
    assert torch.equal(*sets)


def test_padding_is_no_sink_and_takes_no_room(llama, ids):
    padding = torch.ones_like(ids)
    padding[0, :13] = 0
    for rule in (keep.Window(size=8, sinks=3), keep.HeavyHitter(budget=11, recent=4, sinks=3)):
        for piece in ([40], [20, 40], [14, *range(15, 41)]):
            _, cache = ours(llama, Strategy(keep=rule), ids, piece, padding)
            columns = cache.layers[0].dense()[2]
            assert columns.shape[2] == 11
            assert (columns[0] >= 13).all()
            assert columns[0, 0, :3].tolist() == [13, 14, 15]
            assert columns[-1, 0, :3].tolist() == [0, 1, 2]


def test_padded_rows_equal_the_same_rows_alone(llama, ids):
    """With eviction, a padded row keeps and says what it does without its padding."""
    padding = torch.ones_like(ids)
    padding[0, :13] = 0
    cuts = [20, *range(21, 41)]
    for rule in (keep.Window(size=6, sinks=2), keep.HeavyHitter(budget=12, recent=4, sinks=2)):
        got, _ = ours(llama, Strategy(keep=rule), ids, cuts, padding)
        alone, _ = ours(llama, Strategy(keep=rule), ids[:1, 13:], [cut - 13 for cut in cuts])
        assert (got[0, 13:] - alone[0]).abs().max() < 1e-5


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_padding_goes_first_from_codes_too(llama, ids, bits, axis):
    """Rows and heads give up different tokens of the codes and of the plain tail; padding is the first to go everywhere."""
    padding = torch.ones_like(ids)
    padding[0, :9] = 0
    strategy = Strategy(
        keep=keep.HeavyHitter(budget=20, recent=3, sinks=1), store=store.Int(bits=bits, group_size=8, key_axis=axis, residual=4)
    )
    _, cache = ours(llama, strategy, ids, [18, *range(19, 41)], padding)
    for layer in cache.layers:
        columns = layer.dense()[2]
        assert columns.shape[2] == 20
        assert (columns[0] >= 9).all()
        assert (columns.diff(dim=2) > 0).all()


@pytest.mark.parametrize("axis", ["channel", "token", "tensor"])
def test_codes_that_stay_do_not_change(llama, ids, axis):
    """A kept token's stored key is the same bit for bit after others were evicted around it, repacked groups apart."""
    strategy = Strategy(keep=keep.HeavyHitter(budget=30, recent=2, sinks=1), store=store.Int(bits=4, group_size=8, key_axis=axis))
    cache = KVCache(llama, strategy)
    feed(llama, cache, ids, [32])
    keys, values, columns = cache.layers[0].dense()
    before = {
        (h, int(c)): (keys[0, h, i], values[0, h, i])
        for h in range(2)
        for i, c in enumerate(columns[0, min(h, columns.shape[1] - 1)])
    }
    frozen = dict.fromkeys(before, len(cache.layers[0].store.keys))
    assert frozen
    for t in range(32, 40):
        forward(llama, ids[:, t : t + 1], cache)
    layer = cache.layers[0]
    assert layer.store.repacked == 0
    keys, values, columns = layer.dense()
    same = 0
    for h in range(2):
        for i, c in enumerate(columns[0, h].tolist()):
            if (h, c) in before:
                assert torch.equal(keys[0, h, i], before[h, c][0])
                assert torch.equal(values[0, h, i], before[h, c][1])
                same += 1
    assert same > 20


def test_groups_under_half_are_repacked_and_counted(llama, ids):
    strategy = Strategy(keep=keep.HeavyHitter(budget=32, recent=24, sinks=1), store=store.Int(bits=8, group_size=8))
    cache = KVCache(llama, strategy)
    feed(llama, cache, ids, [32])
    exact = KVCache(llama, Strategy(keep=keep.HeavyHitter(budget=32, recent=24, sinks=1)))
    more = torch.randint(3, 97, (2, 200), generator=torch.Generator().manual_seed(1)).to(ids.device)
    feed(llama, exact, ids, [32])
    for t in range(200):
        forward(llama, more[:, t : t + 1], cache)
        forward(llama, more[:, t : t + 1], exact)
    side = cache.layers[0].store.keys
    assert side.repacked > 0
    held = cache.memory()
    assert held.repacked == sum(
        layer.store.repacked for layer in cache.layers
    ) and f"{held.repacked:,} codes' tokens written again" in str(held)
    assert len(side.scale) <= 2 * -(-len(side) // 8) + 2
    # the first layer's keys do not depend on what was evicted, so what is kept must still be near the truth
    keys, _, columns = cache.layers[0].dense()
    truth = KVCache(llama, Strategy())
    feed(llama, truth, torch.cat([ids[:, :32], more], 1), [232])
    full = truth.layers[0].dense()[0]
    want = full.gather(2, columns.expand(2, 2, -1)[..., None].expand(-1, -1, -1, full.shape[3]))
    assert (keys - want).abs().max() < 0.03 * want.abs().max()


def test_many_turns_and_reset(llama, ids):
    strategy = Strategy(
        keep=keep.HeavyHitter(budget=16, recent=4, sinks=2), store=store.Int(bits=8, group_size=8), place=place.Offload()
    )
    cache = KVCache(llama, strategy)
    first = feed(llama, cache, ids, [20, 30, 40])
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.memory().allocated == 0
    again = feed(llama, cache, ids, [20, 30, 40])
    fresh, _ = ours(llama, strategy, ids, [20, 30, 40])
    assert torch.equal(first, again) and torch.equal(first, fresh)


def test_crop_and_reorder_equal_transformers(llama, ids):
    for strategy in FULL[:5]:
        detach(llama)
        want = DynamicCache(config=llama.config)
        feed(llama, want, ids, [30])
        want.crop(-10)
        want.reorder_cache(torch.tensor([1, 1], device=ids.device))
        expected = forward(llama, ids[:, 30:], want)
        cache = KVCache(llama, strategy)
        feed(llama, cache, ids, [30])
        cache.crop(-10)
        assert cache.get_seq_length() == 20
        cache.reorder_cache(torch.tensor([1, 1], device=ids.device))
        assert (forward(llama, ids[:, 30:], cache) - expected).abs().max() < 1e-5


def test_crop_cuts_through_a_group(llama, ids):
    cache = KVCache(llama, Strategy(store=store.Int(bits=8, group_size=8)))
    feed(llama, cache, ids, [32])
    before = cache.layers[0].dense()[0]
    cache.crop(-5)
    after, _, columns = cache.layers[0].dense()
    assert torch.equal(after, before[:, :, :27]) and columns.shape[2] == 27
    assert cache.layers[0].store.borders == [24]
    cache.crop(0)
    cache.crop(-100)
    assert cache.get_seq_length() == 0


def test_crop_after_eviction_is_refused(llama, ids):
    cache = KVCache(llama, Strategy(keep=keep.Window(size=8)))
    feed(llama, cache, ids, [40])
    with pytest.raises(RuntimeError, match="Everything"):
        cache.crop(-1)


def test_attach_and_detach_leave_the_model_as_it_was(ids):
    from tests.conftest import make_llama

    model = make_llama()
    before = model.config._attn_implementation
    want = model(ids).logits
    attach(model)
    attach(model)
    assert model.config._attn_implementation == "kvlab"
    padding = torch.ones_like(ids)
    padding[0, :5] = 0
    without_cache = model(ids, attention_mask=padding, use_cache=False).logits
    detach(model)
    assert model.config._attn_implementation == before
    assert torch.equal(model(ids).logits, want)
    assert (model(ids, attention_mask=padding, use_cache=False).logits - without_cache)[:, 5:].abs().max() < 1e-5


def test_generate_takes_the_cache(llama, ids):
    detach(llama)
    settings = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    want = llama.generate(ids, **settings)
    got = llama.generate(ids, **settings, **{ARGUMENT: KVCache(llama, Strategy())})
    assert torch.equal(got, want)
    beams = llama.generate(ids, num_beams=3, **settings, **{ARGUMENT: KVCache(llama, Strategy(store=store.Int(residual=BIG)))})
    detach(llama)
    assert torch.equal(beams, llama.generate(ids, num_beams=3, **settings))


def test_a_used_cache_with_the_old_prompt_is_refused(llama, ids):
    cache = KVCache(llama)
    out = llama.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, **{ARGUMENT: cache})
    with pytest.raises(ValueError, match="old prompt|already|used cache"):
        llama.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, **{ARGUMENT: cache})
    # going on with the whole conversation so far is fine
    more = llama.generate(torch.cat([out, ids[:, :3]], 1), max_new_tokens=4, do_sample=False, pad_token_id=0, **{ARGUMENT: cache})
    detach(llama)
    assert torch.equal(more, llama.generate(torch.cat([out, ids[:, :3]], 1), max_new_tokens=4, do_sample=False, pad_token_id=0))


def test_wrong_use_is_named(llama, ids):
    cache = KVCache(llama)
    feed(llama, cache, ids, [10])
    with pytest.raises(ValueError, match="batch has 1 rows"):
        forward(llama, ids[:1, 10:12], cache)
    with pytest.raises(ValueError, match="attention mask has 5 columns"):
        forward(llama, ids[:, 10:12], KVCache(llama), torch.ones(2, 5, dtype=torch.long, device=ids.device))
    with pytest.raises(ValueError, match="no transformers model"):
        KVCache(Strategy())
    with pytest.raises(ValueError, match="kvlab.Strategy"):
        KVCache(llama, "int8")


def test_a_model_that_touches_its_keys_is_refused():
    from kvlab.attention import Handle

    handle = Handle(None)
    for touch in (lambda: handle.shape, lambda: torch.cat([handle, handle]), lambda: handle[..., :3]):
        with pytest.raises(UnsupportedModel, match="DynamicCache"):
            touch()


def test_a_cache_and_a_lab_are_one_line(llama, ids):
    from kvlab.lab import Lab

    cache = KVCache(llama, Strategy(store=store.Int(group_size=8)))
    feed(llama, cache, ids, [40])
    assert repr(cache) == f"KVCache(Int(group_size=8): 40 tokens read, {cache.memory().allocated:,} bytes)"
    assert repr(Lab("tiny", llama, None)) == f"Lab('tiny', 3 layers, float32 on {llama.device})"
