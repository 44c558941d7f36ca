"""The offloading panel: it shows what was measured, follows its controls, says errors and recovers, and can be read as a picture."""

import pytest

pytest.importorskip("ipywidgets")

from kvlab import Strategy, keep, place, store
from kvlab.panels import offloading as panels
from kvlab.panels.offloading import DRAWINGS, Offloading, repeated
from kvlab.plots import style
from kvlab.plots import timeline as plots

TEXT = "The quick brown fox jumps over the lazy dog again and again, all day."[:64]
PAGE = 16 * 2 * 2 * 16 * 4  # tokens, keys and values, heads, dim, float32: bytes of one layer's page


@pytest.fixture
def panel(tiny_lab):
    made = Offloading(tiny_lab, TEXT, Strategy(place=place.Offload(prefetch=0)), tokens=128)
    assert made.wait(60)
    yield made
    made.runner.cancel()
    assert made.wait(60)


def test_it_shows_what_was_measured(panel):
    made = panel.shown["moved"]
    assert panel.error.value == "" and panel.stage.value == "done" and panel.model.value == "tiny, 64 tokens"
    assert made.bytes == 3 * 8 * PAGE and made.tokens == 128 + 2 + 5
    step = [span for span in made.line.steps(1, 1).spans if span.kind == "fetch"]
    assert list(style.trace(panel.figures["step"], plots.LANES["fetch"][0]).x) == [1e3 * span.seconds for span in step]
    assert style.trace(panel.figures["held"], "bytes").x[2] == made.high_water / 1e6
    assert "predicted" in panel.cards["links"].text and "layers' worth" in panel.cards["held"].text
    assert all(card.state == "fresh" and card.text for card in panel.cards.values())


def test_it_follows_its_controls_in_place(panel):
    figures = dict(panel.figures)
    panel.place.settings["hot"].value = 64
    assert panel.wait(60) and panel.shown["moved"].bytes == 3 * 4 * PAGE
    panel.tokens.value = 192
    assert panel.wait(60) and panel.shown["moved"].bytes == 3 * 8 * PAGE
    panel.pages.value = 50
    assert panel.wait(60)
    assert panel.strategy.keep == keep.Quest(budget=0.5) and panel.shown["moved"].bytes < 3 * 8 * PAGE
    assert "nothing is fetched ahead" in panel.cards["step"].text
    panel.pages.value = 100
    panel.store.choice.value = "Int"
    panel.store.settings["group_size"].value = 16
    assert panel.wait(60) and isinstance(panel.shown["strategy"].store, store.Int)
    panel.place.choice.value = "Resident"
    assert panel.wait(60) and panel.shown["moved"].bytes == 0 and "Nothing is fetched." in panel.cards["step"].text
    assert panel.error.value == "" and panel.figures == figures


def test_an_emulated_link_is_labelled(panel):
    panel.place.settings["emulate"].value = 0.25
    assert panel.wait(60)
    assert "emulated at 0.25 GB/s" in panel.text
    assert style.trace(panel.figures["links"], plots.MEASURED).visible is False


def test_a_strategy_can_be_set(panel):
    panel.strategy = Strategy(keep=keep.Quest(budget=0.25), place=place.Offload(prefetch=2, hot=32))
    assert panel.wait(60)
    assert panel.pages.value == 25 and panel.place.settings["prefetch"].value == 2
    assert panel.shown["strategy"] == Strategy(keep=keep.Quest(budget=0.25), place=place.Offload(prefetch=2, hot=32))


def test_the_step_without_moving_is_measured_once(panel, monkeypatch):
    real, resident = panels.moved, []

    def counted(lab, strategy, *args, **more):
        resident.append(isinstance(strategy.place, place.Resident))
        return real(lab, strategy, *args, **more)

    monkeypatch.setattr(panels, "moved", counted)
    for ahead in (1, 2):
        panel.place.settings["prefetch"].value = ahead
        assert panel.wait(60)
    assert resident == [False, False]


def test_what_does_not_go_is_one_red_line_and_the_next_run_recovers(panel, tmp_path):
    panel.place.settings["folder"].value = str(tmp_path / "nowhere")
    assert panel.wait(60)
    assert "cannot write in the folder" in panel.error.value and {card.state for card in panel.cards.values()} == {"stale"}
    panel.place.settings["folder"].value = ""
    assert panel.wait(60) and panel.error.value == ""
    panel.place.settings["hot_layers"].value = "9"
    assert panel.wait(60) and "names layer 9, the model has 3" in panel.error.value


def test_keys_are_repeated_to_length(tiny_lab):
    layers = repeated([(tiny_lab.model.lm_head.weight[None, None, :10, :4],) * 2], 25)
    assert layers[0][0].shape[2] == 25 and (layers[0][0][:, :, 20:] == layers[0][0][:, :, :5]).all()


def test_saved_for_readers_it_is_a_picture_with_its_text(panel, monkeypatch):
    drawn = []
    monkeypatch.setattr("kvlab.panels.bench.sheet", lambda columns: drawn.extend(columns) or b"png")
    monkeypatch.setenv("KVLAB_PICTURES", "1")
    bundle = panel._repr_mimebundle_()
    assert bundle["text/plain"] == f"Offloading: {panel.shown['strategy'].to_code()}\n{panel.text}"
    assert sorted(title for column in drawn for title, _ in column) == sorted(drawing.title for drawing in DRAWINGS.values())
