"""Figures of the studies: what is drawn is what the rows say."""

import pytest

pytest.importorskip("plotly")

from kvlab.plots import studies

STREAM = [
    {"name": "with sinks", "window": 100, "loss": [3.0, 2.0, 2.0, 2.0, 2.0]},
    {"name": "without", "window": 100, "loss": [3.0, 2.0, 6.0, 7.0, 8.0]},
]
COSTS = [
    {"name": "full cache", "kl": 0.0, "perplexity_change": 0.0},
    {"name": "H2O", "kl": 0.1, "perplexity_change": 0.05},
    {"name": "random", "kl": 2.0, "perplexity_change": 10.0},
]
RECALL = [
    {
        "name": "full cache",
        "found": [16, 14],
        "asked": [16, 16],
        "first": [8, 7],
        "second": [8, 7],
        "devices": {"cpu": 200},
        "reference": 100,
    },
    {"name": "on disk", "found": [12], "asked": [16], "first": [4], "second": [8], "devices": {"disk": 33}, "reference": 100},
]


def test_a_stream_is_drawn_in_the_middle_of_each_stretch():
    fig = studies.endless(STREAM, 250)
    assert list(fig.data[0].x) == [50, 150, 250, 350, 450] and list(fig.data[1].y) == STREAM[1]["loss"]
    assert (
        fig.layout.shapes[0].x0 == 250 and "tokens read" in fig.layout.xaxis.title.text and "nats" in fig.layout.yaxis.title.text
    )
    said = studies.endless_summary(STREAM)
    assert (
        "with sinks: 2.00 nats after the first 100 tokens, 2.00 at the end" in said
        and "without: 5.00" in said
        and "5.75 at the end" in said
    )


def test_costs_are_sorted_and_the_control_is_left_out():
    fig = studies.costs(COSTS)
    assert list(fig.data[0].y) == ["random", "H2O"] and list(fig.data[0].x) == [1000.0, 5.0]
    assert fig.data[0].marker.color[0] != fig.data[0].marker.color[1] and "%" in fig.layout.xaxis.title.text
    assert studies.costs_summary(COSTS) == "H2O costs least (+5.0% perplexity), random most (+1000%)."
    assert studies.costs_summary(COSTS[:1]) == "Nothing was lost."


def test_recall_is_a_share_of_all_that_was_asked():
    fig = studies.recalled(RECALL)
    first, second = fig.data
    assert list(first.x) == [25.0, 46.875] and list(second.x) == [50.0, 46.875]
    assert list(first.y) == ["on disk (33% on disk)", "full cache (200% on cpu)"] and fig.layout.xaxis.range == (0, 100)
    assert studies.recalled_summary(RECALL) == "full cache: 30 of 32; on disk: 12 of 16."
