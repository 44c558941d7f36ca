"""A cache put away and taken up again gives the same bits; into anything else it is refused."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvlab import KVCache, Strategy, keep, place, resume, save, store
from kvlab.cache import forward
from kvlab.strategy import methods
from tests.conftest import make_llama

STRATEGIES = [
    *(Strategy(store=method()) for method in methods("store").values()),
    Strategy(store=store.Int(bits=3, group_size=8, residual=5, sinks_exact=3)),
    Strategy(store=store.KIVI(group_size=8, residual=16)),
    Strategy(keep=keep.Window(size=20, sinks=3), store=store.Int(bits=4, group_size=8)),
    Strategy(keep=keep.HeavyHitter(budget=24, recent=8), store=store.Rotated(), place=place.Offload()),
    Strategy(keep=keep.HeavyHitter(budget=24, recent=8), store=store.Fp8()),
    Strategy(keep=keep.Window(size=20, sinks=3, positions="cache")),
    Strategy(keep=keep.ExpectedAttention(budget=24)),
    Strategy(keep=keep.Quest(budget=16, page=8, dense=1)),
    Strategy(keep=keep.Merge(keep.HeavyHitter(budget=24, recent=8), threshold=-1.0)),
    Strategy(keep=keep.AdaKV(keep.HeavyHitter(budget=24, recent=8)), store=store.Paged(page=4)),
]


@pytest.mark.many
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_it_goes_on_bit_for_bit(strategy, padded, ids, tmp_path):
    model = make_llama(head_dim=32)
    padding = torch.ones_like(ids)
    padding[0, : 5 * padded] = 0
    seen = padding if padded else None
    cache = KVCache(model, strategy)
    for start, stop in ((0, 30), (30, 31), (31, 34)):
        forward(model, ids[:, start:stop], cache, None if seen is None else seen[:, :stop])
    path = save(cache, tmp_path / "away.safetensors")
    again = resume(model, path, strategy)
    assert again.strategy == strategy and again.get_seq_length() == 34
    assert again.memory().logical == cache.memory().logical and again.high_water == cache.high_water
    for start, stop in ((34, 35), (35, 40)):
        part = None if seen is None else seen[:, :stop]
        want = forward(model, ids[:, start:stop], cache, part)
        assert torch.equal(forward(model, ids[:, start:stop], again, part), want)
    for one, other in zip(cache.layers, again.layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.dense(), other.dense(), strict=True))


def test_who_spoke_is_known_afterwards(ids, tmp_path):
    model = make_llama()
    cache = KVCache(model, Strategy(keep=keep.Conversation(budget=30, inner=keep.KeyNorm(recent=0, sinks=0))))
    for role, tokens in (("user", 4), ("assistant", 20), ("user", 4), ("assistant", None)):
        cache.annotate(role, tokens)
    forward(model, ids[:1, :32], cache)
    again = resume(model, save(cache, tmp_path / "talk.safetensors"))
    assert again.spans == cache.spans and again.memory().evicted == cache.memory().evicted > 0
    for start in (32, 36):
        part = ids[:1, start : start + 4]
        assert torch.equal(forward(model, part, cache), forward(model, part, again))
    assert all(torch.equal(a.dense()[2], b.dense()[2]) for a, b in zip(cache.layers, again.layers, strict=True))


def test_another_process_takes_it_up(ids, tmp_path):
    model = make_llama()
    how = Strategy(keep=keep.HeavyHitter(budget=24, recent=8), store=store.Int(bits=4, group_size=8), place=place.Offload())
    cache, other = KVCache(model, how), KVCache(model, how)
    for one in (cache, other):
        forward(model, ids[:, :34], one)
    cache.park(tmp_path / "away.safetensors")
    save_file({"want": forward(model, ids[:, 34:], other), "ids": ids}, tmp_path / "want.safetensors")
    code = f"""
import torch
from safetensors.torch import load_file
from kvlab import resume
from kvlab.cache import forward
from tests.conftest import make_llama
model, kept = make_llama(), load_file(r"{tmp_path / "want.safetensors"}")
torch.set_num_threads({torch.get_num_threads()})
got = forward(model, kept["ids"][:, 34:], resume(model, r"{tmp_path / "away.safetensors"}"))
print(float((got - kept["want"]).abs().max()))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert float(said.split()[-1]) == 0.0


def test_what_does_not_belong_is_refused(ids, tmp_path):
    model, path = make_llama(), tmp_path / "away.safetensors"
    cache = KVCache(model, Strategy(store=store.Int(bits=4, group_size=8)))
    forward(model, ids, cache)
    save(cache, path)
    with pytest.raises(ValueError, match="another model"):
        resume(make_llama(seed=1), path)
    with pytest.raises(ValueError, match="another model"):
        resume(make_llama(num_hidden_layers=2), path)
    with pytest.raises(ValueError, match=r"was written with Int\(bits=4"):
        resume(model, path, Strategy(store=store.Int(bits=8, group_size=8)))
    with pytest.raises(FileNotFoundError):
        resume(model, tmp_path / "nothing")
    tensors = load_file(path)
    save_file(tensors, tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match="no saved cache"):
        resume(model, tmp_path / "plain.safetensors")
    whole = path.read_bytes()
    for cut in (4, 100, len(whole) - 100):
        (tmp_path / "cut.safetensors").write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="damaged or no saved cache"):
            resume(model, tmp_path / "cut.safetensors")
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["kvlab"])
    save_file(tensors, tmp_path / "newer.safetensors", {"kvlab": json.dumps(header | {"version": 99})})
    with pytest.raises(ValueError, match="version 99"):
        resume(model, tmp_path / "newer.safetensors")
    short = dict(tensors)
    short.pop(next(iter(short)))
    save_file(short, tmp_path / "short.safetensors", {"kvlab": json.dumps(header)})
    with pytest.raises(ValueError, match="not those that were saved"):
        resume(model, tmp_path / "short.safetensors")
    flipped = bytearray(whole)
    flipped[-100] ^= 255
    (tmp_path / "flipped.safetensors").write_bytes(bytes(flipped))
    with pytest.raises(ValueError, match="not those that were saved"):
        resume(model, tmp_path / "flipped.safetensors")


def test_a_folder_that_is_not_there_leaves_nothing_behind(ids, tmp_path):
    model = make_llama()
    cache = KVCache(model)
    forward(model, ids, cache)
    with pytest.raises(FileNotFoundError, match="no folder"):
        save(cache, tmp_path / "none" / "away.safetensors")
    with pytest.raises(OSError, match="no ordinary file"):
        save(cache, tmp_path)
    with pytest.raises(ValueError, match="NoneType is no"):
        save(None, tmp_path / "away.safetensors")
    assert not list(tmp_path.iterdir())
    forward(model, ids[:, :1], cache)
