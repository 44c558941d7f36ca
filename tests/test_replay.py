"""A prompt that the model read once is taken in by other caches as if the model had read it again."""

import pytest
import torch

from kvlab import KVCache, Strategy, keep, store
from kvlab.attention import Watch
from kvlab.cache import forward
from kvlab.lab import Lab
from kvlab.replay import Prompts
from tests import zoo
from tests.conftest import make_llama
from tests.strategies import one_by_one

WAYS = [
    Strategy(),
    Strategy(keep=keep.Window(size=8)),
    Strategy(keep=keep.HeavyHitter(budget=12, recent=4)),
    Strategy(keep=keep.SnapKV(budget=24, recent=8), store=store.Int(bits=8, group_size=8)),
    Strategy(keep=keep.Quest(budget=16, page=4, dense=1)),
]


def lab_of(family: str) -> Lab:
    return Lab(family, zoo.model(family), None)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3n", "gpt_oss", "gpt2"])
def test_a_replayed_prompt_is_the_prompt(family: str, ids: torch.Tensor) -> None:
    lab, text = lab_of(family), ids[:1]
    with lab.replaying():
        for strategy in WAYS:
            plain, again = KVCache(lab.model, strategy), KVCache(lab.model, strategy)
            first = forward(lab.model, text[:, :30], plain, last=True)
            assert (lab.prefill(text[:, :30], again) - first).abs().max() < 1e-4
            assert again.memory() == plain.memory()
            for one in range(30, 33):
                got = [forward(lab.model, text[:, one : one + 1], cache) for cache in (again, plain)]
                assert (got[0] - got[1]).abs().max() < 2e-3, (
                    strategy
                )  # evidence is gathered with other roundings, and a code may tip over
            pairs = [(a, b) for a, b in zip(again.layers, plain.layers, strict=True) if b.is_initialized]
            assert all(torch.equal(a.dense()[2], b.dense()[2]) for a, b in pairs)


def test_it_passes_the_model_once(ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    lab, text = Lab("tiny", make_llama(), None), ids[:1]
    with lab.replaying():
        first = lab.prefill(text, KVCache(lab.model))
        caches = [KVCache(lab.model, strategy) for strategy in one_by_one(64)]
        monkeypatch.setattr(type(lab.model), "forward", lambda *_, **__: pytest.fail("the model ran"))
        for cache in caches:
            assert torch.equal(lab.prefill(text, cache), first)
            assert cache.get_seq_length() == 40
            cache.close()


def test_what_must_pass_the_model_does(ids: torch.Tensor) -> None:
    """Pieces, a cache that has read something, a watched one; and everything outside of the block."""
    lab, text = Lab("tiny", make_llama(), None), ids[:1]
    prompts = Prompts()
    used, watched = KVCache(lab.model), KVCache(lab.model)
    forward(lab.model, text, used)
    watched.watch(Watch(layer=0, head=0, tokens=40))
    assert prompts.serves(KVCache(lab.model)) and not any(map(prompts.serves, (used, watched)))
    lab.prefill(text, KVCache(lab.model))
    assert lab._prompts is None
    with lab.replaying():
        lab.prefill(text, KVCache(lab.model), 16)
        assert not lab._prompts._kept  # type: ignore[union-attr]
        lab.prefill(text, KVCache(lab.model))
        assert [ids for _, ids in lab._prompts._kept] == [tuple(text[0].tolist())]  # type: ignore[union-attr]


def test_old_prompts_go_first(ids: torch.Tensor) -> None:
    ids_ = ids
    model, prompts = make_llama(), Prompts(limit=0)
    for row in (0, 1):
        prompts.prefill(model, ids[row : row + 1], KVCache(model))
        assert [ids for _, ids in prompts._kept] == [tuple(ids_[row].tolist())]  # one stays, whatever the limit


def test_other_weights_are_another_model(ids: torch.Tensor) -> None:
    lab = Lab("tiny", make_llama(), None)
    with lab.replaying():
        first = lab.prefill(ids[:1], KVCache(lab.model))
        lab.model.load_state_dict(make_llama(seed=5).state_dict())
        again = lab.prefill(ids[:1], KVCache(lab.model))
        assert torch.equal(again, forward(lab.model, ids[:1], KVCache(lab.model), last=True)) and not torch.equal(first, again)
        lab.model.to(torch.bfloat16)
        assert lab.prefill(ids[:1], KVCache(lab.model)).dtype == torch.bfloat16
