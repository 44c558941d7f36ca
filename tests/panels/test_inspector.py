"""The inspector: what it shows is what was computed, it follows its controls, says errors and recovers, and can be read as a picture."""

import pytest

pytest.importorskip("ipywidgets")

from kvlab import store
from kvlab.measure import inspect
from kvlab.panels.inspector import DRAWINGS, Inspector
from kvlab.plots import inspect as plots
from kvlab.plots import style

TEXT = "The quick brown fox jumps over the lazy dog again and again, all day."[:64]  # 64 tokens: one for each character


@pytest.fixture
def panel(tiny_lab):
    made = Inspector(tiny_lab, TEXT, store.Int(bits=4, group_size=16))
    assert made.wait(60)
    yield made
    made.runner.cancel()
    assert made.wait(60)


def test_it_opens_in_the_middle_at_the_largest_channel(panel, tiny_lab):
    assert panel.error.value == ""
    assert panel.stage.value == "done"
    assert (panel.layer.value, panel.layer.max) == (2, 2)
    assert (panel.head.value, panel.head.max) == (0, 1)
    assert (panel.token.value, panel.token.max) == (32, 63)
    keys = inspect.record(tiny_lab, TEXT).layers[2][0][0, 0]
    assert (panel.channel.value, panel.channel.max) == (int(keys.abs().amax(0).argmax()), 15)
    assert panel.model.value == "tiny, 64 tokens"


def test_it_shows_what_was_computed(panel, tiny_lab):
    made = inspect.write(inspect.record(tiny_lab, TEXT), store.Int(bits=4, group_size=16), 2)
    token = inspect.token(made, "keys", 0, 32)
    assert list(style.trace(panel.figures["token"], plots.BACK).y)[1:-1] == pytest.approx(token.back.tolist())
    assert len(style.trace(panel.figures["layers"], "keys").y) == 3
    # a group of 16 has 32 bits of scale and zero point
    assert list(style.trace(panel.figures["bits"], "scales").x) == [2, 2, 2]
    assert "6.00 bits a number where 4 are promised: codes 4.00, scales 2.00" in panel.text
    assert f"token 32 “{TEXT[32]}”" in panel.text
    assert all(card.state == "fresh" and card.text for card in panel.cards.values())


def test_it_follows_its_controls_in_place(panel):
    figures = dict(panel.figures)
    panel.what.value, panel.layer.value, panel.head.value, panel.token.value, panel.channel.value = "values", 1, 1, 5, 3
    assert panel.wait(60)
    assert panel.cards["token"].text.startswith("Layer 1, KV head 1, values of token 5")
    assert list(style.trace(panel.figures["channels"], plots.CHOSEN).x) == [3]
    assert panel.cards["channel"].text.startswith("Channel 3: 64 numbers")
    panel.controls.settings["bits"].value = 8
    assert panel.wait(60)
    assert "10.00 bits a number where 8 are promised" in panel.text
    panel.controls.choice.value = "Dense"
    assert panel.wait(60)
    assert "relative error 0%" in panel.text
    assert "A plain number takes 32 bits here." in panel.text
    assert panel.figures == figures


def test_the_newest_of_many_moves_wins(panel):
    for token in range(40):
        panel.token.value = token
    assert panel.wait(60)
    assert panel.shown["token"].token == 39
    assert panel.runner.started < 40


def test_the_text_is_read_once(panel, monkeypatch):
    monkeypatch.setattr(inspect, "record", lambda *_: pytest.fail("read again"))
    panel.store = store.Rotated(store.Int(bits=4, group_size=16, key_axis="token"))
    assert panel.wait(60)
    assert panel.error.value == ""
    assert "Once rotated" in panel.text
    assert style.trace(panel.figures["channels"], plots.WRITTEN).visible


def test_every_store_can_be_looked_at(panel):
    for name in [name for _, name in panel.controls.choice.options]:
        panel.controls.choice.value = name
        assert panel.wait(60)
        assert type(panel.store).__name__ == name
        assert panel.error.value == "", name


def test_a_store_within_a_store_is_labelled_and_bars_have_their_hue_in_the_legend(panel):
    panel.store = store.Rotated()
    assert panel.wait(60)
    assert panel.controls.settings["inner"].children[0].value == "written as"
    style.trace(panel.figures["bits"], "codes").marker.pattern.shape = ""  # as a browser sends it back
    panel.token.value = 3
    assert panel.wait(60)
    assert f'class="kvlab-patch" style="background:{style.STORE}"></i>codes' in panel._legends["bits"].value


def test_an_error_is_one_red_line_and_the_next_run_recovers(panel):
    before = panel.text
    panel.controls.choice.value = "KIVI"
    panel.controls.settings["residual"].value = 40
    assert panel.wait(60)
    assert "KIVI: residual=40 is no multiple of group_size=32" in panel.error.value
    assert "<details>" in panel.error.value
    assert {card.state for card in panel.cards.values()} == {"stale"}
    panel.store = store.Int(bits=4, group_size=16)
    assert panel.wait(60)
    assert panel.error.value == ""
    assert panel.text == before


def test_an_empty_text_is_said(tiny_lab):
    panel = Inspector(tiny_lab, "")
    assert panel.wait(60)
    assert "prompt='' is empty" in panel.error.value
    assert panel.text == ""
    assert repr(panel) == "Inspector: nothing looked at yet"


def test_saved_for_readers_it_is_a_picture_with_its_text(panel, monkeypatch):
    drawn = []
    monkeypatch.setattr("kvlab.panels.bench.sheet", lambda columns: drawn.extend(columns) or b"png")
    assert "image/png" not in panel._repr_mimebundle_()
    monkeypatch.setenv("KVLAB_PICTURES", "1")
    bundle = panel._repr_mimebundle_()
    assert bundle["image/png"] == "cG5n"
    assert bundle["text/plain"] == f"Inspector: store.Int(bits=4, group_size=16)\n{panel.text}"
    assert sorted(title for column in drawn for title, _ in column) == sorted(drawing.title for drawing in DRAWINGS.values())
