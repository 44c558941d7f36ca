"""Measures agree with numbers from an independent path."""

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache

import kvlab
from kvlab import KVCache, Strategy, keep, place, store
from kvlab.attention import Watch, detach
from kvlab.cache import forward
from kvlab.geometry import Geometry
from kvlab.lab import Lab
from kvlab.measure import control, predict, predict_curve, quality
from kvlab.measure.bench import Shape, bench_attention
from tests.reference import feed


class Words:
    """A tokenizer whose tokens are numbers written as text."""

    eos_token_id = 1

    def __call__(self, text, return_tensors=None, verbose=True):
        from types import SimpleNamespace

        return SimpleNamespace(
            input_ids=torch.tensor([[3 + hash(w) % 90 if not w.isdigit() else int(w) % 97 for w in text.split()]])
        )

    def encode(self, text):
        return self(text).input_ids[0].tolist()

    def decode(self, tokens):
        return " ".join(str(int(t)) for t in tokens)


@pytest.fixture(scope="session")
def lab(llama):
    return Lab("tiny", llama, Words())


@pytest.fixture
def text(device):
    return torch.randint(3, 97, (1, 120), generator=torch.Generator().manual_seed(5)).to(device)


def test_the_control_is_the_whole_sequence_at_once(lab, text):
    """Losses through the full cache equal those of one forward pass without any cache, in float64."""
    made = control(lab, text, prefill=50, step=7)
    detach(lab.model)
    with torch.no_grad():
        logits = lab.model(text, use_cache=False).logits[0].double()
    want = F.cross_entropy(logits[49:-1], text[0, 50:], reduction="none")
    assert made.loss.shape == (70,)
    assert (made.loss - want).abs().max() < 1e-5
    assert abs(made.perplexity - float(want.mean().exp())) < 1e-4 * made.perplexity


def test_quality_of_the_full_cache_is_zero_loss(lab, text):
    made = quality(lab, Strategy(), control(lab, text, prefill=50, step=7))
    assert abs(made.perplexity_change) < 1e-6 and made.mean_kl < 1e-6 and made.agreement == 1.0


def test_kl_and_agreement_by_hand(lab, text):
    against = control(lab, text, prefill=50, step=1)
    strategy = Strategy(keep=keep.Window(size=8, sinks=1))
    made = quality(lab, strategy, against)
    cache = KVCache(lab.model, strategy)
    own = feed(lab.model, cache, text[:, :-1], [50, *range(51, 120)])[0, 49:].double()
    p, q = against.logits.double().softmax(-1), own.softmax(-1)
    kl = (p * (p / q).log()).sum(-1)
    assert (made.kl - kl).abs().max() < 1e-5
    assert torch.equal(made.agree, own.argmax(-1) == against.logits.argmax(-1))
    assert made.mean_kl > 1e-3, "the strategy must bite, or this test shows nothing"


def test_wrong_protocols_are_named(lab, text):
    for arguments in ({"prefill": 0}, {"prefill": 120}, {"step": 0}):
        with pytest.raises(ValueError, match="allowed"):
            control(lab, text, **{"prefill": 50, **arguments})


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(),
        Strategy(store=store.Int(bits=8, group_size=8)),
        Strategy(store=store.Int(bits=4, group_size=8, residual=24)),
        Strategy(store=store.Int(bits=2, group_size=16, key_axis="token")),
        Strategy(keep=keep.Window(size=30)),
        Strategy(keep=keep.HeavyHitter(budget=30, recent=4)),
        Strategy(place=place.Offload(to="disk")),
    ],
    ids=str,
)
def test_predicted_bytes_are_measured_bytes(lab, text, strategy):
    cache = KVCache(lab.model, strategy)
    geometry = Geometry.from_config(lab.model.config)
    for stop in (20, 64, 119):
        cache.reset()
        feed(lab.model, cache, text, [stop])
        parts = predict(geometry, strategy, stop, bits=32)
        got = cache.memory().by_part(logical=True)
        assert sum(parts.values()) == pytest.approx(sum(got.values()), rel=0.01)
        for part, size in got.items():
            assert parts[part] == pytest.approx(size, rel=0.01)


