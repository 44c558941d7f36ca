"""Openings: what a panel showed when it was recorded, so that a slow one starts at once.

They lie in `data/openings/`, one JSON file for each panel of the course as its notebook opens it. A panel that is about to work out just that shows the recording,
with machine and date beside the titles of its cards, until what is measured here takes its place.
"""

import datetime
import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go
from torch import Tensor

from kvlab import _data
from kvlab.measure.machine import machine
from kvlab.panels.views import Card

FOLDER = "openings"  # in the data folder
PAUSE = 1.5  # seconds that a browser is given to draw a recording, before measuring takes the processor


def name(panel: str, asked: object, model: str, prompt: object) -> str:
    """Of the file: the panel's class, and a hash of all that what it shows depends on."""
    words: Any = prompt.flatten().tolist() if isinstance(prompt, Tensor) else prompt
    said = json.dumps([repr(asked), model, words])
    return f"{panel}-{hashlib.sha256(said.encode()).hexdigest()[:12]}.json"


def take(cards: Iterable[Card], command: str) -> dict[str, Any]:
    """What the cards show now, with the machine and the date."""
    shown = {card.title: [_value(part) for part in _parts(card)] for card in cards}
    return {"machine": machine(), "date": datetime.date.today().isoformat(), "command": command, "cards": shown}


def show(panel: Any, cards: Iterable[Card], asked: object, model: str, prompt: object) -> float | None:
    """Before a panel's first run: let its cards show what was recorded of just this -> the seconds that measuring then waits.

    None where there is no such recording, or not of these cards, or it is not the panel's first run. `panel.opened` is what the recording is called.
    """
    if panel.opened:
        return None
    panel.opened = name(type(panel).__name__, asked, model, prompt)
    try:
        made = json.loads(_data.path(f"{FOLDER}/{panel.opened}").read_text(encoding="utf-8"))
        shown = [
            (card, [(part, value if isinstance(part, widgets.HTML) else go.Figure(value)) for part, value in pairs])
            for card in cards
            for pairs in [zip(_parts(card), made["cards"][card.title], strict=True)]
        ]  # all of it is read before anything is shown
        note = f"recorded {made['date']}, {made['machine']['processor']}, {made['machine']['cores']} cores"
    except (FileNotFoundError, KeyError, TypeError, ValueError):  # a recording is a convenience: without it the panel opens empty
        return None
    for card, pairs in shown:
        for part, value in pairs:
            _set(part, value)
        card.mark("waiting", note)
        card.recorded = note
    return PAUSE


def _parts(card: Card) -> Iterator[widgets.Widget]:
    """The card's figures and lines of text, without its head."""
    waiting: list[Any] = [child for child in card.children if child is not card.top]
    while waiting:
        part = waiting.pop(0)
        if isinstance(part, go.FigureWidget) or type(part) is widgets.HTML:
            yield part
        elif isinstance(part, widgets.Box):
            waiting = [*part.children, *waiting]


def _value(part: Any) -> Any:
    if isinstance(part, widgets.HTML):
        return part.value
    made = json.loads(part.to_json())
    made["layout"].pop("template", None)
    return made


def _set(part: Any, value: Any) -> None:
    if isinstance(part, widgets.HTML):
        part.value = str(value)
        return
    with part.batch_update():
        part.data = ()
        part.add_traces(value.data)
        part.update_layout(value.layout.to_plotly_json() | {"template": part.layout.template}, overwrite=False)
