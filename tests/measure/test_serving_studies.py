"""The studies of serving: every way to batch makes what was asked, the same tokens where it says so, and the recorded rows are what the figures say."""

from typing import Any

import pytest

from kvlab.lab import Lab
from kvlab.measure import serving_studies as studies
from kvlab.measure.studies import recorded
from kvlab.serving.traces import Arrival
from tests.panels.conftest import Characters


@pytest.fixture(scope="module")
def lab(llama: Any) -> Lab:
    return Lab("tiny", llama, Characters())  # type: ignore[arg-type]


def test_every_way_makes_what_was_asked(lab: Lab) -> None:
    trace = [
        Arrival(0.0, tuple((7 * number + place) % 90 + 3 for place in range(4 + number)), 3 + number % 3) for number in range(8)
    ]
    want = sum(one.new for one in trace)
    one, seconds, said = studies._one_by_one(lab, trace)
    engine, _, more = studies._engine(lab, trace, kv_memory="4 MB")
    padded, _, _ = studies._padded(lab, trace, 3)
    theirs, _, _ = studies._transformers(lab, trace, 2048)
    assert one == engine == padded == theirs == want and seconds > 0
    assert said["tokens"] == more["tokens"] and more["together"] == 8
    assert studies._one_by_one(lab, trace[:1])[2] == {"requests": 1}


def test_engines_side_by_side(lab: Lab) -> None:
    rows = list(studies.engines(lab, 3, 12, 4, peer=False))
    assert [row["name"].removeprefix("engine, ") for row in rows] == [
        "16 bits",
        "8 bits, a scale for each token",
        "4 bits",
        "fp8",
    ]
    assert all(row["made"] == 12 and row["together"] == 3 for row in rows)


def test_what_blocks_save_is_counted(lab: Lab) -> None:
    rows = {row["name"]: row for row in studies.paging(lab, lambda _: None, requests=30)}
    worst, plain = rows["the worst case reserved"], rows["blocks, 16 bits"]
    assert worst["concurrent"] <= 8 < plain["concurrent"] and worst["waste"] > 0.6 > 0.04 > plain["waste"]
    assert rows["blocks of 16"] | {"name": ""} == plain | {"name": ""}
    assert rows["blocks of 1"]["waste"] == 0.0


def test_recorded_figures() -> None:
    """What README says, from the rows."""
    paging = {row["name"]: row for row in recorded("paging")}
    assert paging["blocks, 16 bits"]["concurrent"] > 3 * paging["the worst case reserved"]["concurrent"]
    assert paging["blocks, 16 bits"]["waste"] < 0.04
    assert paging["blocks, 8 bits, a scale for each token"]["concurrent"] > 1.8 * paging["blocks, 16 bits"]["concurrent"]
    engine, made = recorded("simulator")
    assert abs(made["throughput"] / engine["throughput"] - 1) < 0.1 and abs(made["kv_usage"] / engine["kv_usage"] - 1) < 0.1
    prefix = {row["name"]: row for study in ("prefix", "shared") for row in recorded(study)}
    assert prefix["one after the other, not shared"]["later"] > 5 * prefix["one after the other, shared"]["later"]
    real = prefix["all at once, shared"]
    assert real["computed"] - real["made"] + real["served"] < 0.05 * real["prompt_tokens"]
    assert real["prefix_blocks"] < 0.02 * prefix["all at once, not shared (counted)"]["prefix_blocks"]
