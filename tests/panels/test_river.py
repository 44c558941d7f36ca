"""The token river's panel: it shows what was measured, follows its controls, remembers its runs, says errors and recovers, and can be read as a picture."""

import numpy as np
import pytest
import torch

pytest.importorskip("ipywidgets")

from kvlab import Strategy, keep, store
from kvlab.measure import river as measured
from kvlab.measure.river import River, attended, river
from kvlab.panels import river as panels
from kvlab.panels.river import DRAWINGS, START, TokenRiver
from kvlab.plots import river as plots
from kvlab.plots import style

TEXT = "The quick brown fox jumps over the lazy dog again and again, all day."[:64]  # 64 tokens: one for each character
HOW = Strategy(keep=keep.HeavyHitter(budget=24, recent=8))


@pytest.fixture
def panel(tiny_lab):
    made = TokenRiver(tiny_lab, TEXT, HOW)
    assert made.wait(60)
    yield made
    made.runner.cancel()
    assert made.wait(60)


@pytest.fixture
def no_more_runs(panel, monkeypatch):
    monkeypatch.setattr(panels, "river", lambda *_, **__: pytest.fail("the model ran again"))


def test_it_opens_with_a_token_read_after_the_prefill(panel):
    assert panel.error.value == ""
    assert panel.stage.value == "done"
    assert (panel.token.value, panel.token.min, panel.token.max) == (18, 0, 63)
    assert panel.model.value == "tiny, 64 tokens"
    assert panel.strategy == HOW
    assert panel.shown["river"].prefill == 16


def test_a_part_is_the_river_of_a_shorter_text(tiny_lab, monkeypatch):
    monkeypatch.setattr(measured, "PAUSE", 0.0)
    ids = tiny_lab.encode(TEXT)
    parts: list[River] = []
    whole = river(tiny_lab, HOW, ids, prefill=20, full=attended(tiny_lab, ids, prefill=20), part=parts.append)
    assert [made.tokens for made in parts] == [36, 52]
    for made in parts:
        short = river(tiny_lab, HOW, ids[:, : made.tokens], prefill=20)
        assert made.words == short.words and made.times.tolist() == short.times.tolist()
        for name in ("gone", "worth", "floor"):
            assert torch.equal(torch.nan_to_num(getattr(made, name)), torch.nan_to_num(getattr(short, name))), name
        assert torch.allclose(made.lost, short.lost, atol=1e-6) and torch.allclose(made.sinks, short.sinks, atol=1e-6)
    assert torch.allclose(parts[-1].lost, whole.lost[..., :52], atol=1e-6)


def test_it_grows_while_it_is_read(panel, monkeypatch):
    monkeypatch.setattr(measured, "PAUSE", 0.0)
    seen = []
    mark = panel.cards["flow"].mark
    monkeypatch.setattr(
        panel.cards["flow"],
        "mark",
        lambda state, note="": (
            mark(state, note),
            seen.append((state, note, style.trace(panel.figures["flow"], plots.MAP).x[-1])),
        ),
    )
    panel.token.value = 40
    panel.controls.settings["budget"].value = 20
    assert panel.wait(60) and panel.error.value == ""
    grown = [(note, int(end)) for state, note, end in seen if state == "waiting" and note]
    assert grown == [("so far: 32 tokens", 48), ("so far: 48 tokens", 64)]
    assert seen[-1][0] == "fresh" and panel.cards["flow"].text.startswith("After 64 tokens") and "Token 40 “" in panel.text


def test_it_begins_with_heavy_hitters(tiny_lab):
    assert TokenRiver(tiny_lab, TEXT).strategy == Strategy(keep=START)


def test_it_shows_what_was_measured(panel, tiny_lab):
    made = river(tiny_lab, HOW, tiny_lab.encode(TEXT), prefill=16)
    drawn = style.trace(panel.figures["flow"], plots.MAP)
    assert np.array(drawn.z).tolist() == plots.shades(plots.cells(made).share).tolist()
    assert list(style.trace(panel.figures["lost"], plots.GONE).y) == pytest.approx((100 * made.lost_by_time()).tolist())
    assert np.array(style.trace(panel.figures["survival"], plots.MAP).z) == pytest.approx(made.reach().T.numpy())
    assert np.array(style.trace(panel.figures["overlap"], plots.MAP).z) == pytest.approx(made.overlap().numpy())
    assert "After 64 tokens a head holds 24 of them (38%, mean of 6 heads)" in panel.text
    assert f"Token 18 “{TEXT[18]}”: " in panel.cards["flow"].text
    assert all(card.state == "fresh" and card.text for card in panel.cards.values())


@pytest.mark.usefixtures("no_more_runs")
def test_another_token_needs_no_run(panel):
    started = panel.runner.started
    panel.token.value = 63
    assert panel.runner.started == started
    assert panel.cards["flow"].text.endswith(f"Token 63 “{TEXT[63]}”: all 6 heads still hold it.")
    assert list(style.trace(panel.figures["flow"], plots.CHOSEN).x) == [64, 80]
    assert len(style.trace(panel.figures["survival"], plots.HOLDERS).x) == 6
    panel.token.value = 5
    left = len(panel.shown["river"].left(5))
    assert len(style.trace(panel.figures["survival"], plots.HOLDERS).x) == 6 - left
    assert panel.error.value == ""


