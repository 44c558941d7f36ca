"""transformers' own ways of generating, with kvlab's cache passed in: the same tokens as with transformers' cache."""

from __future__ import annotations

import copy
import inspect
import threading

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, StaticCache, pipeline

from kvlab import KVCache, Strategy, UnsupportedModel, attach, detach, keep, place, store
from kvlab.cache import forward
from tests import zoo
from tests.conftest import make_llama
from tests.reference import ours, plain
from tests.strategies import one_by_one

ARGUMENT = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
BIG = 4096
FULL = one_by_one(BIG)
MODELS = ["llama", "mistral", "gemma2", "gpt_oss"]


def generate(model, ids, strategy=None, **options):
    before = None
    if strategy is None:
        detach(model)
        before, extra = model.config._attn_implementation, {}
        model.set_attn_implementation("eager")
    else:
        extra = {ARGUMENT: KVCache(model, strategy)}
    torch.manual_seed(0)
    options = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, "eos_token_id": 96} | options
    out = model.generate(ids, attention_mask=(ids != 0).long(), **options, **extra)
    if before is not None:
        model.set_attn_implementation(before)
    return out


WAYS = {
    "greedy": {},
    "beams": {"num_beams": 4},
    "beams, several returned": {"num_beams": 4, "num_return_sequences": 3},
    "samples": {"do_sample": True, "num_return_sequences": 3, "temperature": 1.5},
}


@pytest.mark.many
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_generate_gives_the_tokens_of_transformers(name, way, ids):
    model = zoo.model(name)
    ids = ids.clone()
    ids[0, :5] = 0  # left padding
    want = generate(model, ids, **WAYS[way])
    for strategy in FULL[
        (MODELS.index(name) + list(WAYS).index(way)) % 4 :: 4
    ]:  # every strategy at every way, on one of the models
        assert torch.equal(generate(model, ids, strategy, **WAYS[way]), want), strategy


@pytest.mark.many
@pytest.mark.parametrize("name", MODELS)
def test_prompt_lookup_equals_greedy(name, ids):
    model = zoo.model(name)
    prompt = torch.cat([ids[:1, :12], ids[:1, :12], ids[:1, :12]], 1)  # long enough to leave the windows behind
    want = generate(model, prompt)
    for strategy in FULL[MODELS.index(name) % 2 :: 2]:
        assert torch.equal(generate(model, prompt, strategy, prompt_lookup_num_tokens=3), want), strategy


def test_assisted_decoding_equals_greedy(ids):
    model, assistant = zoo.model("llama"), make_llama(seed=3, num_hidden_layers=1)
    want = generate(model, ids[:1])
    for strategy in FULL:
        assert torch.equal(generate(model, ids[:1], strategy, assistant_model=assistant), want), strategy


def test_assisted_decoding_after_eviction_is_refused(ids):
    with pytest.raises(RuntimeError, match="after eviction"):
        generate(zoo.model("llama"), ids[:1], Strategy(keep=keep.Window(size=8)), prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("indices", [torch.tensor([1]), torch.tensor([1, 0, 1]), torch.tensor([False, True])], ids=str)
def test_rows_are_chosen_and_repeated_as_by_transformers(ids, indices):
    model = zoo.model("gemma2")
    detach(model)
    model.set_attn_implementation("eager")
    own = DynamicCache(config=model.config)
    forward(model, ids[:, :20], own)
    for strategy in FULL:
        cache = KVCache(model, strategy)
        forward(model, ids[:, :20], cache)
        reference = copy.deepcopy(own)
        for each in (cache, reference):
            each.batch_select_indices(indices)
            each.batch_repeat_interleave(2)
        rest = torch.cat([ids, ids, ids])[: 2 * (1 if indices.dtype == torch.bool else len(indices)), 20:25]
        got = forward(model, rest, cache)
        detach(model)
        assert (got - forward(model, rest, reference)).abs().max() < 1e-5


def test_the_pipeline_takes_the_cache():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, **{f"w{i}": i for i in range(2, 97)}}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    model = zoo.model("llama")
    detach(model)
    run = pipeline("text-generation", model=model, tokenizer=tokenizer, device=model.device)
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": 96}
    want = run("w5 w7 w9 w11", **options)[0]["generated_text"]
    cache = KVCache(model, Strategy(keep=keep.HeavyHitter(budget=BIG)))
    assert run("w5 w7 w9 w11", **options, **{ARGUMENT: cache})[0]["generated_text"] == want
    assert cache.get_seq_length() == 4 + 9


def test_many_turns_through_generate(ids):
    model = zoo.model("gemma2")
    for strategy in FULL:
        cache, text, again = KVCache(model, strategy), ids[:1, :9], ids[:1, :9]
        for turn in range(3):
            options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": 96}
            text = model.generate(text, attention_mask=torch.ones_like(text), **options, **{ARGUMENT: cache})
            detach(model)
            model.set_attn_implementation("eager")
            again = model.generate(again, attention_mask=torch.ones_like(again), **options)
            attach(model)
            assert torch.equal(text, again), (strategy, turn)
            text = again = torch.cat([text, ids[1:, 4 * turn : 4 * turn + 4]], 1)


