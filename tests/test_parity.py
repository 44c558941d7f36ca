"""Thousands of drawn cases: any family, any strategy with a budget that covers the text, any batch, padding and pieces, several turns.

``KVLAB_CASES`` says how many (120 by default, 10,000 in ``make nightly``).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from kvlab import KVCache, Strategy
from kvlab.cache import forward
from tests import zoo
from tests.conftest import DEVICE
from tests.reference import plain
from tests.strategies import full_budget

LENGTH = 48
CASES = int(os.environ.get("KVLAB_CASES", "120"))
STRATEGIES = full_budget(LENGTH)


@dataclass(frozen=True)
class Case:
    """``cuts``: where the pieces end. ``order``: after which piece rows change places, or None. ``back``: tokens drafted and taken back after each piece."""

    family: str
    strategy: Strategy
    rows: int
    padding: tuple[int, ...]
    cuts: tuple[int, ...]
    again: bool
    back: int
    number: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows = draw(st.integers(1, 3))
    length = draw(st.integers(2, LENGTH - 4))
    cuts = draw(st.lists(st.integers(1, length), max_size=6, unique=True).map(sorted))
    padding = draw(st.one_of(st.just([0] * rows), st.lists(st.integers(0, length - 1), min_size=rows, max_size=rows)))
    family = draw(st.sampled_from(list(zoo.FAMILIES)))
    return Case(
        family,
        draw(st.sampled_from(STRATEGIES)),
        rows,
        tuple(padding),
        tuple(dict.fromkeys([*cuts, length])),
        draw(st.booleans()),
        draw(st.sampled_from([0, 0, 0, 1, 3])),
        draw(st.integers(0, 2**16)),
    )


@seed(int(os.environ.get("KVLAB_SEED", "0")))
@settings(max_examples=CASES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_nothing_is_lost(case: Case) -> None:
    model, length = zoo.model(case.family), case.cuts[-1]
    ids = torch.randint(3, 97, (case.rows, length + 4), generator=torch.Generator().manual_seed(case.number)).to(DEVICE)
    drafts, ids = ids[:, length:], ids[:, :length]
    padding = None
    if any(case.padding):
        padding = (torch.arange(length) >= torch.tensor(case.padding)[:, None]).long().to(DEVICE)
    want = plain(model, ids, list(case.cuts), padding)
    cache = KVCache(model, case.strategy)
    if case.again:  # what an earlier prompt left must not show
        forward(model, drafts, cache)
        cache.reset()
    if case.back:
        for layer in cache.layers:
            layer.activate_past_recording()
    got, start = [], 0
    for stop in case.cuts:
        seen = None if padding is None else padding[:, :stop]
        got.append(forward(model, ids[:, start:stop], cache, seen))
        if case.back and stop < length:
            draft = drafts[:, : case.back]
            forward(model, draft, cache, None if seen is None else torch.cat([seen, torch.ones_like(draft)], 1))
            cache.crop(-case.back)
        elif case.back:
            cache.crop(0)
        start = stop
    logits = torch.cat(got, 1)
    if padding is not None:
        logits = logits * padding[..., None]
    gap = float((logits - want).abs().max())
    if gap >= 1e-5:  # a few in ten thousand: both are rounded, so float64 says whether more than that happened
        exact = plain(zoo.model(case.family, torch.float64), ids, list(case.cuts), padding)
        own, theirs = (float((x - exact).abs().max()) for x in (logits, want))
        assert own < 2 * theirs and own < 2e-5, f"{gap} apart; {own} and {theirs} from the same in float64"
    assert cache.get_seq_length() == length
