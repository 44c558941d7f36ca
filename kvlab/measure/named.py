"""Strategies with names: every method of every axis once, the settings people ask about, and compositions of them. What the recorded evidence is about.

`kvlab measure --workers 2 --out data/results/evidence.jsonl` measures them all.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from kvlab.measure.tasks import Correction, Task, Text, TwoKeys
from kvlab.strategy import Strategy

keep: Any = importlib.import_module("kvlab.keep")  # by their names in the registry, which no type checker reads
store: Any = importlib.import_module("kvlab.store")
place: Any = importlib.import_module("kvlab.place")

FIFTH = 205  # tokens a head: a fifth of the 1,024 that each task's text has

#: Tasks of the recorded evidence: the reference protocol, and two of recall.
TASKS: tuple[Task, ...] = (Text(), TwoKeys(tokens=1024, texts=2), Correction(tokens=1024, texts=2))


@cache
def named() -> dict[str, Strategy]:
    """Name -> strategy, the full cache first, then by what they change: keep, store, place, several."""
    h2o, half = keep.HeavyHitter(budget=FIFTH, recent=64), keep.HeavyHitter(budget=512)
    int4, int3 = store.Int(bits=4), store.Int(bits=3)
    before = store.PreRope(int3)
    keeps: dict[str, Any] = {
        "window + sinks": keep.Window(size=FIFTH - 4, sinks=4),
        "window, no sinks": keep.Window(size=FIFTH, sinks=0),
        "window + sinks, half": keep.Window(size=508, sinks=4),
        "window + sinks, in-cache positions": keep.Window(size=FIFTH - 4, sinks=4, positions="cache"),
        "H2O": h2o,
        "H2O, half": half,
        "Scissorhands": keep.Scissorhands(budget=FIFTH),
        "TOVA": keep.TOVA(budget=FIFTH),
        "SnapKV": keep.SnapKV(budget=FIFTH),
        "SnapKV, half": keep.SnapKV(budget=512),
        "PyramidKV": keep.PyramidKV(keep.SnapKV(budget=FIFTH)),
        "ExpectedAttention": keep.ExpectedAttention(budget=FIFTH),
        "KeyDiff": keep.KeyDiff(budget=FIFTH),
        "KeyDiff, half": keep.KeyDiff(budget=512),
        "KeyNorm": keep.KeyNorm(budget=FIFTH),
        "Quest": keep.Quest(budget=192),
        "Quest, half": keep.Quest(budget=512),
        "H2O + D2O merging": keep.Merge(h2o),
        "H2O + cluster merging": keep.Merge(h2o, how="clusters"),
        "H2O + CaM merging": keep.Merge(h2o, how="cam"),
        "by roles and turns": keep.Conversation(budget=512),
        "random": keep.Random(budget=FIFTH),
    }
    stores: dict[str, Any] = {
        "int8": store.Int(),
        "int8, keys per token": store.Int(key_axis="token"),
        "int8, one scale for all keys": store.Int(key_axis="tensor"),
        "int4": int4,
        "int4, groups of 32, 128 plain": store.Int(bits=4, group_size=32, residual=128),
        "int4, keys per token": store.Int(bits=4, key_axis="token"),
        "int4, keys per token, rotated": store.Rotated(),
        "int3": int3,
        "int3, keys before RoPE": before,
        "int2, groups of 32": store.Int(bits=2, group_size=32),
        "int2, groups of 32, before RoPE": store.PreRope(store.Int(bits=2, group_size=32)),
        "KIVI, 4 bits": store.KIVI(bits=4),
        "KIVI, 2 bits": store.KIVI(),
        "fp8 e4m3": store.Fp8(),
        "fp8 e5m2": store.Fp8(format="e5m2"),
        "4-bit keys, 2-bit values": store.Mixed(),
        "3-bit keys before RoPE, 2-bit values": store.PreRope(store.Mixed(bits=3)),
        "3-bit keys before RoPE, 2-bit values rotated": store.PreRope(
            store.Rotated(store.Mixed(bits=3, value_levels="normal"), kind="random", keys=False)
        ),
        "TurboQuant's first stage, 3 bits": store.Rotated(store.Int(bits=3, key_axis="token", levels="normal"), kind="random"),
        "low rank 32": store.LowRank(),
        "low rank 48, keys only, 8 bits": store.LowRank(rank=48, bits=8, values=False),
        "pages": store.Paged(),
    }
    places: dict[str, Any] = {
        "on disk": place.Offload(to="disk"),
        "on disk, 64 tokens hot": place.Offload(to="disk", hot=64),
    }
    several = {
        "AdaKV": Strategy(keep.AdaKV(keep.SnapKV(budget=FIFTH)), store.Paged()),
        "H2O + int8": Strategy(h2o, store.Int()),
        "H2O + int4": Strategy(h2o, int4),
        "H2O, half + int4": Strategy(half, int4),
        "SnapKV, half + int4": Strategy(keep.SnapKV(budget=512), int4),
        "KeyDiff, half + int4": Strategy(keep.KeyDiff(budget=512), int4),
        "window + sinks, half + int4": Strategy(keep.Window(size=508, sinks=4), int4),
        "H2O, half + int3 before RoPE": Strategy(half, before),
        "int4 on disk": Strategy(store=int4, place=place.Offload(to="disk")),
        "int3 before RoPE, on disk": Strategy(store=before, place=place.Offload(to="disk")),
        "Quest, half + int4": Strategy(keep.Quest(budget=512), int4),
        "Quest, half + int4 on disk": Strategy(keep.Quest(budget=512), int4, place.Offload(to="disk")),
        "H2O, half + int4 on disk": Strategy(half, int4, place.Offload(to="disk")),
    }
    return {
        "full cache": Strategy(),
        **{name: Strategy(keep=one) for name, one in keeps.items()},
        **{name: Strategy(store=one) for name, one in stores.items()},
        **{name: Strategy(place=one) for name, one in places.items()},
        **several,
    }


def name_of(settings: dict[str, Any]) -> str:
    """The name of the strategy with these settings (``Strategy.to_dict()``), or what it calls itself."""
    strategy = Strategy.from_dict(settings)
    return _names().get(strategy, str(strategy))


@cache
def _names() -> dict[Strategy, str]:
    return {strategy: name for name, strategy in named().items()}
