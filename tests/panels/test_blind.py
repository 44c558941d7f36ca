"""The blind test: the two texts are what they are said to be, votes are kept, and nothing can be voted on that is the same."""

import json

import pytest

pytest.importorskip("ipywidgets")

from kvlab import Strategy, keep
from kvlab.panels.blind import BlindTest
from kvlab.plots import style

TEXT = "The quick brown fox jumps over the lazy dog again and again, all day. " * 12
HOW = Strategy(keep=keep.Window(size=8, sinks=0))


@pytest.fixture
def panel(tiny_lab, tmp_path):
    made = BlindTest(tiny_lab, HOW, TEXT, out=tmp_path / "votes" / "votes.jsonl", seed=1)
    assert made.wait(60)
    yield made
    made.runner.cancel()
    assert made.wait(60)


def test_the_texts_are_those_of_the_caches(panel, tiny_lab):
    made = panel.shown["round"]
    ids = tiny_lab.encode_long(TEXT)[:, :256]
    assert made.text == TEXT[:256] and panel.error.value == ""
    assert made.full == tiny_lab.generate(ids, Strategy(), max_new_tokens=32).text
    assert made.other == tiny_lab.generate(ids, HOW, max_new_tokens=32).text != made.full
    a = panel.texts.value.partition("<b>A</b>")[2].partition("</div>")[0]
    assert (len(a.strip()) > 0) and not panel.a.disabled and "One of the two" in panel.text


def test_votes_are_kept_and_counted(panel, tiny_lab):
    first = panel.shown["round"]
    panel.vote(first.first_is_full)
    assert panel.wait(60) and panel.verdict.value.startswith("Right")
    second = panel.shown["round"]
    assert second.text != first.text and second.number == 1
    if not second.same:
        panel.vote(not second.first_is_full)
        assert panel.wait(60) and panel.verdict.value.startswith("Wrong")
    lines = [json.loads(line) for line in panel.path.read_text().splitlines()]
    assert lines[0]["right"] is True and lines[0]["full"] == first.full and lines[0]["model"] == "tiny"
    share = 100 / len(lines)
    assert list(style.trace(panel.figures["votes"], "votes").y) == [share]
    again = BlindTest(tiny_lab, HOW, TEXT, out=panel.path, seed=2)
    assert again.wait(60) and again.votes == panel.votes
    other = BlindTest(tiny_lab, Strategy(keep=keep.Window(size=16)), TEXT, out=panel.path)
    assert other.wait(60) and other.votes == []


def test_the_order_is_chance_and_the_same_with_the_same_seed(tiny_lab, tmp_path):
    def first(seed):
        panel = BlindTest(tiny_lab, HOW, TEXT, out=tmp_path / "votes.jsonl", seed=seed)
        assert panel.wait(60)
        return panel.shown["round"].first_is_full

    found = [first(seed) for seed in range(4)]
    assert set(found) == {True, False} and first(2) == found[2]


def test_the_same_words_take_no_vote(panel):
    panel.keep.choice.value = "Everything"
    assert panel.wait(60)
    assert panel.shown["round"].same and panel.a.disabled and not panel.skip.disabled and "nothing to tell apart" in panel.text
    panel.vote(True)
    assert panel.wait(60) and not panel.path.exists()


def test_a_file_that_holds_something_else_is_said(panel):
    panel.path.parent.mkdir(parents=True, exist_ok=True)
    panel.path.write_text('{"no": "vote"}\n')
    panel.skip.click()
    assert panel.wait(60)
    assert "line 1 is no vote" in panel.error.value


def test_too_little_text_is_said(tiny_lab, tmp_path):
    panel = BlindTest(tiny_lab, HOW, "short", out=tmp_path / "votes.jsonl")
    assert panel.wait(60)
    assert "the text has 5 tokens" in panel.error.value and repr(panel) == "BlindTest: nothing shown yet"
