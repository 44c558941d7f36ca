"""Experiments: rows that survive being killed, executors, sweeps, controls; tasks whose texts can be checked by hand."""

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from kvlab import KVCache, Strategy, attention, keep, place, store
from kvlab.lab import Lab
from kvlab.measure import experiment as module
from kvlab.measure import tasks
from kvlab.measure.experiment import Evidence, experiment, frame, read_rows, sweep
from kvlab.measure.phases import phases
from kvlab.measure.tasks.base import TASKS, Case, Question, Score, Task, ask
from kvlab.replay import Prompts
from tests.panels.conftest import Characters


@pytest.fixture(scope="module")
def lab(llama) -> Lab:
    return Lab("tiny", llama, Characters())


@dataclass(frozen=True)
class Weighed(Task):
    """A task that takes no time: the score is the budget's, the full cache has 1."""

    slow: float = 0.0
    full: float = 1.0

    def cases(self, lab: Lab) -> Iterator[Case]:
        return iter(())

    def run(self, lab, strategy=None, *, progress=None) -> Score:
        time.sleep(self.slow)
        budget = getattr(strategy.keep, "budget", None)
        if budget == 13:
            raise ValueError("thirteen")
        return Score(self.full if budget is None else budget / 100, KVCache(lab.model, strategy).memory(), more={"kl": 0.5})


BUDGETS = [Strategy(keep.HeavyHitter(budget=budget, recent=4, sinks=1)) for budget in range(10, 34) if budget != 13]
THIRTEEN = Strategy(keep.HeavyHitter(budget=13, recent=4, sinks=1))


@pytest.fixture(scope="module", autouse=True)
def known():
    yield
    TASKS.pop("Weighed", None)


def test_rows_are_those_asked_for(lab, tmp_path):
    out = tmp_path / "rows.jsonl"
    rows = experiment(lab, [BUDGETS[0], THIRTEEN, BUDGETS[1]], [Weighed(), Weighed(full=0.5)], out=out)
    assert [row.score for row in rows] == [1.0, 0.1, None, 0.11, 0.5, 0.1, None, 0.11]
    assert [row.counts for row in rows] == [True, True, False, True, False, False, False, False]
    assert "thirteen" in rows[2].why and "gets 0.50, below 0.75" in rows[5].why
    assert rows[1].control == 1.0 and rows[5].control == 0.5
    assert {row.key for row in read_rows(out)} == {row.key for row in rows} and len(read_rows(out)) == 8
    table = frame(rows)
    assert list(table["score"].dropna()) == [1.0, 0.1, 0.11, 0.5, 0.1, 0.11] and set(table["kl"].dropna()) == {0.5}


def test_nothing_is_measured_twice(lab, tmp_path, monkeypatch):
    out = tmp_path / "rows.jsonl"
    first = experiment(lab, BUDGETS[:2], [Weighed()], out=out)
    asked = []
    monkeypatch.setattr(Weighed, "run", lambda self, lab, strategy, **_: asked.append(strategy) or pytest.fail("measured again"))
    assert experiment(lab, BUDGETS[:2], [Weighed()], out=out) == first
    assert not asked


def _keep_going(path: str) -> None:
    from tests.conftest import make_llama

    torch.set_num_threads(1)
    experiment(Lab("tiny", make_llama(), Characters()), BUDGETS, [Weighed(slow=0.01)], out=path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_a_sweep_that_is_killed_again_and_again_loses_and_doubles_nothing(tmp_path):
    """24 rows, killed at random moments, once in the middle of a line."""
    path, dice, context = tmp_path / "rows.jsonl", random.Random(3), multiprocessing.get_context("fork")
    for turn in range(40):
        process = context.Process(target=_keep_going, args=(str(path),))
        process.start()
        process.join(dice.uniform(0.02, 0.25))
        finished = process.exitcode == 0
        if not finished:
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        if finished:
            break
        if turn == 1:
            with open(path, "ab") as file:
                file.write(b'{"strategy": "half of a li')
    assert finished and turn >= 2
    lines = path.read_text().splitlines()
    assert len(lines) == 24 and len({Evidence(**json.loads(line)).key for line in lines}) == 24


def test_two_at_once_are_refused(lab, tmp_path):
    out = tmp_path / "rows.jsonl"
    with module._Book(out), pytest.raises(RuntimeError, match="written by another process"):
        experiment(lab, BUDGETS[:1], [Weighed()], out=out)


def test_a_file_of_something_else_is_left_alone(lab, tmp_path):
    out = tmp_path / "rows.jsonl"
    out.write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match="line 1 is no row of an experiment"):
        experiment(lab, BUDGETS[:1], [Weighed()], out=out)
    assert out.read_text() == '{"a": 1}\n'


