"""What a timeline says of spans whose sums are known by hand."""

from __future__ import annotations

import itertools
import math
import time

import pytest
import torch

from kvlab import KVCache, Strategy, place
from kvlab.cache import forward
from kvlab.timeline import Span, Timeline, union
from tests.reference import feed


def line(*spans: tuple[str, int, int, float, float, int]) -> Timeline:
    made = Timeline()
    made._spans = [Span(*span) for span in spans]
    return made


TWO = line(
    ("fetch", 0, 0, 0.0, 2.0, 400),
    ("stall", 0, 0, 0.0, 2.0, 0),
    ("compute", 0, 0, 2.0, 5.0, 0),
    ("fetch", 1, 0, 2.0, 4.0, 400),
    ("fetch", 1, 0, 3.0, 5.5, 200),
    ("stall", 1, 0, 5.0, 5.5, 0),
    ("compute", 1, 0, 5.5, 6.0, 0),
    ("compute", 0, 1, 6.0, 7.0, 0),
    ("fetch", 0, 1, 6.0, 9.0, 1000),
)


def test_sums():
    assert TWO.seconds("stall") == 2.5 and TWO.seconds("compute") == 4.5 and TWO.bytes() == 2000
    assert TWO.bandwidth == 2000 / (2 + 3.5 + 3)  # two fetches of layer 1 pass beside each other
    assert TWO.hidden == pytest.approx(1 - 2.5 / 8.5)
    # step 0: 5.5 of fetching, 3.5 of computing; step 1: 3 and 1
    assert TWO.hideable == pytest.approx((3.5 + 1) / 8.5)
    assert TWO.steps(1).bytes() == 1000 and TWO.steps(0, 0).bytes() == 1000 and len(TWO.steps(2).spans) == 0
    assert [row["layer"] for row in TWO.rows()[:2]] == [0, 0] and TWO.rows()[0]["kind"] == "fetch"


def test_nothing_was_fetched():
    empty = line(("compute", 0, 0, 0.0, 1.0, 0))
    assert math.isnan(empty.bandwidth) and math.isnan(empty.hidden) and math.isnan(empty.hideable)
    with pytest.raises(ValueError, match="kind='wait' is not one of fetch, stall, compute, write"):
        empty.seconds("wait")


def test_unions():
    assert union([(0, 2), (1, 3), (5, 6), (5.5, 5.75)]) == 4
    assert union([]) == 0


@pytest.mark.parametrize("where", [place.Resident(), place.Offload(prefetch=1)], ids=str)
def test_a_cache_tells_what_passed(llama, where):
    """Steps and layers in order, computing and waiting never at once, every fetch done before its layer computes."""
    ids = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(0))
    cache = KVCache(llama, Strategy(place=where))
    feed(llama, cache, ids, [40])
    made = cache.timeline()
    for number in range(3):
        forward(llama, ids[:, number : number + 1], cache)
        made.rest()
    made.stop()
    own = [span for span in made.spans if span.kind in ("compute", "stall")]
    assert all(one.stop <= other.start + 1e-9 for one, other in itertools.pairwise(own))
    assert [(s.step, s.layer) for s in own if s.kind == "compute"] == [(step, layer) for step in range(3) for layer in range(3)]
    if isinstance(where, place.Offload):
        assert made.bytes() >= 3 * 3 * 2 * 32 * 2 * 16 * 4 - 2 * 32 * 2 * 16 * 4  # the first layer was on its way already
        for fetch in (s for s in made.spans if s.kind == "fetch"):
            computes = [s for s in own if s.kind == "compute" and s.layer == fetch.layer and s.stop > fetch.stop]
            assert not computes or fetch.stop <= computes[0].start + 1e-4
    else:
        assert not made.bytes()
    before = made.spans
    forward(llama, ids[:, :1], cache)
    assert made.spans == before  # what came after stop() is not in it
    assert max(span.step for span in made.spans) == 2


def test_only_steps_count(llama):
    """A rest between two steps is nobody's computing; taking tokens back is no step; a reset cache goes on recording."""
    ids = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(0))
    cache = KVCache(llama, Strategy(place=place.Offload()))
    history, made = cache.history(), cache.timeline()
    feed(llama, cache, ids, [40])
    time.sleep(0.2)
    cache.crop(-3)
    cache.layers[1].dense()
    forward(llama, ids[:, :1], cache)
    assert max(span.step for span in made.spans) == 1 and made.seconds("compute") < 0.19
    before = len(made.spans)
    cache.reset()
    feed(llama, cache, ids, [40])
    assert len(made.spans) > before and cache.history() is history