def test_another_token_does_not_make_stale_figures_fresh(panel):
    panel.controls.settings["recent"].value = 48
    assert panel.wait(60)
    assert "HeavyHitter: budget=24 is below recent + sinks = 52" in panel.error.value
    panel.token.value = 3
    assert "Token 3 " in panel.cards["flow"].text
    assert {card.state for card in panel.cards.values()} == {"stale"}


def test_it_follows_its_controls_in_place(panel):
    figures = dict(panel.figures)
    panel.controls.settings["budget"].value = 32
    assert panel.wait(60)
    assert "a head holds 32 of them (50%, " in panel.text
    panel.controls.choice.value = "Window"
    panel.controls.settings["size"].value = 16
    assert panel.wait(60)
    assert panel.shown["strategy"].keep == keep.Window(size=16)
    assert "All layers hold the same tokens." in panel.text
    panel.token.value = 20
    assert "Each of them: worth 20.0, all others were protected." in panel.text
    assert panel.figures == figures


def test_a_keep_that_was_seen_before_needs_no_run(panel, monkeypatch):
    before = panel.text
    panel.controls.settings["budget"].value = 32
    assert panel.wait(60)
    monkeypatch.setattr(panels, "river", lambda *_, **__: pytest.fail("the model ran again"))
    panel.controls.settings["budget"].value = 24
    assert panel.wait(60)
    assert panel.error.value == ""
    assert panel.text == before


def test_it_remembers_the_last_eight(panel, monkeypatch):
    made = panel.shown["river"]
    monkeypatch.setattr(panels, "river", lambda _, strategy, *__, **___: panels.replace(made, strategy=strategy))
    for size in range(20, 30):
        panel.strategy = Strategy(keep=keep.Window(size=size))
        assert panel.wait(60)
    assert [run.keep.size for run in panel._runs] == list(range(22, 30))


@pytest.mark.parametrize("method", ["Everything", "Quest"])
def test_where_nothing_leaves_it_says_so(panel, method):
    panel.controls.choice.value = method
    assert panel.wait(60)
    assert "Nothing leaves: all 6 heads hold all 64 tokens in the end." in panel.text
    assert "None of the full cache's attention falls on tokens that are gone" in panel.text
    assert set(np.array(style.trace(panel.figures["flow"], plots.MAP).z).flatten()) == {0, 255}


def test_roles_that_a_text_does_not_have_are_one_red_line_and_the_next_run_recovers(panel):
    before = panel.text
    panel.controls.choice.value = "Conversation"
    panel.controls.settings["budget"].value = 32
    assert panel.wait(60)
    assert "<b>this cache was not told who speaks" in panel.error.value
    assert "<details>" in panel.error.value
    assert {card.state for card in panel.cards.values()} == {"stale"}
    panel.strategy = HOW
    assert panel.wait(60)
    assert panel.error.value == ""
    assert panel.text == before


def test_every_keep_can_be_looked_at(panel):
    for name in [name for _, name in panel.controls.choice.options]:
        panel.controls.choice.value = name
        assert panel.wait(60)
        if "cannot give with these settings" not in panel.error.value:  # it needs another store, which is said
            assert panel.error.value == "", name
            assert type(panel.shown["strategy"].keep).__name__ == name


def test_what_is_not_its_keep_stays_as_it_was_given(tiny_lab):
    panel = TokenRiver(tiny_lab, TEXT, Strategy(keep=HOW.keep, store=store.Int(bits=8, group_size=16), chunk=8), prefill=32)
    assert panel.wait(60)
    assert panel.error.value == ""
    assert (panel.shown["strategy"].store.bits, panel.shown["strategy"].chunk) == (8, 8)
    assert panel.shown["river"].prefill == 32


@pytest.mark.parametrize("text, words", [("", "prompt='' is empty"), ("x", "the text has 1 token(s)")])
def test_a_text_that_is_too_short_is_said(tiny_lab, text, words):
    panel = TokenRiver(tiny_lab, text)
    assert panel.wait(60)
    assert words in panel.error.value
    assert panel.text == ""
    assert repr(panel) == "TokenRiver: nothing looked at yet"
    panel.token.value = 1  # there is no river yet
    assert panel.text == ""


def test_saved_for_readers_it_is_a_picture_with_its_text(panel, monkeypatch):
    drawn = []
    monkeypatch.setattr("kvlab.panels.bench.sheet", lambda columns: drawn.extend(columns) or b"png")
    assert "image/png" not in panel._repr_mimebundle_()
    monkeypatch.setenv("KVLAB_PICTURES", "1")
    bundle = panel._repr_mimebundle_()
    assert bundle["image/png"] == "cG5n"
    assert bundle["text/plain"] == f"TokenRiver: {HOW.to_code()}\n{panel.text}"
    assert sorted(title for column in drawn for title, _ in column) == sorted(drawing.title for drawing in DRAWINGS.values())