def test_an_executor_gives_the_same_rows(lab, monkeypatch):
    monkeypatch.setattr(module, "_lab", lambda name, dtype, device: lab)
    want = experiment(lab, [*BUDGETS[:3], THIRTEEN], [Weighed()])
    with ThreadPoolExecutor(3) as executor:
        got = experiment(lab, [*BUDGETS[:3], THIRTEEN], [Weighed()], executor=executor)
    for mine, theirs in zip(got, want, strict=True):
        assert (mine.key, mine.score, mine.control, mine.why) == (theirs.key, theirs.score, theirs.control, theirs.why)


def test_threads_measure_beside_each_other(lab, monkeypatch):
    """Real tasks, two at a time in one process: every row has its own times and the answers of a run alone."""
    monkeypatch.setattr(module, "_lab", lambda name, dtype, device: lab)
    asked = [tasks.Copying(words=12, texts=1, asked=2), tasks.PassKeys(tokens=150, texts=2)]
    want = experiment(lab, BUDGETS[:2], asked)
    with ThreadPoolExecutor(2) as executor:
        got = experiment(lab, BUDGETS[:2], asked, executor=executor)
    assert [(row.key, row.said) for row in got] == [(row.key, row.said) for row in want] and all(row.said for row in got)
    assert all(row.read_time > 0 and row.read_time + row.write_time + row.select_time < row.seconds for row in got)


def test_a_worker_that_is_gone_is_a_row_with_a_reason(lab, tmp_path, monkeypatch):
    """And is tried again next time."""
    out = tmp_path / "rows.jsonl"
    with monkeypatch.context() as broken, ThreadPoolExecutor(1) as executor:
        broken.setattr(module, "_elsewhere", lambda work: 1 / 0)
        rows = experiment(lab, BUDGETS[:1], [Weighed()], executor=executor, out=out)
    assert [row.counts for row in rows] == [False, False] and "ZeroDivisionError" in rows[0].why
    assert not read_rows(out) and [row.score for row in experiment(lab, BUDGETS[:1], [Weighed()], out=out)] == [1.0, 0.1]


@pytest.mark.nightly
@pytest.mark.model
def test_dask_gives_the_same_rows():
    """A real cluster of two workers on this machine, each with a model of its own."""
    distributed = pytest.importorskip("distributed")
    import kvlab

    lab = kvlab.load()
    wanted, asked = (
        [Strategy(store=store.Int(bits=4)), Strategy(keep.Window(size=60, sinks=4))],
        [tasks.PassKeys(tokens=128, texts=2)],
    )
    want = experiment(lab, wanted, asked)
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        got = experiment(lab, wanted, asked, executor=client.get_executor())
    assert [(row.key, row.score, row.said, row.bytes_allocated) for row in got] == [
        (row.key, row.score, row.said, row.bytes_allocated) for row in want
    ]


def test_sweep():
    base = Strategy(keep.HeavyHitter(budget=64, recent=16, sinks=4), store.PreRope(store.Int(bits=4)))
    made = sweep(base, {"keep.budget": [64, 128], "store.inner.bits": [8, 4, 3], "chunk": [0, 32]})
    assert len(made) == 12 and made[0] == Strategy(base.keep, store.PreRope(store.Int(bits=8)))
    assert sweep(base, {"keep.recent": [16, 62]}) == [base]  # 62 + 4 protected tokens do not fit into 64
    for grid, message in (
        ({"keep.size": [1]}, "has no setting 'size'"),
        ({"store.bits": [4]}, "has no setting 'bits'"),
        ({"keep.budget": []}, "has no values"),
        ({"keep.recent": [62]}, "no combination can be"),
        ({"budget": [1]}, "has no setting 'budget'"),
    ):
        with pytest.raises(ValueError, match=message):
            sweep(base, grid)


def test_what_cannot_be_an_experiment(lab):
    with pytest.raises(ValueError, match="no strategy is given"):
        experiment(lab, [], [Weighed()])
    with pytest.raises(ValueError, match="no task is given"):
        experiment(lab, BUDGETS, [])


# tasks


