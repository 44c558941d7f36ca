"""Openings: a panel shows its recording at once, says so, and then what was measured here; a broken or another one is as none."""

import json

import pytest

pytest.importorskip("anywidget")
from kvlab import Strategy, _data, keep, store
from kvlab.lab import Lab
from kvlab.panels import opening
from kvlab.panels.inspector import Inspector
from kvlab.panels.live_lab import LiveLab
from kvlab.panels.river import TokenRiver
from kvlab.panels.runner import WORK

TEXT = "the quick brown fox jumps over the lazy dog. " * 2
HOW = Strategy(keep=keep.HeavyHitter(budget=32, recent=8, sinks=2))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where recordings lie for this test."""
    shipped = _data.path
    folder = f"{opening.FOLDER}/"
    monkeypatch.setattr(
        _data, "path", lambda name: tmp_path / name.removeprefix(folder) if name.startswith(folder) else shipped(name)
    )
    return tmp_path


def cards(panel):
    return panel.cards.values() if isinstance(panel.cards, dict) else panel.cards


@pytest.mark.parametrize(
    "make",
    [
        lambda lab: TokenRiver(lab, TEXT, HOW),
        lambda lab: Inspector(lab, TEXT, store.Int(bits=4, group_size=16)),
        lambda lab: LiveLab(lab, TEXT, HOW),
    ],
    ids=["river", "inspector", "live lab"],
)
def test_it_opens_with_what_was_recorded(make, tiny_lab: Lab, folder) -> None:
    first = make(tiny_lab)
    assert first.wait(120) and first.error.value == ""
    (folder / first.opened).write_text(json.dumps(opening.take(cards(first), "a test")))
    with WORK:  # nothing can be measured yet
        again = make(tiny_lab)
        assert again.opened == first.opened and again.shown.keys() <= {"prediction"}
        for card, old in zip(cards(again), cards(first), strict=True):
            assert card.text == old.text
            assert "recorded " in card.top.value and "kvlab-dim" not in card._dom_classes
            for part, was in zip(opening._parts(card), opening._parts(old), strict=True):
                assert opening._value(part) == opening._value(was)
    assert again.wait(120) and again.error.value == ""
    for card, old in zip(cards(again), cards(first), strict=True):
        assert "recorded " not in card.top.value and card.state == "fresh"
        for part, was in zip(
            opening._parts(card), opening._parts(old), strict=True
        ):  # figures go on from the recording as from any run
            if not hasattr(part, "value"):
                assert len(part.data) == len(was.data)


def test_it_is_called_a_recording_as_long_as_it_is_one(tiny_lab: Lab, folder, monkeypatch) -> None:
    with WORK:
        made = TokenRiver(tiny_lab, TEXT, HOW)
    assert made.wait(120)
    (folder / made.opened).write_text(json.dumps(opening.take(made.cards.values(), "a test")))
    with WORK:
        panel = TokenRiver(tiny_lab, TEXT, HOW)
        panel.cancel.click()
    assert panel.wait(120)
    for card in panel.cards.values():
        assert card.state == "stale" and "recorded 20" in card.top.value and "; stale: the run was cancelled" in card.top.value
    monkeypatch.setattr(TokenRiver, "_answer", lambda *_: 1 / 0)
    with WORK:
        panel = TokenRiver(tiny_lab, TEXT, HOW)
    assert panel.wait(120) and "ZeroDivisionError" in panel.error.value
    for card in panel.cards.values():
        assert card.state == "stale" and "recorded 20" in card.top.value and "; stale: from before the error" in card.top.value


def test_only_of_just_this(tiny_lab: Lab, folder) -> None:
    made = TokenRiver(tiny_lab, TEXT, HOW)
    assert made.wait(120)
    (folder / made.opened).write_text(json.dumps(opening.take(made.cards.values(), "a test")))
    for other in (
        lambda: TokenRiver(tiny_lab, TEXT + "x", HOW),
        lambda: TokenRiver(tiny_lab, TEXT, Strategy(keep=keep.Window(size=16))),
    ):
        with WORK:
            panel = other()
            assert panel.opened != made.opened and panel.text == ""
        panel.runner.cancel()
        assert panel.wait(120)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"cards": {}, "date": "x", "machine": {"processor": "p", "cores": 2}}'])
def test_a_broken_one_is_as_none(text: str, tiny_lab: Lab, folder) -> None:
    with WORK:
        name = TokenRiver(tiny_lab, TEXT, HOW).opened
        (folder / name).write_text(text)
        panel = TokenRiver(tiny_lab, TEXT, HOW)
        assert panel.text == "" and panel.error.value == ""
    assert panel.wait(120) and panel.error.value == ""
