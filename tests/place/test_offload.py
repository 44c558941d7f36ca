"""Offloading moves bytes and changes nothing: bit for bit, with the bytes really away, and nothing left behind."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from kvlab import KVCache, Strategy, keep, place, store
from kvlab.buffer import Buffer
from kvlab.cache import forward
from kvlab.place import disk
from kvlab.place.disk import PREFIX, DiskTier, checksum, sweep
from tests import zoo
from tests.reference import feed, ours

STRATEGIES = [
    {},
    {"keep": keep.HeavyHitter(budget=48, recent=4, sinks=2)},
    {"store": store.Int(bits=4, group_size=8)},
    {"keep": keep.HeavyHitter(budget=48, recent=8, sinks=2), "store": store.Int(bits=8, group_size=8)},
    {"keep": keep.Quest(budget=32, page=8, dense=1)},
    {"keep": keep.Quest(budget=32, page=8, dense=0), "store": store.Int(bits=4, group_size=8, key_axis="token", residual=24)},
    {"keep": keep.AdaKV(keep.HeavyHitter(budget=48, recent=8)), "store": store.Paged(page=4)},
    {"store": store.LowRank(rank=8, first=16)},
]
PLACES = [
    {},
    {"prefetch": 0},
    {"prefetch": 2, "hot": 24, "hot_first": 3},
    {"hot_layers": "1", "hot": 16},
    {"direct": True},
]


@pytest.fixture
def jitter(monkeypatch):
    """Readers that are late by chance."""
    real, chance = disk.read, random.Random(0)

    def late(*args):
        if chance.random() < 0.1:
            time.sleep(chance.random() * 2e-3)
        return real(*args)

    monkeypatch.setattr(disk, "read", late)


def some(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(3, 97, (rows, tokens), generator=torch.Generator().manual_seed(0))


@pytest.mark.many
@pytest.mark.parametrize(
    ("parts", "where", "steps"),
    [
        *((STRATEGIES[0], where, 200) for where in PLACES),
        *((parts, where, 45) for where in (PLACES[0], PLACES[2]) for parts in STRATEGIES[1:]),
    ],
    ids=lambda x: "+".join(f"{k}={v}" for k, v in x.items()) or "plain" if isinstance(x, dict) else str(x),
)
def test_offload_is_bit_exact_over_many_steps(llama, device, parts, where, steps, jitter):
    end = 40 + steps
    ids, cuts = (
        some(2, end).to(device),
        [40, *range(41, end - 30), end - 20, *range(end - 19, end + 1)],
    )  # a piece beside single tokens
    want, full = ours(llama, Strategy(**parts), ids, cuts)
    got, cache = ours(llama, Strategy(**parts, place=place.Offload(to="disk", **where)), ids, cuts)
    assert torch.equal(got, want)
    memory, whole = cache.memory(), full.memory()
    assert (where.get("hot") or memory.by_device()["disk"]) and memory.logical == whole.logical and memory.stored == whole.stored


@pytest.mark.many
@pytest.mark.parametrize("name", ["gemma3", "gemma3n", "llama4", "gpt_oss"])
def test_two_turns_on_a_hybrid_model(name, jitter):
    model, ids = zoo.model(name), some(2, 140)
    padding = torch.ones(2, 140, dtype=torch.long)
    padding[1, :9] = 0
    cuts = [60, *range(61, 81), 110, *range(111, 141)]
    want, _ = ours(model, Strategy(), ids, cuts, padding)
    got, cache = ours(model, Strategy(place=place.Offload(hot=16)), ids, cuts, padding)
    assert torch.equal(got, want) and cache.memory().by_device()["disk"]


def test_every_page_is_written_once(llama, device):
    """A decode step writes nothing until a page is full, and then that page alone; nothing is read that did not leave."""
    cache = KVCache(llama, Strategy(place=place.Offload(to="disk")))
    feed(llama, cache, some(1, 33), [33])
    line = cache.timeline()
    for step in range(40):
        forward(llama, some(1, 40)[:, step : step + 1], cache)
    page = 16 * 2 * 16 * 4  # tokens, heads, dim, float32
    writes = [span for span in line.spans if span.kind == "write"]
    assert {span.bytes for span in writes} == {page} and len(writes) == 3 * 2 * 2  # layers, keys and values, tokens 48 and 64
    fetched = sum(2 * 3 * page * ((33 + step) // 16) for step in range(40))
    ahead = 2 * page * ((33 + 40) // 16)  # the next step's first layer
    more = line.bytes("fetch") - (fetched - 2 * page * 2)  # without the first step's first layer, fetched before
    assert more in (0, ahead // 2, ahead, 2 * page * 2)  # what comes ahead may still be on its way


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_device_holds_few_layers_at_a_time(device, prefetch):
    """The one that computes and those on their way, beside what is too new to leave."""
    from tests.conftest import make_llama

    model = make_llama(num_hidden_layers=6)
    ids = some(1, 400).to(device)
    cache = KVCache(model, Strategy(place=place.Offload(to="disk", prefetch=prefetch)))
    feed(model, cache, ids, [320])
    cache.high_water = 0
    for token in range(320, 400):
        forward(model, ids[:, token : token + 1], cache)
    one = 400 * 2 * 2 * 16 * 4 * 18 / 17  # tokens, sides, heads, dim, float32, and room to grow
    tails, scores = 6 * 16 * 2 * 2 * 16 * 4, 2 * 4 * 401 * 4
    assert cache.high_water <= (1 + prefetch) * one + 2 * tails + scores + 2048
    assert cache.high_water > (1 + prefetch) * one * 0.8


def test_only_chosen_pages_come_back(llama, device):
    """Quest on disk: what it reads is what it moves, and the summaries stay."""
    strategy = Strategy(keep=keep.Quest(budget=64, page=16, dense=0), place=place.Offload(to="disk"))
    cache = KVCache(llama, strategy)
    feed(llama, cache, some(1, 256), [256])
    cache.high_water = 0
    line = cache.timeline()
    forward(llama, some(1, 1), cache)
    row, chosen, whole = 16 * 4, 4, 16
    # keys and values, layers, heads, pages but the newest (which is away too: 256 is a whole page), tokens, bytes
    assert line.bytes("fetch") == 2 * 3 * 2 * chosen * 16 * row == (chosen / whole) * 2 * 3 * 2 * 256 * row
    assert cache.memory().by_part()["pages"] > 0 and all(
        p.device == device.type for p in cache.memory().parts if p.name == "pages"
    )


def test_codes_of_chosen_pages_travel_as_codes(llama, device):
    """Each head's own pages: 8-bit keys and values, a quarter of float32's bytes; their scales are so few that they stay."""
    method = store.Int(bits=8, group_size=16, key_axis="token", scales="float32")
    strategy = Strategy(keep=keep.Quest(budget=64, page=16, dense=0), store=method, place=place.Offload(to="disk"))
    cache = KVCache(llama, strategy)
    feed(llama, cache, some(1, 256), [256])
    line = cache.timeline()
    forward(llama, some(1, 1), cache)
    pages, numbers = 2 * 3 * 2 * 4, 16 * 16  # keys and values, layers, heads, pages; tokens and channels of a page
    assert line.bytes("fetch") == pages * numbers
    assert cache.memory().by_part()["scales"] and all(p.device == device.type for p in cache.memory().parts if p.name == "scales")


def test_what_was_fetched_ahead_and_not_used_is_not_used_later(llama, ids):
    """Someone looks at a layer's tokens while they are on their way: they come back at once, and the others are out of date afterwards."""
    more = torch.cat([ids] * 4, 1)
    want, _ = ours(llama, Strategy(), more, [33, *range(34, 161)])
    cache = KVCache(llama, Strategy(place=place.Offload(to="disk")))
    assert torch.equal(forward(llama, more[:, :33], cache), want[:, :33])
    for token in range(33, 160):
        if token % 16 == 15:  # layer 0 is on its way since the last layer's turn; after this token one page more is away
            cache.layers[0].store.keys.view()
        assert torch.equal(forward(llama, more[:, token : token + 1], cache), want[:, token : token + 1])


