"""Several figures as one picture, for a notebook that is read where nothing runs."""

import base64
from collections.abc import Sequence

import plotly.graph_objects as go

WIDTH = 520  # pixels of one figure


def stack(figures: Sequence[go.Figure], columns: int = 2) -> bytes:
    """The figures as a PNG, `columns` beside one another."""
    heights = [figure.layout.height or 400 for figure in figures]
    rows = [range(start, min(start + columns, len(figures))) for start in range(0, len(figures), columns)]
    tops = [sum(max(heights[i] for i in above) for above in rows[:number]) for number in range(len(rows) + 1)]
    width, height = WIDTH * columns, tops[-1]
    images = []
    for row, top in zip(rows, tops, strict=False):
        for place, number in enumerate(row):
            png = figures[number].to_image("png", width=WIDTH, height=heights[number])
            images.append(
                {
                    "source": "data:image/png;base64," + base64.b64encode(png).decode(),
                    "xref": "paper",
                    "yref": "paper",
                    "x": place / columns,
                    "y": 1 - top / height,
                    "sizex": 1 / columns,
                    "sizey": heights[number] / height,
                    "xanchor": "left",
                    "yanchor": "top",
                }
            )
    sheet = go.Figure(layout={"images": images, "margin": dict.fromkeys("lrtb", 0), "template": "none"})
    sheet.update_xaxes(visible=False)
    sheet.update_yaxes(visible=False)
    return bytes(sheet.to_image("png", width=width, height=height))