@pytest.mark.nightly
def test_a_compiled_model_gives_the_same(ids):
    """Dynamo breaks its graph at the cache and at attention; what lies between is compiled (here for the backend that needs no compiler)."""
    model = make_llama(seed=5, num_hidden_layers=1)
    want = plain(model, ids, [20, 21, 40])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    for strategy in (
        Strategy(),
        Strategy(keep=keep.HeavyHitter(budget=BIG), store=store.Int(residual=BIG), place=place.Offload()),
    ):
        cache, out, start = KVCache(model, strategy), [], 0
        with torch.inference_mode():
            for stop in (20, 21, 40):
                out.append(compiled(ids[:, start:stop], **{ARGUMENT: cache}, use_cache=True).logits)
                start = stop
        assert (torch.cat(out, 1) - want).abs().max() < 1e-5
    torch._dynamo.reset()


def test_a_static_cache_is_refused_beside_ours_and_works_without(ids):
    model = make_llama()
    with pytest.raises(ValueError, match="cache_implementation"):
        generate(model, ids, Strategy(), cache_implementation="static")
    want = plain(model, ids, [40])
    attach(model)
    detach(model)
    static = StaticCache(config=model.config, max_cache_len=64)
    attach(model)  # someone else's cache while ours is attached
    got = torch.cat([forward(model, ids[:, :30], static), forward(model, ids[:, 30:], static)], 1)
    assert (got - want).abs().max() < 1e-5


def test_several_caches_on_one_model_at_once(ids):
    model = zoo.model("gemma2")
    strategies = [Strategy(), Strategy(keep=keep.Window(size=9, sinks=3)), Strategy(store=store.Int(bits=4, group_size=8))]
    alone = [ours(model, strategy, ids, [10, 20, 21, 40])[0] for strategy in strategies]
    caches = [KVCache(model, strategy) for strategy in strategies]
    parts: list[list[torch.Tensor]] = [[] for _ in strategies]
    for start, stop in ((0, 10), (10, 20), (20, 21), (21, 40)):
        for cache, out in zip(caches, parts, strict=True):
            out.append(forward(model, ids[:, start:stop], cache))
    for out, want in zip(parts, alone, strict=True):
        assert torch.equal(torch.cat(out, 1), want)


def test_a_cache_a_thread(ids):
    model = zoo.model("llama")
    strategies = [Strategy(), Strategy(keep=keep.HeavyHitter(budget=12, recent=4, sinks=2)), Strategy(store=store.Int(bits=4, group_size=8), place=place.Offload()), Strategy(store=store.Int(bits=2, group_size=16))]  # fmt: skip
    cuts = [10, *range(11, 41)]
    alone = [ours(model, strategy, ids, cuts)[0] for strategy in strategies]
    found: list[torch.Tensor | BaseException | None] = [None] * len(strategies)

    def work(number: int) -> None:
        try:
            found[number] = ours(model, strategies[number], ids, cuts)[0]
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(strategies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, want in zip(found, alone, strict=True):
        assert isinstance(got, torch.Tensor), got
        assert torch.equal(got, want)


def test_attach_and_detach_leave_every_family_as_it_was(ids):
    for name in zoo.FAMILIES:
        model = zoo.model(name)
        detach(model)
        before, want = model.config._attn_implementation, plain(model, ids, [40])
        attach(model)
        attach(model)
        assert model.config._attn_implementation == "kvlab"
        detach(model)
        assert model.config._attn_implementation == before
        assert torch.equal(plain(model, ids, [40]), want)


# wrong use


def test_a_cache_of_another_model_is_refused(ids):
    model, other = make_llama(), make_llama(seed=1)
    cache = KVCache(model)
    attach(other)
    with pytest.raises(ValueError, match="made for another model"):
        forward(other, ids, cache)
    assert cache.get_seq_length() == 0
    forward(model, ids, cache)  # nothing was spoilt


def test_other_numbers_than_the_cache_holds_are_refused(ids):
    model = make_llama()
    cache = KVCache(model)
    forward(model, ids[:, :10], cache)
    model.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"bfloat16.*float32"):
        forward(model, ids[:, 10:12], cache)
    cache.reset()
    forward(model, ids[:, :10], cache)  # a new start takes the model as it is now


def test_a_batch_that_changes_between_turns_is_refused(ids):
    model = make_llama()
    cache = KVCache(model)
    forward(model, ids[:, :10], cache)
    with pytest.raises(ValueError, match="batch has 1 rows"):
        forward(model, ids[:1, 10:12], cache)


def test_a_mask_of_the_wrong_length_is_refused(ids):
    model = make_llama()
    cache = KVCache(model)
    forward(model, ids[:, :10], cache)
    for columns in (2, 11, 13):
        with pytest.raises(ValueError, match="attention mask has"):
            forward(model, ids[:, 10:12], cache, torch.ones(2, columns, dtype=torch.long, device=ids.device))
    assert cache.get_seq_length() == 10


