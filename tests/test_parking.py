"""Conversations that are put away come back bit for bit, in another process too, and a limit of bytes holds."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import threading

import pytest
import torch

from kvlab import KVCache, Parking, Strategy, keep, place, resume, save, store
from kvlab.cache import forward
from tests.conftest import make_llama
from tests.reference import feed, ours

STRATEGIES = [
    Strategy(),
    Strategy(keep=keep.HeavyHitter(budget=24, recent=8), store=store.Int(bits=4, group_size=8)),
    Strategy(keep=keep.Quest(budget=32, page=16, dense=1), place=place.Offload(hot=16)),
]


@pytest.fixture
def model():
    return make_llama()


def text(seed: int, tokens: int = 60) -> torch.Tensor:
    return torch.randint(3, 97, (1, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_parked_conversation_goes_on(model, tmp_path, strategy):
    ids = text(0)
    want, _ = ours(model, strategy, ids, [40, *range(41, 61)])
    cache = KVCache(model, strategy)
    feed(model, cache, ids[:, :40], [40])
    path = cache.park(tmp_path / "one.kvcache")
    assert cache.resident == 0 and cache.memory().allocated == 0
    with pytest.raises(RuntimeError, match=r"parked in .*one\.kvcache"):
        forward(model, ids[:, 40:41], cache)
    back = resume(model, path)
    assert torch.equal(feed(model, back, ids[:, 40:], list(range(1, 21))), want[:, 40:])
    cache.reset()
    assert torch.equal(feed(model, cache, ids[:, :40], [40]), want[:, :40])


def test_many_conversations_under_a_limit(model):
    """Turns of five conversations in any order: as if each had a cache of its own, never more bytes at rest than allowed."""
    texts = {f"talk/{n}": text(n) for n in range(5)}
    strategies = {name: STRATEGIES[n % 3] for n, name in enumerate(texts)}
    want = {name: ours(model, strategies[name], ids, [20, 30, 40, 50, 60])[0] for name, ids in texts.items()}
    one = 60 * 3 * 2 * 2 * 16 * 4
    parking = Parking(model, limit=2 * one)
    for name in texts:
        parking.new(name, strategies[name])
    done = dict.fromkeys(texts, 0)
    order = torch.randint(5, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    for number in order:
        name = f"talk/{number}"
        start = done[name]
        if start == 60:
            continue
        stop = max(20, start + 10)
        with parking.use(name) as cache:
            assert torch.equal(forward(model, texts[name][:, start:stop], cache), want[name][:, start:stop])
        done[name] = stop
        assert parking.resident <= parking.limit and len(parking) == 5
    assert set(done.values()) == {60} and 1 <= len(parking.parked) <= 4
    folder = parking.folder
    parking.close()
    assert not folder.exists()


def test_the_least_recently_used_goes_first(model):
    parking = Parking(model, limit="60 KB")  # a conversation of 40 tokens takes a little more than 30 KB
    for number in range(3):
        parking.new(str(number))
        with parking.use(str(number)) as cache:
            feed(model, cache, text(number)[:, :20], [20])
    assert parking.parked == ["0"] or parking.resident <= 60_000
    with parking.use("0") as cache:
        feed(model, cache, text(0)[:, 20:40], [20])
    assert "1" in parking.parked and "0" not in parking.parked


def test_a_folder_that_stays(model, tmp_path):
    ids = text(0)
    want, _ = ours(model, Strategy(), ids, [40, 60])
    one = Parking(model, limit=1, folder=tmp_path)
    one.new("../a b")
    with one.use("../a b") as cache:
        feed(model, cache, ids[:, :40], [40])
    assert one.resident == 0 and one.parked == ["../a b"]  # larger than the limit: parked after its use
    one.close()
    (file,) = tmp_path.iterdir()
    assert file.parent == tmp_path
    other = Parking(model, limit="1 GB", folder=tmp_path)
    with other.use("../a b") as cache:
        assert torch.equal(forward(model, ids[:, 40:], cache), want[:, 40:])
    other.remove("../a b")
    assert not list(tmp_path.iterdir()) and other.names == []


def test_a_disk_that_is_full_keeps_the_conversation(model, monkeypatch):
    ids, parking = text(0), Parking(model, limit="1 GB")
    want, _ = ours(model, Strategy(), ids, [40, 60])
    parking.new("a")
    with parking.use("a") as cache:
        feed(model, cache, ids[:, :40], [40])
    monkeypatch.setattr("kvlab.saving.save_file", lambda *a, **k: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        parking.park("a")
    assert parking.parked == []
    with parking.use("a") as cache:
        assert torch.equal(forward(model, ids[:, 40:], cache), want[:, 40:])


def test_bad_input(model, tmp_path):
    for limit in (0, -1, "much", "10", True, None, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="Parking: limit="):
            Parking(model, limit=limit)
    parking = Parking(model, limit="1 MB")
    parking.new("a")
    for name in ("", "x" * 300, 5):
        with pytest.raises(ValueError, match="makes no file name"):
            parking.new(name)
    with pytest.raises(ValueError, match="there is a conversation 'a' already"):
        parking.new("a")
    with pytest.raises(KeyError, match="no conversation 'b'"), parking.use("b"):
        pass
    with parking.use("a"):
        for act in (lambda: parking.use("a").__enter__(), lambda: parking.park("a"), lambda: parking.remove("a")):
            with pytest.raises(RuntimeError, match="in use"):
                act()
    with pytest.raises((OSError, NotADirectoryError)):
        Parking(model, 1000, folder=__file__)
    assert "1 on the device" in repr(parking)


def test_a_failed_turn_does_not_lock_a_conversation(model):
    parking = Parking(model, limit="1 MB")
    parking.new("a")
    with pytest.raises(ZeroDivisionError), parking.use("a"):
        raise ZeroDivisionError
    with parking.use("a") as cache:
        forward(model, text(0)[:, :5], cache)


def test_threads_take_turns(model):
    """Each its own conversation, all under one limit."""
    parking = Parking(model, limit=1)
    texts = [text(n) for n in range(3)]
    want = [ours(model, Strategy(), ids, [20, 40, 60])[0] for ids in texts]
    for number in range(3):
        parking.new(str(number))
    wrong: list[object] = []

    def talk(number: int) -> None:
        try:
            for start in (0, 20, 40):
                with parking.use(str(number)) as cache:
                    got = forward(model, texts[number][:, start : start + 20], cache)
                if not torch.equal(got, want[number][:, start : start + 20]):
                    wrong.append((number, start))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=talk, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and parking.resident == 0
    assert len(os.listdir(parking.folder)) == 3


def test_a_parked_cache_is_not_parked_again(model, tmp_path):
    cache = KVCache(model)
    feed(model, cache, text(0)[:, :40], [40])
    path = cache.park(tmp_path / "one")
    size = path.stat().st_size
    for act in (lambda: cache.park(path), lambda: save(cache, path)):
        with pytest.raises(RuntimeError, match="this cache is parked in"):
            act()
    assert path.stat().st_size == size and resume(model, path).get_seq_length() == 40


def test_a_step_that_failed_half_way_is_not_parked(model, tmp_path, monkeypatch):
    from kvlab.store.dense import DenseState

    parking = Parking(model, limit=1)
    parking.new("a")
    with parking.use("a") as cache:
        feed(model, cache, text(0)[:, :40], [40])
    real, calls = DenseState.append, iter(range(100))

    def failing(self, keys, values):
        if next(calls) == 2:
            raise MemoryError
        real(self, keys, values)

    monkeypatch.setattr(DenseState, "append", failing)
    with pytest.raises(MemoryError), parking.use("a") as cache:
        forward(model, text(0)[:, 40:41], cache)
    monkeypatch.setattr(DenseState, "append", real)
    with parking.use("a") as cache, pytest.raises(RuntimeError, match="an earlier step failed"):
        forward(model, text(0)[:, 41:42], cache)
    with pytest.raises(RuntimeError, match="an earlier step failed"):
        parking.park("a")
    with pytest.raises(RuntimeError, match="an earlier step failed"):
        save(cache, tmp_path / "x")


def test_a_conversation_that_its_user_parks_elsewhere_is_gone_from_here(model, tmp_path):
    parking = Parking(model, limit=1)
    parking.new("a")
    with parking.use("a") as cache:
        feed(model, cache, text(0)[:, :40], [40])
        cache.park(tmp_path / "mine")
    assert parking.names == [] and resume(model, tmp_path / "mine").get_seq_length() == 40


def test_closing_keeps_everything_in_a_folder_that_was_given(model, tmp_path):
    parking = Parking(model, limit="1 GB", folder=tmp_path)
    parking.new("a")
    for stop in (20, 40):
        with parking.use("a") as cache:
            feed(model, cache, text(0)[:, stop - 20 : stop], [20])
        if stop == 20:
            parking.park("a")
    parking.close()
    with Parking(model, limit="1 GB", folder=tmp_path).use("a") as cache:
        assert cache.get_seq_length() == 40


def test_parking_needs_nothing_from_a_folder_that_is_gone(model, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    cache = KVCache(model, Strategy(place=place.Offload(folder=str(folder))))
    feed(model, cache, text(0)[:, :10], [10])
    shutil.rmtree(folder)
    path = cache.park(tmp_path / "one")
    with pytest.raises(OSError, match="cannot write in the folder"):
        resume(model, path)
    back = resume(model, path, Strategy())
    want, _ = ours(model, Strategy(), text(0)[:, :20], [10, 20])
    assert torch.equal(forward(model, text(0)[:, 10:20], back), want[:, 10:])


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_copy_goes_its_own_way(model, strategy):
    ids = text(0)
    cache = KVCache(model, strategy)
    feed(model, cache, ids[:, :40], [40])
    other = copy.deepcopy(cache)
    want = feed(model, cache, ids[:, 40:], list(range(1, 21)))
    assert torch.equal(feed(model, other, ids[:, 40:], list(range(1, 21))), want)
    del cache
    forward(model, ids[:, :1], other)
    with pytest.raises(TypeError, match=r"kvlab.save\(cache, path\)"):
        pickle.dumps(other)