def test_a_curve_is_its_points(lab):
    geometry, strategy = Geometry.from_config(lab.model.config), Strategy(keep=keep.HeavyHitter(budget=80))
    curve = predict_curve(geometry, strategy, [10, 200], bits=16)
    assert curve["keys"] == [3 * 2 * 10 * 16 * 2, 3 * 2 * 80 * 16 * 2]
    assert curve["columns"] == [0.0, 3 * 2 * 80 * 4]


def test_generate_is_greedy_and_counts(lab, device):
    run_ = lab.generate("5 6 7 8 9", max_new_tokens=9, every=4)
    detach(lab.model)
    want = lab.model.generate(
        torch.tensor([[5, 6, 7, 8, 9]], device=device), max_new_tokens=9, do_sample=False, pad_token_id=0, eos_token_id=1
    )
    assert list(run_.tokens) == want[0, 5:].tolist()
    assert run_.prompt_tokens == 5 and len(run_.token_times) == 8
    assert [seen for seen, _ in run_.growth] == [5, 9, 13]
    assert run_.memory.seen == 13


def test_several_turns_equal_one_text(lab):
    first = lab.generate("5 6 7 8 9", Strategy(), max_new_tokens=4)
    cache = KVCache(lab.model)
    lab.generate("5 6 7 8 9", cache=cache, max_new_tokens=4)
    turn = lab.generate(" ".join(map(str, [first.tokens[-1], 11, 12])), cache=cache, max_new_tokens=5)
    whole = lab.generate(" ".join(map(str, [5, 6, 7, 8, 9, *first.tokens, 11, 12])), max_new_tokens=5)
    assert turn.tokens == whole.tokens


def test_bad_prompts_are_named(lab):
    with pytest.raises(ValueError, match="empty"):
        lab.generate("")
    with pytest.raises(ValueError, match="allowed: 1 to 512"):
        lab.encode("5 " * 600)
    with pytest.raises(ValueError, match="more than the model's context"):
        lab.generate("5 " * 510, max_new_tokens=10)
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        lab.generate("5", max_new_tokens=0)
    assert len(lab.generate("5", max_new_tokens=3).tokens) >= 1
    cache = KVCache(lab.model)
    lab.generate("5 6 7 8", cache=cache, max_new_tokens=2)
    with pytest.raises(ValueError, match="already in this cache"):
        lab.generate("5 6 7 8", cache=cache)


def test_chunked_prefill_bounds_the_peak_and_loses_nothing_at_full_budget(lab, text):
    whole = lab.generate(text, Strategy(), max_new_tokens=6)
    pieces = lab.generate(text, Strategy(chunk=16), max_new_tokens=6)
    assert whole.tokens == pieces.tokens
    long, small = text.repeat(1, 4), keep.Window(size=16)
    peaks = [lab.generate(long, Strategy(keep=small, chunk=chunk), max_new_tokens=2).memory.high_water for chunk in (0, 16)]
    assert peaks[1] < 0.4 * peaks[0]


def test_cancelled_work_stops(lab, text):
    from kvlab.errors import Cancelled

    def stop(stage, done, total):
        if stage == "continuing":
            raise Cancelled

    with pytest.raises(Cancelled):
        lab.generate(text, max_new_tokens=10, progress=stop)


def test_the_attention_picture_is_the_attention(llama, ids):
    """Unpooled, the recorded picture is the exact softmax matrix of that head; pooled rows still sum to one key's share."""
    from tests.reference import masked_llama

    seen = {}

    def allowed(layer, scores):
        n = scores.shape[-1]
        see = torch.ones(n, n, dtype=torch.bool, device=scores.device).tril().expand_as(scores)
        seen[layer] = scores.masked_fill(~see, float("-inf")).softmax(-1)
        return see

    masked_llama(llama, ids[:1], allowed)
    cache = KVCache(llama)
    watch = Watch(layer=1, head=3, tokens=40)
    cache.watch(watch)
    feed(llama, cache, ids[:1], [30, *range(31, 41)])
    picture, evicted = watch.picture()
    assert (picture - seen[1][3].float().cpu()).abs().max() < 1e-5
    assert not evicted.any()
    assert watch.sink_share == pytest.approx(float(seen[1][3][:, :4].sum() / 40), abs=1e-5)
    cache = KVCache(llama, Strategy(keep=keep.Window(size=5, sinks=2)))
    watch = Watch(layer=1, head=3, tokens=40)
    cache.watch(watch)
    feed(llama, cache, ids[:1], list(range(1, 41)))
    _, evicted = watch.picture()
    i, j = torch.arange(40)[:, None], torch.arange(40)[None]
    assert torch.equal(evicted, (j <= i) & (j >= 2) & (j < i - 5))