def test_cpu_to_cpu_is_refused(llama, device):
    if device.type != "cpu":
        pytest.skip("the model is on a GPU")
    with pytest.raises(ValueError, match="to='cpu' moves nothing here"):
        KVCache(llama, Strategy(place=place.Offload(to="cpu")))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hot_layers": "7"}, "names layer 7, the model has 3"),
        ({"hot_layers": "2-1"}, "'2-1' is not of the form"),
        ({"hot_layers": "x"}, "'x' is not of the form"),
        ({"prefetch": 17}, "prefetch=17"),
        ({"emulate": -1.0}, "emulate=-1.0"),
    ],
)
def test_settings_out_of_range(llama, settings, words):
    with pytest.raises(ValueError, match=words):
        KVCache(llama, Strategy(place=place.Offload(**settings)))


def test_a_folder_that_cannot_be_written(llama, tmp_path):
    missing = tmp_path / "nowhere"
    with pytest.raises(OSError, match="cannot write in the folder"):
        KVCache(llama, Strategy(place=place.Offload(to="disk", folder=str(missing))))


def test_a_file_system_without_direct_reads(llama, tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    with pytest.raises(OSError, match="does not read past the system's cache"):
        KVCache(llama, Strategy(place=place.Offload(to="disk", folder=str(tmp_path), direct=True)))
    assert not list(tmp_path.iterdir())


@pytest.fixture
def full_disk(monkeypatch):
    """A disk that is full from the ``after``-th write on; ``del full_disk[:]`` makes room."""
    real, left = os.pwrite, [3]

    def pwrite(handle, data, offset):
        if left:
            if left[0] == 0:
                raise OSError(28, "No space left on device")
            left[0] -= 1
            return real(handle, data[: len(data) // 2 + 1], offset)
        return real(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    return left


def test_a_full_disk_loses_nothing(llama, ids, full_disk):
    """The step goes on with what stays in memory; the next one is refused before it begins, until there is room; then it is right."""
    more = torch.cat([ids, ids[:, :2]], 1)
    want, _ = ours(llama, Strategy(), more, [40, 41, 42])
    cache = KVCache(llama, Strategy(place=place.Offload(to="disk")))
    assert torch.equal(forward(llama, more[:, :40], cache), want[:, :40])
    for _ in range(2):
        with pytest.raises(OSError, match=r"No space left on device.*Nothing is lost"):
            forward(llama, more[:, 40:41], cache)
        assert {layer.seen for layer in cache.layers} == {40}
    del full_disk[:]
    assert torch.equal(feed(llama, cache, more[:, 40:], [1, 2]), want[:, 40:])
    assert cache.memory().by_device()["disk"]


def test_a_full_disk_while_beams_are_reordered(llama, ids, full_disk):
    caches = [KVCache(llama, Strategy(place=where)) for where in (place.Resident(), place.Offload(to="disk"))]
    out = []
    for cache in caches:
        full_disk[:] = [1000]
        feed(llama, cache, ids, [40])
        full_disk[:] = [1]
        cache.reorder_cache(torch.tensor([1, 0]))
        full_disk.clear()
        out.append(forward(llama, ids[:, :1], cache))
    assert torch.equal(*out)


def test_an_interrupted_write_is_not_taken_for_a_whole_step(llama, ids, monkeypatch):
    cache = KVCache(llama, Strategy(place=place.Offload(to="disk")))
    feed(llama, cache, ids, [20])
    real = DiskTier.put

    def interrupted(self, buffer, stop, page, layer):
        if layer == 2:
            raise KeyboardInterrupt
        real(self, buffer, stop, page, layer)

    monkeypatch.setattr(DiskTier, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        forward(llama, ids[:, 20:40], cache)
    monkeypatch.setattr(DiskTier, "put", real)
    for act in (lambda: forward(llama, ids[:, 20:40], cache), cache.check_whole):
        with pytest.raises(RuntimeError, match=r"failed while layer 2 was written down. reset\(\)"):
            act()


@pytest.mark.parametrize("fault", ["shorter", "altered", "gone"])
@pytest.mark.parametrize("method", [keep.Everything(), keep.Quest(budget=16, page=8, dense=0)], ids=str)
def test_files_that_are_not_what_was_written(llama, ids, tmp_path, fault, method):
    """Never a wrong answer: an error that names the folder; another conversation in the same folder is intact."""
    strategy = Strategy(keep=method, place=place.Offload(to="disk", folder=str(tmp_path), prefetch=0))
    cache, other = KVCache(llama, strategy), KVCache(llama, strategy)
    feed(llama, cache, ids, [40])
    feed(llama, other, ids, [40])
    for path in cache.place.tier.folder.iterdir():
        raw = path.read_bytes()
        if fault == "shorter":
            path.write_bytes(raw[: len(raw) // 2 - 1])
        elif fault == "altered":
            # one bit of each head and page
            path.write_bytes(bytes(b ^ (i % 64 == 5) for i, b in enumerate(raw)))
        else:
            path.unlink()
    with pytest.raises(OSError, match=r"cannot be read back from .*reset\(\)"):
        forward(llama, ids[:, :1], cache)
    cache.reset()
    assert feed(llama, cache, ids, [40]).isfinite().all()
    want, _ = ours(llama, Strategy(keep=method), torch.cat([ids, ids[:, :1]], 1), [40, 41])
    assert torch.equal(forward(llama, ids[:, :1], other), want[:, 40:])


def test_checksums_see_every_word():
    rng = np.random.default_rng(0)
    for count in (8, 24, 512, 4096):
        raw = rng.integers(0, 256, (3, count), dtype=np.uint8)
        words = raw.view(np.uint64).astype(object)
        odd, width = disk._ODD.astype(object), np.gcd(count // 8, 32)
        want = [sum(int(w) * int(odd[i % width]) for i, w in enumerate(row)) % 2**64 for row in words]
        assert checksum(raw).tolist() == want
        for at in range(0, count, 7):
            other = raw.copy()
            other[1, at] ^= 1 << (at % 8)
            assert (checksum(other) != checksum(raw)).tolist() == [False, True, False]


def test_files_and_threads_go_with_the_cache(llama, ids, tmp_path):
    before = threading.active_count()
    cache = KVCache(llama, Strategy(place=place.Offload(to="disk", folder=str(tmp_path))))
    feed(llama, cache, ids, [40])
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith(PREFIX) and oct(folder.stat().st_mode)[-3:] == "700"
    assert sum(f.stat().st_size for f in folder.iterdir()) == cache.memory().by_device()["disk"]
    del cache
    for _ in range(100):
        if threading.active_count() <= before:
            break
        time.sleep(0.02)
    assert not list(tmp_path.iterdir()) and threading.active_count() <= before


def test_a_cache_dropped_while_a_fetch_is_under_way(llama, ids, tmp_path, monkeypatch):
    real, started, go = disk.read, threading.Event(), threading.Event()

    def slow(*args):
        started.set()
        go.wait(5)
        return real(*args)

    monkeypatch.setattr(disk, "read", slow)
    cache = KVCache(llama, Strategy(place=place.Offload(to="disk", folder=str(tmp_path))))
    feed(llama, cache, ids, [40])
    cache.place._ahead(0, True)
    started.wait(5)
    del cache
    gc.collect()
    go.set()
    assert not list(tmp_path.iterdir())


def test_an_interrupted_fetch_is_an_interruption(llama, ids, monkeypatch):
    """Ctrl-C while a fetch is waited for: the cell ends, this cache says what to do, another goes on."""
    strategy = Strategy(place=place.Offload(to="disk"))
    cache, other = KVCache(llama, strategy), KVCache(llama, strategy)
    feed(llama, cache, ids, [40])
    feed(llama, other, ids, [40])
    calls = iter(range(100))
    real = DiskTier.finish

    def interrupted(self, ticket):
        if next(calls) == 3:
            raise KeyboardInterrupt
        return real(self, ticket)

    monkeypatch.setattr(DiskTier, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        forward(llama, ids[:, :1], cache)
    monkeypatch.setattr(DiskTier, "finish", real)
    with pytest.raises((RuntimeError, ValueError), match="half-way"):
        forward(llama, ids[:, :1], cache)
    want, _ = ours(llama, Strategy(), torch.cat([ids, ids[:, :1]], 1), [40, 41])
    assert torch.equal(forward(llama, ids[:, :1], other), want[:, 40:])
    cache.reset()
    assert torch.equal(feed(llama, cache, ids, [40]), want[:, :40])


def test_no_room_for_what_comes_back(llama, ids, monkeypatch):
    """What is fetched ahead may wait for its turn; when it is needed, an error says what to do, and another conversation goes on."""
    strategy = Strategy(place=place.Offload(to="disk"))
    cache, other = KVCache(llama, strategy), KVCache(llama, strategy)
    more = torch.cat([ids, ids[:, :2]], 1)
    want, _ = ours(llama, Strategy(), more, [40, 41, 42])
    for one in (cache, other):
        feed(llama, one, ids, [40])
    real, full = DiskTier.start, [0]

    def start(self, buffer, layer):
        if cache.place.timeline is not None and layer != cache.place.timeline.layer:
            full[0] += 1
            raise torch.OutOfMemoryError("out of memory")
        return real(self, buffer, layer)

    line = cache.timeline()
    monkeypatch.setattr(DiskTier, "start", start)
    assert torch.equal(forward(llama, more[:, 40:41], cache), want[:, 40:41]) and full[0]
    assert line.bytes() > 0
    monkeypatch.setattr(DiskTier, "start", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory")))
    with pytest.raises(torch.OutOfMemoryError, match="no room on the device for the .* bytes of layer"):
        forward(llama, more[:, 41:42], cache)
    monkeypatch.setattr(DiskTier, "start", real)
    assert torch.equal(feed(llama, other, more[:, 40:], [1, 2]), want[:, 40:])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_fork_keeps_its_hands_off(llama, ids, tmp_path):
    cache = KVCache(llama, Strategy(place=place.Offload(to="disk", folder=str(tmp_path))))
    feed(llama, cache, ids, [40])
    child = os.fork()
    if not child:
        code = 1
        try:
            cache.place.tier.put(cache.layers[0].store.keys, 32, 16, 0)
        except RuntimeError as error:
            code = 0 if "belongs to process" in str(error) else 2
        finally:
            cache.place.close()
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    want, _ = ours(llama, Strategy(), torch.cat([ids, ids[:, :1]], 1), [40, 41])
    assert torch.equal(forward(llama, ids[:, :1], cache), want[:, 40:])


def test_folders_of_crashed_processes_are_swept(tmp_path):
    """Whoever lives holds a lock, which a process with another number or in another container cannot mistake."""
    names = ("1-dead", "999999-alive", "2-young", "3-old")
    dead, alive, young, old = (tmp_path / f"{PREFIX}{name}" for name in names)
    other = tmp_path / "kvlab-notes"
    for folder in (dead, alive, young, old, other):
        folder.mkdir()
    (dead / disk.LOCK).touch()
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import fcntl; f = open({str(alive / disk.LOCK)!r}, 'w'); fcntl.flock(f, 2); print(1, flush=True); input()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    holder.stdout.readline()
    os.utime(old, (0, 0))
    sweep(tmp_path)
    assert [folder.exists() for folder in (dead, alive, young, old, other)] == [False, True, True, False, True]
    holder.communicate(b"\n")
    sweep(tmp_path)
    assert not alive.exists()


def test_files_shrink_with_the_cache(llama, tmp_path):
    cache = KVCache(llama, Strategy(place=place.Offload(folder=str(tmp_path))))
    feed(llama, cache, some(1, 150), [150])

    def on_disk():
        return sum(f.stat().st_size for f in cache.place.tier.folder.iterdir())

    sizes = []
    for back in (0, 60, 80):
        cache.crop(-back)
        sizes.append(on_disk())
        assert sizes[-1] == cache.memory().by_device().get("disk", 0)
    page = 16 * 2 * 16 * 4 * 2 * 3
    assert sizes == [9 * page, 5 * page, 0]


def test_a_closed_cache_says_so_and_a_relative_folder_is_where_it_was(llama, ids, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    cache = KVCache(llama, Strategy(place=place.Offload(folder="here")))
    feed(llama, cache, ids, [40])
    monkeypatch.chdir(tmp_path / "there")
    want, _ = ours(llama, Strategy(), torch.cat([ids, ids[:, :1]], 1), [40, 41])
    assert torch.equal(forward(llama, ids[:, :1], cache), want[:, 40:])
    cache.close()
    with pytest.raises(RuntimeError, match=r"this cache is closed: reset\(\)"):
        forward(llama, ids[:, :1], cache)
    monkeypatch.chdir(tmp_path)
    cache.reset()
    assert torch.equal(feed(llama, cache, ids, [40]), want[:, :40])
    del cache
    gc.collect()
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.nightly
def test_a_process_killed_while_it_writes_leaves_nothing_for_long(tmp_path):
    code = (
        "import os, torch\n"
        "from kvlab import KVCache, Strategy, place\n"
        "from kvlab.cache import forward\n"
        "from tests.conftest import make_llama\n"
        "real = os.pwrite\n"
        "def killed(handle, data, offset):\n"
        "    real(handle, data[:100], offset); os.kill(os.getpid(), 9)\n"
        "os.pwrite = killed\n"
        "model = make_llama()\n"
        f"forward(model, torch.full((1, 40), 5), KVCache(model, Strategy(place=place.Offload(folder={str(tmp_path)!r}))))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=120)
    assert done.returncode == -9, done.stderr
    (left,) = tmp_path.iterdir()
    assert list(left.iterdir())
    sweep(tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_emulated_link_takes_its_time(llama, tmp_path):
    """What two caches fetch over a link of 1 MB/s cannot be there sooner than its bytes take."""
    cache = KVCache(llama, Strategy(place=place.Offload(to="disk", prefetch=0, emulate=0.001)))
    cache.place.tier.link.speed = 1e6
    feed(llama, cache, some(1, 65), [65])
    line = cache.timeline()
    began = time.perf_counter()
    forward(llama, some(1, 1), cache)
    moved = 3 * 2 * 64 * 2 * 16 * 4
    assert line.bytes() == moved and time.perf_counter() - began >= moved / 1e6
    assert line.bandwidth <= 1e6 * 1.001 and line.seconds("stall") > 0.9 * moved / 1e6


def test_a_buffer_with_a_part_away_is_the_same_buffer(tmp_path):
    """Against a tensor: append, take, view, truncate and change with rows away and here."""
    tier = DiskTier(torch.device("cpu"), str(tmp_path))
    rng = torch.Generator().manual_seed(0)
    for trial in range(60):
        chance = random.Random(trial)
        want = torch.randn(2, 3, chance.randint(1, 60), 4, generator=rng)
        buffer = Buffer("x")
        buffer.append(want)
        for _ in range(12):
            kind = chance.choice(["append", "leave", "leave", "take", "view", "truncate", "select", "batch", "touch"])
            n = len(buffer)
            if kind == "append":
                more = torch.randn(2, 3, chance.randint(1, 30), 4, generator=rng)
                buffer.append(more)
                want = torch.cat([want, more], 2)
            elif kind == "leave":
                first = buffer.first if buffer.away else chance.randint(0, 5)
                stop = max(chance.randint(0, n) // 8 * 8, buffer.first + buffer.away if buffer.away else 0)
                if stop > first:
                    tier.put(buffer, stop, 8, 0)
                    buffer.leave(first, stop - first, tier)
                    assert buffer.away == stop - first and buffer.first == first
                    here = 0 if buffer.head is None else buffer.head.numel()
                    assert buffer.here == 4 * (here + buffer.data.numel())
            elif kind == "take":
                index = torch.randint(0, n, (2, 3, chance.randint(1, 9)), generator=rng)
                assert torch.equal(buffer.take(index), want.gather(2, index[..., None].expand(-1, -1, -1, 4)))
            elif kind == "view":
                assert torch.equal(buffer.view(), want) and buffer.away == 0
            elif kind == "truncate" and n > 8:
                want = want[:, :, : n - 5]
                buffer.truncate(n - 5)
            elif kind == "select" and n > 8:
                index = torch.rand(2, 3, n, generator=rng).topk(n // 2, 2).indices.sort().values
                buffer.select(index)
                want = want.gather(2, index[..., None].expand(-1, -1, -1, 4))
            elif kind == "batch":
                buffer.batch(lambda x: x.flip(0))
                want = want.flip(0)
            elif kind == "touch":
                row = chance.randint(0, n - 1)
                want = want.clone()
                want[:, :, row] += 1
                buffer.view()[:, :, row] += 1
                buffer.touch(row)
            assert len(buffer) == want.shape[2] and buffer.logical == want.nbytes
        assert torch.equal(buffer.view(), want)
    tier.close()