@pytest.mark.parametrize(
    "task",
    [tasks.PassKeys(tokens=300, texts=3), tasks.PassKeys(tokens=300, keys=2, texts=2), tasks.TwoKeys(tokens=300, texts=2), tasks.Correction(tokens=300),
     tasks.Instruction(turns=2, texts=2), tasks.Variables(tokens=300, hops=2, texts=2), tasks.Copying(words=20, texts=2, asked=3)],
    ids=str,
)  # fmt: skip
def test_answers_are_in_the_text_and_the_same_every_time(lab, task):
    cases = list(task.cases(lab))
    assert cases == list(task.cases(lab)) and cases != list(type(task)(**{**task.__dict__, "seed": 1}).cases(lab))
    assert tasks.from_dict(json.loads(json.dumps(task.to_dict()))) == task
    for case in cases:
        assert len(case.context) <= max(getattr(task, "tokens", 0), 450)  # a token a character
        for question in case.questions:
            assert question.answer in case.context and question.answer not in question.text


def test_the_last_word_is_right():
    """A correction asks for the newer key, a list for the word that followed."""
    lab = Lab("none", None, Characters())
    lab.__class__ = type("Open", (Lab,), {"context": 4096})
    case = next(tasks.Correction(tokens=400).cases(lab))
    assert case.context.rfind(case.questions[0].answer) > len(case.context) * 0.6
    words = next(tasks.Copying(words=20, texts=1, asked=3).cases(lab))
    listed = words.context.removeprefix("A list of words: ").removesuffix(".").split(", ")
    for question in words.questions:
        before = question.text.strip(" ,").split(", ")
        at = listed.index(before[0])
        assert listed[at : at + 5] == [*before, question.answer]


def test_questions_are_asked_in_turn_through_one_cache(lab, monkeypatch):
    """The model's own continuation of each question, as generate gives it."""
    case = Case("some text to be read first", (Question(" and", "x"), Question(" then", "y")))
    answers, memory = ask(lab, None, case)
    cache = KVCache(lab.model)
    want = [lab.generate(case.context, cache=cache, max_new_tokens=1)]
    assert memory.seen == len(case.context)
    cache = KVCache(lab.model)
    lab.prefill(lab.encode(case.context), cache)
    cache.read.extend(lab.encode(case.context)[0].tolist())
    want = [lab.generate(question.text, cache=cache, max_new_tokens=3).text for question in case.questions]
    assert [answer.said for answer in answers] == want and [answer.expected for answer in answers] == ["x", "y"]


def test_an_answer_is_right_if_it_begins_so():
    right = tasks.Answer
    assert right("12345", " 12345.").right and right("Paris", "\nparis, France").right
    assert not right("12345", " 1234").right and not right("12345", "the 12345").right


