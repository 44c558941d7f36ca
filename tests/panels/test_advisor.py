"""The advisor: it follows its controls, shows what `advise` says, measures on the model at hand, and recovers from errors."""

import json

import pytest

pytest.importorskip("ipywidgets")

from kvlab import Strategy, advise, geometry, hardware
from kvlab.panels import advisor as panels
from kvlab.panels.advisor import DRAWINGS, OWN, Advisor
from kvlab.panels.memory import MemoryCalculator
from kvlab.plots import style


@pytest.fixture
def panel(tiny_lab):
    made = Advisor(tiny_lab)
    assert made.wait(60)
    yield made
    made.runner.cancel()
    assert made.wait(60)


def test_it_says_what_advise_says(tiny_lab):
    panel = Advisor()
    assert panel.wait(60) and panel.error.value == ""
    want = advise.advise("Llama-3.1-8B", "A10 24GB", 32768, 4)
    assert str(panel.advice) == str(want)
    assert list(style.trace(panel.figures["binds"], "need").x) == [100 * one.ratio for one in want.constraints]
    assert len(style.trace(panel.figures["options"], "bytes").x) == len(want.options) == len(panel.choice.options)
    assert panel.option == want.options[0] and "BINDS" in panel.cards["binds"].text
    assert "vllm serve MODEL" in panel.settings.value and panel.option.strategy.to_code() in panel.settings.value
    assert all(card.state == "fresh" and card.text for card in panel.cards.values())


def test_it_follows_its_controls_in_place(panel):
    figures = dict(panel.figures)
    panel.model_choice.value = "Llama-3.1-70B"
    assert panel.wait(60) and any("weights and activations alone" in note for note in panel.advice.notes)
    panel.devices.value = 8
    panel.context.value = 131072
    panel.per_token.value = 50
    assert panel.wait(60)
    want = advise.advise("Llama-3.1-70B", "A10 24GB", 131072, 4, limits=advise.Limits(per_token=0.05), devices=8)
    assert str(panel.advice) == str(want)
    panel.choice.value = 2
    panel.engine.value = "llama.cpp"
    assert panel.wait(60) and panel.option == panel.advice.options[2] and "llama-server" in panel.settings.value
    assert panel.figures == figures and panel.error.value == ""


def test_ones_own_model_and_a_measurement_of_it(panel, tiny_lab, monkeypatch):
    assert panel.model_choice.value == OWN and panel.advice.model == tiny_lab.geometry.name
    monkeypatch.setitem(panels.TASKS, panel.task.value, panels.Text(prefill=32, scored=16))
    panel.choice.value = 1
    assert panel.wait(60)
    panel.measure.click()
    assert panel.wait(60) and panel.error.value == ""
    control, row = panel.shown["rows"]
    assert control.settings == Strategy().to_dict() and row.settings == panel.option.strategy.to_dict()
    assert "measured" not in panel.cards["options"].text and panel.cards["quality"].text.startswith(
        "Text on tiny: full cache: 1.00;"
    )
    panel.concurrency.value = 8  # and another control measures nothing again
    assert panel.wait(60) and len(panel.shown["rows"]) == 2


def test_what_cannot_be_is_one_red_line(panel):
    panel.context.value = 1 << 20  # beyond the tiny model's 512 tokens
    assert panel.wait(60)
    assert "beyond what" in panel.error.value and {card.state for card in panel.cards.values()} == {"stale"}
    panel.context.value = 512
    assert panel.wait(60) and panel.error.value == "" and {card.state for card in panel.cards.values()} == {"fresh"}


def test_every_model_and_device_of_the_tables_can_be_asked_for(panel):
    for name in panel.model_choice.options:
        if name != OWN:
            assert geometry.find(name).kv_layers
    for device in hardware.names("gpu", "cpu"):
        assert advise.advise(panel._own, device, 512).options
    assert list(panel.device.options) == hardware.names("gpu", "cpu")


def test_it_is_read_as_a_picture(panel, monkeypatch):
    drawn = []
    monkeypatch.setattr("kvlab.panels.bench.sheet", lambda columns: drawn.extend(columns) or b"png")
    monkeypatch.setenv("KVLAB_PICTURES", "1")
    bundle = panel._repr_mimebundle_()
    assert bundle["image/png"] == "cG5n" and bundle["text/plain"].startswith("Advisor: ")
    assert sorted(title for column in drawn for title, _ in column) == sorted(drawing.title for drawing in DRAWINGS.values())


def test_your_own_shape(tmp_path):
    config = {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 10,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    panel = Advisor(model=str(tmp_path))
    assert panel.wait(60) and panel.error.value == ""
    assert panel.model_choice.value == str(tmp_path) and "A token takes 384 B" in panel.text
    with pytest.raises(ValueError, match="no model 'nothing'"):
        Advisor(model="nothing")
    calculator = MemoryCalculator(str(tmp_path), "A10 24GB", 512)
    assert calculator.error.value == "" and "KV 197 kB" in calculator.summary.value  # 384 x 512 = 196,608 bytes
    with pytest.raises(ValueError, match="no model 'nothing'"):
        MemoryCalculator("nothing")
