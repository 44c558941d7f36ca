"""Several figures as one picture, for a notebook that is read where nothing runs."""

import base64
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

WIDTH = 520  # pixels of one figure
HEAD, FOOT = 34, 78  # room for its title, and for its legend

Titled = tuple[str, go.Figure]


def sheet(columns: Sequence[Sequence[Titled]]) -> bytes:
    """A PNG of titled figures, stacked in columns; each with its legend, which a live panel shows beside the figure instead."""
    width = WIDTH * len(columns)
    height = max(sum(_height(figure) for _, figure in column) for column in columns)
    images: list[dict[str, Any]] = []
    for number, column in enumerate(columns):
        top = 0
        for title, figure in column:
            png = _still(title, figure).to_image("png", width=WIDTH, height=_height(figure))
            images.append(
                {
                    "source": "data:image/png;base64," + base64.b64encode(png).decode(),
                    "xref": "paper",
                    "yref": "paper",
                    "x": number / len(columns),
                    "y": 1 - top / height,
                    "sizex": 1 / len(columns),
                    "sizey": _height(figure) / height,
                }
            )
            top += _height(figure)
    page = go.Figure(layout={"images": images, "margin": dict.fromkeys("lrtb", 0), "template": "none"})
    page.update_xaxes(visible=False)
    page.update_yaxes(visible=False)
    return bytes(page.to_image("png", width=width, height=height))


def _height(figure: go.Figure) -> int:
    return int(figure.layout.height or 400) + HEAD + FOOT


def _still(title: str, figure: go.Figure) -> go.Figure:
    copy = go.Figure(figure)
    margin = {"t": 14 + HEAD, "b": 44 + FOOT, "l": 60, "r": 16}
    return copy.update_layout(title={"text": title}, showlegend=True, margin=margin, autosize=False)
