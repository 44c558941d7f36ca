"""The panels of serving: what they show is what the engine and the simulator hold, and bad combinations are said."""

from typing import Any

import pytest

from kvlab.lab import Lab
from kvlab.panels.block_table import BlockTable
from kvlab.panels.traffic import BLOCKS, CONTINUOUS, STATIC, WORST, Traffic
from kvlab.plots import serving as plots
from kvlab.plots import style
from tests.panels.conftest import Characters


@pytest.fixture(scope="module")
def table(llama: Any) -> BlockTable:
    panel = BlockTable(Lab("tiny", llama, Characters()), requests=4, every=2, prefix=20, own=8, new=6, memory=128)
    assert panel.wait(60) and not panel.error.value
    return panel


def test_every_step_stays(table: BlockTable) -> None:
    frames = table.frames
    assert len(frames) > 6 and [now.number for now in frames] == list(range(1, len(frames) + 1))
    assert table.step.max == len(frames) and table.step.value == len(frames)
    table.step.value = 3
    now = frames[2]
    assert table.cards["table"].text == plots.block_table_summary(now) and "Step 3" in table.text
    drawn = sum(
        len(one.x)
        for one in table.figures["table"].data
        if one.type == "bar" and one.visible is not False and one.name != plots.EMPTY
    )
    assert drawn == len(now.blocks)
    empty = style.trace(table.figures["table"], plots.EMPTY)
    assert len(empty.x) == sum(bool(block.readers) and block.filled < now.block_size for block in now.blocks)


def test_a_control_serves_anew(table: BlockTable) -> None:
    before = table.frames
    table.answers.value = 3
    assert table.wait(60) and not table.error.value
    assert sum(len(now.copies) for now in table.frames) > sum(len(now.copies) for now in before)
    table.bits.value = 8
    assert table.wait(60) and not table.error.value
    assert len(table.frames[0].blocks) > 2 * len(before[0].blocks)
    table.answers.value, table.bits.value, table.sharing.value = 1, 0, False
    assert table.wait(60) and not table.error.value and not any(now.nodes for now in table.frames)
    table.prefix.value = 128
    assert table.wait(60)
    assert "the pool has" in table.error.value  # does not fit into 128 tokens
    assert table.cards["table"].state == "stale"


def test_what_it_does_not_have_is_said() -> None:
    with pytest.raises(ValueError, match="speed=3 is none of its controls"):
        BlockTable(speed=3)
    with pytest.raises(ValueError, match="block_size=5 is not among its values"):
        BlockTable(block_size=5)
    with pytest.raises(ValueError, match="kind='odd'"):
        Traffic(kind="odd")


def test_traffic_shows_what_was_simulated() -> None:
    panel = Traffic(requests=20)
    assert panel.wait(60) and not panel.error.value
    runs = panel.shown["runs"]
    assert set(runs) == {STATIC, CONTINUOUS, WORST} and all(
        run.served == 20 and run.label == "predicted" for run in runs.values()
    )
    assert f"{runs[CONTINUOUS].throughput / runs[STATIC].throughput:.2f} times the throughput" in panel.cards["continuous"].text
    line = style.trace(panel.figures["usage"], BLOCKS)
    assert line.y[-1] == pytest.approx(100 * runs[CONTINUOUS].moments[-1].usage, abs=60) and max(line.y) <= 100
    ends = {span.name: span.end for span in plots.spans_of_requests(runs[STATIC].requests, 0)}
    bars = style.trace(panel.figures["static"], "answers")
    assert max(b + x for b, x in zip(bars.base, bars.x, strict=True)) == pytest.approx(max(ends.values()), rel=0.2)
    panel.kind.value = "one system prompt"
    assert panel.wait(60) and panel.shown["runs"][CONTINUOUS].hit_rate > 0.8
    run = panel.shown["runs"][CONTINUOUS]
    assert f"the tree had {run.cached:,} ({100 * run.cached / run.prompt_tokens:.0f}%)" in panel.cards["prefixes"].text
    panel.sharing.value = False
    assert panel.wait(60) and panel.shown["runs"][CONTINUOUS].hit_rate == 0
    panel.memory.value = 0.0
    panel.model_choice.value = "Llama-3.1-70B"
    assert panel.wait(60) and "more devices" in panel.error.value