def test_a_model_on_two_devices_is_refused():
    model = make_llama()
    model.model.layers[1].to("meta")
    with pytest.raises(UnsupportedModel, match=r"on 2 devices \(.*meta"):
        KVCache(model)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_keys_that_are_not_finite_are_refused(ids, bad):
    model = make_llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3, 3] = bad
    with pytest.raises(ValueError, match=r"layer 1.*not finite"):
        forward(model, ids, KVCache(model))


def test_a_step_that_failed_half_way_is_noticed(ids):
    model = make_llama()
    cache = KVCache(model)
    forward(model, ids[:, :10], cache)
    kept = model.model.layers[2].self_attn.k_proj.weight.clone()
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        forward(model, ids[:, 10:12], cache)
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight.copy_(kept)
    with pytest.raises((RuntimeError, ValueError), match="half-way"):
        forward(model, ids[:, 10:12], cache)
    cache.reset()
    assert (forward(model, ids, cache) - plain(model, ids, [40])).abs().max() < 1e-5


@pytest.mark.many
@pytest.mark.parametrize("method", [store.Int(bits=4, group_size=8), store.KIVI(group_size=8, residual=16), store.Fp8(), store.Int(bits=2, group_size=16, key_axis="tensor")], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_drafts_leave_no_trace_in_codes(name, method, ids):
    """A draft that is taken back must not have set the scale of a group, or pushed a token out of the plain tail."""
    model, strategy = zoo.model(name), Strategy(store=method)
    plainly, drafted = KVCache(model, strategy), KVCache(model, strategy)
    for layer in drafted.layers:
        layer.activate_past_recording()
    for start, stop in ((0, 21), (21, 24), (24, 25), (25, 40)):
        want = forward(model, ids[:, start:stop], plainly)
        assert torch.equal(forward(model, ids[:, start:stop], drafted), want)
        drafted.crop(0)
        forward(model, ids[:, :6], drafted)
        drafted.crop(-6)


def test_cropping_takes_transformers_sign(ids):
    cache = KVCache(make_llama())
    with pytest.raises(ValueError, match=r"crop\(30\)"):
        cache.crop(30)


def test_a_detached_model_is_named_and_the_cache_lives_on(ids):
    model = make_llama()
    cache = KVCache(model)
    forward(model, ids[:, :10], cache)
    detach(model)
    with pytest.raises(ValueError, match="kvlab is not attached to"):
        forward(model, ids[:, 10:12], cache)
    attach(model)
    got = forward(model, ids[:, 10:], cache)
    assert (got - plain(model, ids, [40])[:, 10:]).abs().max() < 1e-5


def test_a_cache_does_not_wait_for_ever(ids):
    """transformers does not say when assisted decoding is over: what no crop has confirmed within 256 tokens is written down."""
    model, strategy = zoo.model("mistral"), Strategy(store=store.Int(bits=8, group_size=8))
    cache = KVCache(model, strategy)
    cache.activate_past_recording()
    waiting = []
    for _ in range(10):
        forward(model, ids[:, :40], cache)
        waiting.append(len(cache.layers[0].store.tail[0]))
    assert waiting == [40, 80, 120, 160, 200, 240, 280, 43, 83, 123]  # of the window of 11 a group of 8 was written down
    cache.layers[0].record_past = False  # as transformers ends it where it does
    assert len(cache.layers[0].store) == 11 and len(cache.layers[0].store.tail[0]) < 8


def test_after_assisted_decoding_codes_are_written_again(ids):
    model, strategy = zoo.model("llama"), Strategy(store=store.Int(bits=8, group_size=8))
    cache = KVCache(model, strategy)
    model.generate(ids[:1], prompt_lookup_num_tokens=3, max_new_tokens=8, do_sample=False, pad_token_id=0, **{ARGUMENT: cache})
    for _ in range(8):
        forward(model, ids[:1, :40], cache)
    coded = len(cache.layers[0].store.keys)
    assert coded > 256
    for layer in cache.layers:
        layer.record_past = False
    assert len(cache.layers[0].store.tail[0]) < 8 and len(cache.layers[0].store.keys) > coded


def test_a_refused_crop_changes_nothing(ids):
    """Layers of which some have evicted: all are asked before any is cropped."""
    model = make_llama()
    cache = KVCache(model, Strategy(keep=keep.PyramidKV(keep.SnapKV(budget=32, recent=4, sinks=1))))
    forward(model, ids[:, :40], cache)
    with pytest.raises(RuntimeError, match="after eviction"):
        cache.crop(-1)
    assert {layer.seen for layer in cache.layers} == {40}
    assert forward(model, ids[:, :1], cache).isfinite().all()
    with pytest.raises(ValueError, match=r"crop\('a'\)"):
        cache.crop("a")
