"""Honest bytes: what ``memory()`` says equals what torch really holds."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvlab import KVCache, Strategy, keep, place, store
from tests.reference import feed

STRATEGIES = [
    Strategy(),
    Strategy(keep=keep.Window(size=16)),
    Strategy(keep=keep.HeavyHitter(budget=16, recent=8, sinks=2)),
    Strategy(store=store.Int(bits=4, group_size=8, residual=8)),
    Strategy(store=store.Int(bits=8, group_size=8, key_axis="token")),
    Strategy(keep=keep.HeavyHitter(budget=24, recent=12, sinks=2), store=store.Int(bits=4, group_size=8)),
    Strategy(store=store.Int(bits=8, group_size=8), place=place.Offload(to="disk")),
]


class Storages(TorchDispatchMode):
    """Every storage torch makes while the mode is on, and which of them are still alive."""

    def __init__(self):
        super().__init__()
        self.alive: dict[int, tuple[weakref.ref, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.alive[storage.data_ptr()] = (weakref.ref(storage), storage.nbytes())
        return out


def reachable(cache) -> int:
    """Bytes of the distinct storages that hang on the cache, whatever attribute they hang on."""
    seen: dict[int, int] = {}
    todo, done = [cache.layers, cache.place], set()
    while todo:
        one = todo.pop()
        if id(one) in done or isinstance(one, type | weakref.ref):
            continue
        done.add(id(one))
        if isinstance(one, torch.Tensor):
            seen[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        elif isinstance(one, dict):
            todo += list(one.values())
        elif isinstance(one, list | tuple):
            todo += list(one)
        elif hasattr(one, "__dict__") and type(one).__module__.startswith("kvlab"):
            todo += list(vars(one).values())
    return sum(seen.values())


@pytest.mark.many
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_memory_equals_the_storages_torch_made(llama, ids, strategy, device):
    cache = KVCache(llama, strategy)
    more = torch.randint(3, 97, (2, 60), generator=torch.Generator().manual_seed(1)).to(device)
    feed(llama, cache, torch.cat([ids, more], 1), [40, *range(41, 101)])
    gc.collect()
    memory = cache.memory()
    on_disk = memory.by_device().get("disk", 0)
    assert reachable(cache) == memory.allocated - on_disk + cache.place.in_flight
    assert memory.logical <= memory.allocated <= 1.06 * memory.logical + 16 * 8 * 1024


@pytest.mark.parametrize("strategy", STRATEGIES[:6], ids=str)
def test_the_high_water_mark_covers_what_was_alive(llama, ids, strategy, device):
    """No storage of the cache that torch made during a prefill and a few steps rises above the mark we report."""
    if device.type != "cpu":
        pytest.skip("the allocator's own statistics are used on a GPU")
    feed(llama, KVCache(llama, strategy), ids, [32, 33, 34])  # whatever libraries make once
    cache = KVCache(llama, strategy)
    feed(llama, cache, ids, [32, 33, 34])
    assert cache.high_water >= cache.memory().allocated
    single = ids.shape[0] * 2 * 32 * 16 * 2 * 4  # K and V of one layer's prompt, float32
    assert cache.high_water >= single


def test_evicted_tokens_are_gone_not_masked(llama, device):
    ids = torch.randint(3, 97, (1, 400), generator=torch.Generator().manual_seed(0)).to(device)
    for rule in (keep.Window(size=28), keep.HeavyHitter(budget=32, recent=8)):
        full, small = KVCache(llama), KVCache(llama, Strategy(keep=rule))
        for cache in (full, small):
            feed(llama, cache, ids, [*range(50, 401, 50)])
        assert small.memory().by_part()["keys"] <= full.memory().by_part()["keys"] * 32 / 400 * 1.4
        assert small.high_water < 0.4 * full.high_water


def test_gqa_heads_stay_few(llama, ids):
    cache = KVCache(llama)
    feed(llama, cache, ids, [40])
    assert cache.layers[0].store.keys.shape[1] == 2
    assert cache.memory().by_part(logical=True)["keys"] == 3 * 2 * 2 * 40 * 16 * 4


def test_growth_slack_is_bounded(device):
    from kvlab.buffer import Buffer

    buffer = Buffer("keys")
    for n in range(1, 3000):
        buffer.append(torch.zeros(1, 1, 1, 4, device=device))
        assert buffer.shape[2] <= max(n * 1.06, n + 8)
        assert buffer.logical == n * 16


def test_a_dropped_cache_frees_its_memory_at_once(llama, ids):
    gc.collect()
    gc.disable()
    try:
        cache = KVCache(llama)
        feed(llama, cache, ids, [40])
        data = weakref.ref(cache.layers[0].store.keys.data)
        del cache
        assert data() is None
    finally:
        gc.enable()
