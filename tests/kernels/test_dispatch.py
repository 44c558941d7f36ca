"""Where the Triton kernels run, kvlab's layers give what torch's way gives, whatever the store, and keep what it keeps."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvlab
from kvlab import KVCache, Strategy, attach, attention, keep, store
from kvlab.cache import forward
from kvlab.lab import Lab
from kvlab.serving import Engine, Sampling
from kvlab.store.base import LayerShape
from kvlab_kernels import decode, quantize, scored
from tests.panels.conftest import Characters

PROMPT, STEPS = 21, 2


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = dict(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=64, num_hidden_layers=1
    )
    made = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=256, initializer_range=0.5, **sizes)).eval()
    attach(made)
    return made


def run(model, strategy, batch=1, padded=False, steps=STEPS):
    """Logits of the last token after the prompt and after each step, and the columns held at the end."""
    torch.manual_seed(1)
    ids = torch.randint(0, 64, (batch, PROMPT + STEPS))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :5] = 0
    cache, logits = KVCache(model, strategy), []
    for start, stop in [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, PROMPT + steps))]:
        given = dict(padding=mask[:, :stop]) if padded else {}
        with torch.no_grad():
            logits.append(forward(model, ids[:, start:stop], cache, **given)[:, -1])
    return torch.stack(logits), [layer.dense()[2] for layer in cache.layers]


@pytest.fixture
def calls(monkeypatch):
    """How often each kernel was asked."""
    count = dict.fromkeys(("decode_attention", "paged_decode_attention", "scored_decode_attention", "scored_attention"), 0)

    def counting(module, name):
        whole = getattr(module, name)

        def called(*args, **options):
            count[name] += 1
            return whole(*args, **options)

        monkeypatch.setattr(module, name, called)

    for name in count:
        counting(scored if name == "scored_attention" else decode, name)
    return count


INT = store.Int(bits=4, group_size=8)
STORES = [
    (store.Dense(), {}),
    (INT, {}),
    (store.Int(bits=3, group_size=8, residual=3), {}),
    (store.Int(bits=8, group_size=8, symmetric=True), {}),
    (store.Int(bits=4, group_size=16, levels="normal"), {}),
    (store.Int(bits=4, group_size=8, sinks_exact=3), {}),
    (store.KIVI(bits=2, group_size=8, residual=8), {}),
    (store.Fp8(), {}),
    (store.Fp8(format="e5m2"), {}),
    (store.PreRope(store.Dense()), {}),
    (store.PreRope(store.Int(bits=4, group_size=8, sinks_exact=2)), {}),
    (store.Rotated(INT), {}),
    (store.Rotated(INT, values=False), {}),
    (store.Mixed(bits=4, value_bits=2, group_size=8), {}),
    (INT, dict(padded=True, batch=2)),
    (store.Int(bits=4, group_size=8, sinks_exact=3), dict(padded=True, batch=2)),
]


@pytest.mark.parametrize("how, more", STORES, ids=str)
def test_every_store_is_read_as_it_lies(model, how, more, calls, monkeypatch):
    want, _ = run(model, Strategy(store=how), steps=1, **more)
    assert not any(calls.values())
    monkeypatch.setenv("KVLAB_FUSED", "1")
    assert kvlab.backend("cpu") == "triton"
    got, _ = run(model, Strategy(store=how), steps=1, **more)
    assert calls["decode_attention"] == 1
    assert (got - want).abs().max() < 2e-4 * want.abs().max()


SCORED = ("scored_attention", "scored_decode_attention")
H2O = keep.HeavyHitter(budget=12, recent=4)
KEEPS = [
    (Strategy(H2O), SCORED, False),
    (Strategy(H2O), SCORED, True),
    (Strategy(H2O, store.Int(bits=4, group_size=8, sinks_exact=2)), SCORED, True),
    (Strategy(keep.SnapKV(budget=16, recent=8)), SCORED, False),
    (Strategy(keep.AdaKV(H2O), store.Paged(page=4)), SCORED, False),
    (Strategy(keep.AdaKV(H2O), store.Paged(page=4)), SCORED, True),
    (Strategy(keep.Merge(H2O)), SCORED, False),
    (Strategy(keep.Window(size=12)), ("decode_attention",), True),
    (Strategy(keep.KeyDiff(budget=12, recent=4), store.PreRope(INT)), ("decode_attention",), False),
    (Strategy(keep.TOVA(budget=12)), (), False),
]


@pytest.mark.parametrize("how, kernels, padded", KEEPS, ids=str)
def test_every_keep_holds_the_same(model, how, kernels, padded, calls, monkeypatch):
    """The evidence is the same sums, so the same tokens stay; methods that make something else of the weights go torch's way."""
    more = dict(padded=padded, batch=1 + padded)
    want, held = run(model, how, **more)
    monkeypatch.setenv("KVLAB_FUSED", "1")
    got, kept = run(model, how, **more)
    asked = {name for name, count in calls.items() if count}
    assert asked == set(kernels) - ({"scored_attention"} if padded else set())
    for mine, theirs in zip(kept, held, strict=True):
        assert torch.equal(mine, theirs)
    assert (got - want).abs().max() < 2e-4 * want.abs().max()