def test_the_bench_compares_equals():
    """Every contender answers the same question: exact ones to 1e-5, codes near."""
    rows = {row.name: row for row in bench_attention(Shape(8, 2, 64, 200), steps=2)}
    for name in ("kvlab dense", "DynamicCache", "StaticCache"):
        assert rows[name].error < 1e-5
    assert rows["kvlab int8"].error < 0.02 and rows["kvlab int4"].error < 0.3
    with pytest.raises(ValueError, match="steps=0"):
        bench_attention(steps=0)


def test_whole_model_steps(llama):
    from kvlab.measure.whole_model import bench_model

    rows = bench_model(llama, [Strategy(), Strategy(store=store.Int(bits=8, group_size=8))], tokens=64, batch=2, steps=2)
    assert [row["name"] for row in rows] == ["DynamicCache", "full cache", "Int(group_size=8)"]
    assert rows[0]["bytes"] == 2 * 3 * 2 * 2 * 64 * 16 * 4 <= rows[1]["bytes"]
    assert rows[2]["bytes"] < rows[1]["bytes"] / 2
    assert all(row["step"] > 0 for row in rows)


@pytest.mark.model
def _nothing_is_lost_on_a_real_model(lab, against):
    """Within three times the gap between transformers' own two ways of attention, and the same next tokens but for near ties."""
    ids = against.ids[:, :224]
    kvlab.detach(lab.model)
    own, before = {}, lab.model.config._attn_implementation
    for way in ("sdpa", "eager"):
        lab.model.set_attn_implementation(way)
        cache = DynamicCache(config=lab.model.config)
        own[way] = torch.cat([forward(lab.model, part, cache)[0] for part in ids.split([160, 32, 1, 31], 1)])
    lab.model.set_attn_implementation(before)
    gap = (own["sdpa"] - own["eager"]).abs().max()
    for strategy in (
        Strategy(),
        Strategy(keep=keep.HeavyHitter(budget=512), store=store.Int(residual=512), place=place.Offload()),
    ):
        cache = KVCache(lab.model, strategy)
        got = torch.cat([forward(lab.model, part, cache)[0] for part in ids.split([160, 32, 1, 31], 1)])
        assert (got - own["sdpa"]).abs().max() <= 3 * gap
        two = own["sdpa"].topk(2).values
        clear = two[:, 0] - two[:, 1] > 1e-3
        assert torch.equal(got.argmax(-1)[clear], own["sdpa"].argmax(-1)[clear])
        assert int((~clear).sum()) <= 3  # near ties, counted


@pytest.mark.nightly
def test_the_real_model_by_the_reference_protocol():
    """SmolLM2, shortened: int8 is the full cache but for noise, a window without sinks is not; the pass key is found, or lost."""
    from kvlab.measure import needle
    from kvlab.texts import reference_text

    lab = kvlab.load("smollm2-135m", progress=False)
    against = control(lab, lab.encode(reference_text()[:3000])[:, :320], prefill=224)
    _nothing_is_lost_on_a_real_model(lab, against)
    exact = quality(lab, Strategy(store=store.Int(bits=8)), against)
    assert abs(exact.perplexity_change) < 0.002 and exact.agreement >= 0.985
    broken = quality(lab, Strategy(keep=keep.Window(size=64, sinks=0)), against)
    rescued = quality(lab, Strategy(keep=keep.Window(size=64, sinks=4)), against)
    assert broken.perplexity_change > 1.0 > rescued.perplexity_change
    assert needle(lab, tokens=160).found
    assert not needle(lab, Strategy(keep=keep.Window(size=48)), tokens=160, depth=0.3).found