def test_own_questions(lab, tmp_path):
    path = tmp_path / "own.csv"
    path.write_text('context,question,expected,more\n"A, b",q1,a1,\n"A, b",q2,a2,\nC,q3,a3,\n', encoding="utf-8")
    cases = list(tasks.Own(file=str(path)).cases(lab))
    assert [case.context for case in cases] == ["A, b", "C"] and [len(case.questions) for case in cases] == [2, 1]
    for text, message in (
        ("context,question\na,b\n", "has no column expected"),
        ("context,question,expected\n", "has no rows"),
        ("context,question,expected\na,,c\n", "line 2: question is empty"),
        ("", "has no column context, question, expected"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            tasks.Own(file=str(path))
    with pytest.raises(ValueError, match="is not there"):
        tasks.Own(file=str(tmp_path / "none.csv"))


def test_settings_that_cannot_be():
    for make, message in (
        (lambda: tasks.PassKeys(tokens=5), "tokens=5 is out of range"),
        (lambda: tasks.PassKeys(keys=9), "keys=9 is out of range"),
        (lambda: tasks.Variables(hops=0), "hops=0 is out of range"),
        (lambda: tasks.Copying(words=8, asked=4), "asked=4 is out of range"),
        (lambda: tasks.Text(prefill=0), "prefill=0 is out of range"),
        (lambda: tasks.from_dict({"task": "Nothing"}), "task='Nothing' is not one of"),
        (lambda: tasks.from_dict({"task": "PassKeys", "size": 3}), r"unknown \['size'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_a_text_that_does_not_fit(lab, tmp_path):
    with pytest.raises(ValueError, match="more than the model has room for"):
        tasks.PassKeys(tokens=600).run(lab)
    with pytest.raises(ValueError, match="has no room for what is hidden"):
        list(tasks.PassKeys(tokens=150, keys=8, texts=1).cases(lab))
    short = tmp_path / "short.txt"
    short.write_text("word " * 300)
    with pytest.raises(ValueError, match="need more text than there is"):
        tasks.PassKeys(tokens=300, texts=6, file=str(short)).run(lab)
    with pytest.raises(ValueError, match="is not there"):
        tasks.PassKeys(file="nowhere.txt").run(lab)


def test_the_text_task_is_the_reference_protocol(lab):
    from kvlab.measure import control, quality
    from kvlab.texts import reference_text

    task, strategy = tasks.Text(prefill=100, scored=80, step=8), Strategy(keep.Window(size=50, sinks=2))
    made = task.run(lab, strategy)
    want = quality(lab, strategy, control(lab, lab.encode(reference_text()[:180]), prefill=100, step=8))
    assert made.value == want.agreement and made.more["kl"] == want.mean_kl and made.more["perplexity"] == want.perplexity
    assert task.run(lab).value == 1.0 and task.run(lab).more["kl"] < 1e-9


def test_time_is_spent_where_it_is(lab):
    ids = lab.encode("a text of some length to be read by the model " * 3)
    before = attention.attend
    with phases() as spent:
        strategy = Strategy(keep.HeavyHitter(budget=40, recent=8), store.Int(bits=4, group_size=16), place.Offload(to="disk"))
        lab.generate(ids, strategy, max_new_tokens=4)
        with pytest.raises(RuntimeError, match="one measurement at a time"), phases():
            pass
    assert min(spent.read, spent.write, spent.select, spent.fetch) > 0
    assert attention.attend is before
    with phases() as spent:
        start = time.perf_counter()
        lab.generate(ids, max_new_tokens=4)
        took = time.perf_counter() - start
    assert spent.fetch == spent.select == 0 and 0 < spent.read + spent.write < took


def test_notes_of_somebody_are_left_alone(tiny_lab, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("my important notes, one line")
    with pytest.raises(ValueError, match="its last line is no row"):
        experiment(tiny_lab, [Strategy()], [tasks.Text(prefill=16, scored=8)], out=notes)
    assert notes.read_text() == "my important notes, one line"


def test_a_last_row_without_the_end_of_its_line_is_kept(tiny_lab, tmp_path):
    out, ask = tmp_path / "rows.jsonl", [tasks.Text(prefill=16, scored=8)]
    (first,) = experiment(tiny_lab, [Strategy()], ask, out=out)
    out.write_text(out.read_text().rstrip("\n"))
    assert experiment(tiny_lab, [Strategy()], ask, out=out) == [first]
    assert out.read_text().count("\n") == 1


def test_odd_ends_of_lines_and_another_content_of_the_same_file(tiny_lab, tmp_path):
    own, out = tmp_path / "own.csv", tmp_path / "rows.jsonl"
    own.write_text('context,question,expected\nsome words here,and,"x\u2028y"\n', encoding="utf-8")
    (row,) = experiment(tiny_lab, [Strategy()], [tasks.Own(file=str(own))], out=out)
    assert (
        experiment(tiny_lab, [Strategy()], [tasks.Own(file=str(own))], out=out) == [row] and len(out.read_text().split("\n")) == 2
    )
    own.write_text("context,question,expected\nsome words here,and,other\n")
    (other,) = experiment(tiny_lab, [Strategy()], [tasks.Own(file=str(own))], out=out)
    assert other.said[0][0] == "other" and other.key != row.key


def test_speed_has_times_and_no_score(tiny_lab, monkeypatch):
    """Each run passes the model, whatever is replayed elsewhere; medians stay below the slowest."""
    monkeypatch.setattr(Prompts, "prefill", lambda *_: pytest.fail("a timed prompt was replayed"))
    with tiny_lab.replaying():
        full, window = experiment(tiny_lab, [Strategy(keep=keep.Window(size=8))], [tasks.Speed(tokens=24, new=4, runs=2)])
    for row in (full, window):
        assert row.score is None and not row.counts and row.why == "this task has no score"
        assert (
            0 < row.more["first_token"] <= row.more["first_token_most"] and 0 < row.more["per_token"] <= row.more["per_token_p95"]
        )
    assert window.bytes_allocated < full.bytes_allocated
    with pytest.raises(ValueError, match="new=1"):
        tasks.Speed(new=1)