@pytest.mark.parametrize(
    "how",
    [INT, store.Int(bits=2, group_size=8, key_axis="token", scales="float32"), store.KIVI(group_size=8, residual=8)],
    ids=str,
)
def test_codes_are_written_by_the_kernel_and_are_the_same(model, how, monkeypatch):
    """Straight into the buffers, while a prompt is read and step by step; and where numbers are too large for the scales, as torch says it."""
    shape = LayerShape(0, 1, 1, 2, 16, 16, torch.float32, torch.device("cpu"))
    plain, fused = how.state(shape), how.state(shape)
    pieces = [torch.randn(1, 2, n, 16) for n in (21, 1, 1, 9)]
    for x in pieces:
        plain.append(x, 2 * x)
        plain.settle()
    written = []
    whole = quantize.quantize
    monkeypatch.setattr(quantize, "quantize", lambda *args: written.append(args[0].shape[2]) or whole(*args))
    monkeypatch.setenv("KVLAB_FUSED", "1")
    for x in pieces:
        fused.append(x, 2 * x)
        fused.settle()
    assert written
    for mine, theirs in zip(fused.buffers(), plain.buffers(), strict=True):
        assert len(mine) == len(theirs) and (not len(mine) or torch.equal(mine.view(), theirs.view()))
    huge = torch.full((1, 2, 32, 16), 1e30)
    huge[..., 0] = -1e30
    if getattr(how, "scales", "float16") == "float16":
        fused.append(huge, huge)
        with pytest.raises(ValueError, match="cannot be quantized"):
            fused.settle()


def test_one_scale_for_all_keys_goes_the_way_of_torch(model, calls, monkeypatch):
    monkeypatch.setenv("KVLAB_FUSED", "1")
    run(model, Strategy(store=store.Int(bits=8, group_size=8, key_axis="tensor")))
    assert not any(calls.values())
    assert attention.backend("cpu") == "triton"


def test_a_keep_that_changes_the_evidence_is_asked(model, calls, monkeypatch):
    """One around another, with an `observe` of its own: the kernels cannot know what it makes of the weights."""
    from dataclasses import dataclass

    from kvlab.strategy import methods

    @dataclass(frozen=True)
    class Inverse(keep.PyramidKV):
        def observe(self, weights, after):
            return -super().observe(weights, after)

    try:
        how = Strategy(Inverse(keep.HeavyHitter(budget=12, recent=2)))
        _, want = run(model, how)
        monkeypatch.setenv("KVLAB_FUSED", "1")
        _, got = run(model, how)
    finally:
        methods("keep").pop("Inverse", None)
    assert torch.equal(got[0], want[0]) and not any(calls.values())


def test_what_must_be_differentiated_goes_the_way_of_torch(model, calls, monkeypatch):
    monkeypatch.setenv("KVLAB_FUSED", "1")
    cache, ids = KVCache(model, Strategy(store=INT)), torch.randint(0, 64, (1, 20))
    forward(model, ids, cache)
    out = model(ids[:, :1], cache=cache).logits
    out.sum().backward()
    assert not any(calls.values()) and model.model.layers[0].self_attn.q_proj.weight.grad is not None
    model.zero_grad()


@pytest.mark.parametrize(
    "how",
    [
        Strategy(),
        Strategy(store=store.Int(bits=8, group_size=8)),
        Strategy(keep.Window(size=12, sinks=2)),
        Strategy(store=store.Fp8()),
    ],
    ids=str,
)
def test_an_engine_reads_its_blocks_where_they_lie(model, how, calls, monkeypatch):
    """Requests of several lengths in one launch: whole blocks through the table, tokens of blocks that are not codes yet beside them."""
    lab = Lab("tiny", model, Characters())

    def logits():
        engine, seen = Engine(lab, how, kv_memory="1 MB", block_size=8), []
        whole = engine._run

        def watched(plan):
            seen.append(whole(plan))
            return seen[-1]

        monkeypatch.setattr(engine, "_run", watched)
        engine.generate([list(range(5, 5 + count)) for count in (3, 21)], Sampling(max_new_tokens=3, ignore_eos=True))
        return torch.cat(seen)

    want = logits()
    assert not any(calls.values())
    monkeypatch.setenv("KVLAB_FUSED", "1")
    got = logits()
    assert calls["paged_decode_attention"] == 2
    assert (got - want).abs().max() < 2e-4 * want.abs().max()
