"""With a cache and without one, on a clock that ticks once for each token that passes through the model."""

import json
import time
from types import SimpleNamespace

import pytest
import torch

from kvlab.errors import Cancelled
from kvlab.lab import Lab
from kvlab.measure import speed
from kvlab.measure.speed import Row, cache_speed, crossing


class Letters:
    """One token for each character."""

    eos_token_id = 1

    def __call__(self, text: str, **_: object) -> SimpleNamespace:
        return SimpleNamespace(input_ids=torch.tensor([[3 + ord(c) % 90 for c in text]]))

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


@pytest.fixture
def lab(llama) -> Lab:
    return Lab("tiny", llama, Letters())


@pytest.fixture
def ticking(llama, monkeypatch):
    """Time is the number of tokens that the model has read."""
    clock = SimpleNamespace(now=0.0)

    def read(_, args, __):
        clock.now += args[0].numel()

    hook = llama.get_input_embeddings().register_forward_hook(read)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    yield clock
    hook.remove()


def test_times_are_tokens_through_the_model(lab, ticking):
    made = cache_speed(lab, (16, 4, 16), 3, runs=2)
    # without a cache 4 + 5 + 6 tokens pass through, with it 4, then one at a time
    assert made.rows == (Row(4, 3, 2, without=5, cached=1, prefill=4), Row(16, 3, 2, without=17, cached=1, prefill=16))
    assert [row.ratio for row in made.rows] == [5, 17]
    assert [row.read for row in made.rows] == [1, 1]
    assert made.rows[0].answer(3) == 15 / 6  # as many as really passed through
    assert (made.first.context, made.first.times) == (4, (4, 4, 4, 4))
    assert (made.model, made.dtype) == ("tiny", "float32")


def test_the_first_run_stands_apart(lab, ticking):
    hook = lab.model.get_input_embeddings().register_forward_hook(Slow(ticking))
    try:
        made = cache_speed(lab, (8,), 2, runs=1)
        assert made.first.cold
        assert made.first.times == (108, 8, 8, 8)
        assert made.first.later == 8
        assert made.rows[0].prefill == 8
        assert not cache_speed(lab, (8,), 2, runs=1).first.cold
    finally:
        hook.remove()


class Slow:
    """A hook that takes 100 ticks once."""

    def __init__(self, clock):
        self.clock, self.awake = clock, False

    def __call__(self, *_):
        self.clock.now += 0 if self.awake else 100
        self.awake = True


def test_both_ways_say_the_same(lab):
    """What is timed is the same greedy text."""
    ids = torch.randint(3, 97, (1, 20), generator=torch.Generator().manual_seed(0)).to(lab.device)
    read = {"with": [], "without": []}
    for way, run in (("with", speed._with), ("without", speed._without)):
        hook = lab.model.get_input_embeddings().register_forward_hook(
            lambda _, args, __, way=way: read[way].append(args[0][0, -1])
        )
        run(lab, ids, 6, lambda *_: None)
        hook.remove()
    assert read["with"] == read["without"]


def test_progress_counts_tokens_and_can_cancel(lab, ids):
    calls, arrived = [], []
    cache_speed(lab, (4, 8), 2, runs=2, ids=ids[:1], progress=lambda *call: calls.append(call), arrived=arrived.append)
    done = [call[1] for call in calls]
    assert done == sorted(done)
    assert {call[2] for call in calls} == {2 * (4 * 3 + 1 + 8 * 3 + 1)}
    assert calls[-1][1] == calls[-1][2] - 8  # the last step is under way
    assert calls[-1][0] == "without a cache, 8 tokens"
    assert [[row.context for row in made.rows] for made in arrived] == [[4], [4, 8], [4, 8], [4, 8]]
    assert [made.rows[0].runs for made in arrived] == [1, 1, 2, 2]

    def cancel(*_):
        raise Cancelled

    with pytest.raises(Cancelled):
        cache_speed(lab, (4,), 2, progress=cancel)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": ()}, r"lengths=\(\) are out of range \(allowed: one or more, each from 1 to 508 tokens\)"),
        ({"lengths": (0, 4)}, r"lengths=\(0, 4\)"),
        ({"lengths": (509,)}, r"each from 1 to 508"),
        ({"new_tokens": 1}, r"new_tokens=1 is out of range \(allowed: 2 to 511\)"),
        ({"new_tokens": 512}, r"new_tokens=512"),
        ({"runs": 0}, r"runs=0 is out of range \(allowed: 1 or more\)"),
        ({"ids": torch.ones(1, 3, dtype=torch.int64)}, r"shape \(1, 3\) \(allowed: \[1, n\] with n of 8 tokens or more\)"),
        ({"ids": torch.ones(2, 9, dtype=torch.int64)}, r"shape \(2, 9\)"),
    ],
)
def test_bad_settings_name_value_and_range(lab, change, message):
    with pytest.raises(ValueError, match=message):
        cache_speed(lab, **{"lengths": (8,), **change})


def test_first_runs_and_answers_need_enough(lab):
    with pytest.raises(ValueError, match=r"runs=1 is out of range \(allowed: 2 or more\)"):
        speed.first_runs(lab, "text", 1)
    with pytest.raises(ValueError, match=r"tokens=0 is out of range"):
        Row(4, 2, 1, 1.0, 1.0, 1.0).answer(0)


def test_crossing_is_read_between_two_rows_on_logarithmic_axes():
    rows = [Row(context, 2, 1, without=context / 10, cached=1, prefill=1) for context in (10, 1000)]  # ratios 1 and 100
    assert crossing(rows, 10) == pytest.approx(100)
    assert crossing(rows, 100) == pytest.approx(1000)
    assert crossing(rows, 101) is None
    assert crossing(rows[:1], 1) is None


def test_a_recording_comes_back(lab, tmp_path):
    path = tmp_path / "speed.jsonl"
    path.write_text("an older one\n")
    made = speed.record(path, lab, (4, 8), 2, runs=1, command="kvlab bench speed --short")
    back = speed.read(path)
    assert [row.context for row in back.rows] == [4, 8]
    assert back.rows[1].without == pytest.approx(made.rows[1].without, abs=1e-6)
    assert (back.first.cold, back.date, back.machine) == (made.first.cold, made.date, made.machine)
    assert back.command == "kvlab bench speed --short"
    assert back.where.startswith("tiny in float32 on ")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["what"] for line in lines] == ["first", "row", "row"]
    assert lines[2]["ratio"] == round(made.rows[1].ratio, 2)
    assert [file.name for file in tmp_path.iterdir()] == ["speed.jsonl"]


def test_a_damaged_recording_names_its_line(tmp_path):
    path = tmp_path / "speed.jsonl"
    path.write_text('{"what": "row"}\n')
    with pytest.raises(ValueError, match=r"speed.jsonl: line 1 is no row"):
        speed.read(path)
    path.write_text("")
    with pytest.raises(ValueError, match="a line for the first runs and one for each length"):
        speed.read(path)
    with pytest.raises(FileNotFoundError):
        speed.read(tmp_path / "none.jsonl")


def test_the_recording_that_comes_with_kvlab_reads():
    made = speed.read()
    assert made.first.cold
    assert made.rows[-1].ratio > made.rows[0].ratio
    assert made.machine["torch"]
