"""Studies, whose rows lie in ``data/results``. Of the keep axis: what a budget of a fifth costs, what is forgotten, how long a text may be, what
evidence costs while a prompt is read. `kvlab study NAME` runs one, or one of ``place_studies`` and ``serving_studies``."""

from __future__ import annotations

import datetime
import importlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvlab import _data
from kvlab.keep.base import Room
from kvlab.lab import Lab
from kvlab.measure import place_studies, serving_studies
from kvlab.measure.machine import machine
from kvlab.measure.quality import control, quality
from kvlab.measure.stream import stream
from kvlab.measure.tasks import two_keys
from kvlab.strategy import Strategy
from kvlab.texts import long_text, reference_text

Row = dict[str, Any]
keep: Any = importlib.import_module("kvlab.keep")  # by their names in the registry, which no type checker reads
store: Any = importlib.import_module("kvlab.store")
place: Any = importlib.import_module("kvlab.place")


def evictors(budget: int | float) -> dict[str, Strategy]:
    """Every way to keep ``budget`` tokens, with the settings that its paper or its defaults give, and the controls."""
    tokens = budget if isinstance(budget, int) else None
    ways: dict[str, Any] = {
        "full cache": keep.Everything(),
        "H2O": keep.HeavyHitter(budget=budget, recent=64),
        "TOVA": keep.TOVA(budget=budget),
        "SnapKV": keep.SnapKV(budget=budget),
        "PyramidKV": keep.PyramidKV(keep.SnapKV(budget=budget)),
        "Scissorhands": keep.Scissorhands(budget=budget),
        "ExpectedAttention": keep.ExpectedAttention(budget=budget),
        "KeyDiff": keep.KeyDiff(budget=budget),
        "KeyNorm": keep.KeyNorm(budget=budget),
        "H2O + D2O merging": keep.Merge(keep.HeavyHitter(budget=budget, recent=64)),
        "H2O + CaM merging": keep.Merge(keep.HeavyHitter(budget=budget, recent=64), how="cam"),
        "H2O + cluster merging": keep.Merge(keep.HeavyHitter(budget=budget, recent=64), how="clusters"),
        "random": keep.Random(budget=budget),
    }
    if tokens is not None:
        ways |= {
            "window + 4 sinks": keep.Window(size=tokens - 4, sinks=4),
            "window": keep.Window(size=tokens, sinks=0),
            "Quest (reads a fifth, keeps all)": keep.Quest(budget=tokens // 16 * 16),
        }
    return {name: Strategy(keep=way) for name, way in ways.items()}


def _texts(lab: Lab, tokens: int, count: int) -> list[Tensor]:
    """``count`` pieces of the reference text, ``tokens`` each."""
    ids = lab.encode_long(reference_text())
    return [ids[:, i * tokens : (i + 1) * tokens] for i in range(count)]


def compress(lab: Lab, say: Callable[[str], None]) -> Iterator[Row]:
    """1,024 tokens read at once and cut down to a fifth (205 tokens a head), the next 128 scored, over four texts: 16 at a time, while the budget holds
    on, and ("once") all at once, so that nothing more is evicted."""
    controls, at_once = ([control(lab, ids, step=step) for ids in _texts(lab, 1024 + 128, 4)] for step in (16, 128))
    for name, strategy in evictors(205).items():
        runs, once = ([quality(lab, strategy, against) for against in some] for some in (controls, at_once))
        loss, full = (torch.cat([getattr(run, what) for run in runs]).double().mean() for what in ("loss", "full_loss"))
        changes = [run.perplexity_change for run in once]
        together = torch.cat([run.loss - run.full_loss for run in once]).double().mean()
        row: Row = {
            "name": name,
            "strategy": strategy.to_code(),
            "perplexity_change": float((loss - full).exp()) - 1,
            "kl": float(torch.cat([run.kl for run in runs]).double().mean()),
            "agreement": float(torch.cat([run.agree for run in runs]).double().mean()),
            "ratio": runs[0].memory.ratio,
            "once": {
                "perplexity_change": float(together.exp()) - 1,
                "by_text": changes,
                "kl": float(torch.cat([run.kl for run in once]).double().mean()),
            },
        }
        say(
            f"{name:34} once {100 * row['once']['perplexity_change']:+8.2f}%  held on {100 * row['perplexity_change']:+8.2f}%  KL {row['kl']:.4f}  agree {row['agreement']:.3f}  {100 * row['ratio']:.1f}% of 16-bit"
        )
        yield row


def recall(lab: Lab, say: Callable[[str], None]) -> Iterator[Row]:
    """Two pass keys in 512 tokens, eight texts, asked for after the text was read: 16 questions a seed. The seeds, on which nothing was tuned, are the first
    three from 11 on with which the full cache answers 14 or more; one of them is enough for what evicts."""
    half, seeds = "float16", [0]
    ways = {
        "full cache": Strategy(),
        **{name: way for name, way in evictors(102).items() if name in ("H2O", "TOVA", "SnapKV", "window + 4 sinks")},
        "SnapKV, first question known": Strategy(keep=keep.SnapKV(budget=102)),
        "everything in 3.2 bits": Strategy(
            store=store.PreRope(store.Rotated(store.Mixed(bits=3, value_levels="normal", plain=half), kind="random", keys=False))
        ),
        "everything in 2.7 bits": Strategy(store=store.PreRope(store.Int(bits=2, plain=half))),
        "everything in 4 bits, on disk": Strategy(store=store.Int(bits=4, plain=half), place=place.Offload(to="disk")),
        "the same, three eighths of it read (Quest)": Strategy(
            keep=keep.Quest(budget=192), store=store.Int(bits=4, plain=half), place=place.Offload(to="disk")
        ),
    }
    for name, strategy in ways.items():
        if name == "full cache":
            tried = ((seed, two_keys(lab, strategy, seed=seed)) for seed in itertools.count(11))
            able = dict(itertools.islice(((seed, run) for seed, run in tried if run.found >= 14), 3))
            seeds, runs = list(able), list(able.values())
        else:
            some = seeds[:1] if strategy.keep.limit(Room()) is not None else seeds
            runs = [two_keys(lab, strategy, seed=seed, aware="question known" in name) for seed in some]
        row: Row = {
            "name": name,
            "strategy": strategy.to_code(),
            "seeds": seeds[: len(runs)],
            "found": [run.found for run in runs],
            "asked": [run.asked for run in runs],
            "first": [sum(run.first) for run in runs],
            "second": [sum(run.second) for run in runs],
            "digits": [sum(run.digits(question) for run in runs) / len(runs) for question in (0, 1)],
            "ratio": runs[0].memory.ratio,
            "devices": runs[0].memory.by_device(),
            "high_water": runs[0].memory.high_water,
            "reference": runs[0].memory.reference,
        }
        say(f"{name:34} {row['found']} of {row['asked']}  {100 * row['ratio']:.1f}% of 16-bit")
        yield row


def streaming(lab: Lab, say: Callable[[str], None], tokens: int = 20_000) -> Iterator[Row]:
    """One text of 20,000 tokens, far past the context of 8,192, 64 tokens at a time, with and without sinks and in-cache positions."""
    ids = lab.encode_long(long_text())[:, :tokens]
    for way in (
        keep.Window(size=1020, sinks=4, positions="cache"),
        keep.Window(size=1020, sinks=4),
        keep.Window(size=1024, sinks=0),
    ):
        run = stream(lab, Strategy(keep=way), ids)
        smooth = run.smooth(500)
        row: Row = {
            "name": str(way),
            "strategy": run.strategy.to_code(),
            "tokens": ids.shape[1],
            "loss": [round(x, 4) for x in smooth.tolist()],
            "window": 500,
            "points": run.points,
        }
        say(
            f"{way!s:40} loss {float(smooth[1:4].mean()):.3f} after 1,000 tokens, {float(smooth[-4:].mean()):.3f} at the end; "
            f"{run.points[len(run.points) // 4][1]:,} bytes, at the end {run.points[-1][1]:,}"
        )
        yield row


PREFILL = """
import sys, time, torch, kvlab
from kvlab import keep, Strategy
from kvlab.cache import KVCache, forward
from kvlab.measure.studies import high_water
from kvlab.texts import reference_text
from transformers import DynamicCache
how, tokens = sys.argv[1], int(sys.argv[2])
lab = kvlab.load(progress=False)
ids = lab.encode_long(reference_text())[:, :tokens]
def run():
    if how.startswith("transformers"):
        kvlab.detach(lab.model)
        lab.model.set_attn_implementation(how.split()[1])
        forward(lab.model, ids, DynamicCache(), last=True)
        return
    way = keep.Everything() if how == "kvlab full" else keep.HeavyHitter(budget=512, recent=64)
    lab.prefill(ids, KVCache(lab.model, Strategy(keep=way, chunk=0)), chunk=512 if "pieces" in how else 0)
lab.prefill(ids[:, :64], KVCache(lab.model), 0)
before = high_water(reset=True)
start = time.perf_counter()
run()
print(time.perf_counter() - start, high_water() - before)
"""


def high_water(reset: bool = False) -> int:
    """The most bytes this process has held resident, since the last ``reset`` (which then gives what it holds now). Linux."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
        return 1024 * int(status["VmRSS"].split()[0])
    return 1024 * int(status["VmHWM"].split()[0])


def prefill(lab: Lab, say: Callable[[str], None], tokens: int = 4096, rounds: int = 3) -> Iterator[Row]:
    """4,096 tokens read at once: seconds, and the most memory above the loaded model; each way in a process of its own, in turn, medians.

    "transformers eager" has attention's weights as a matrix, as libraries need them that look at them afterwards (kvpress's ObservedAttention).
    """
    ways = ("transformers sdpa", "kvlab full", "kvlab H2O", "kvlab H2O in pieces", "transformers eager")
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            done = subprocess.run(
                [sys.executable, "-c", PREFILL, way, str(tokens)],
                capture_output=True,
                text=True,
                env=os.environ | {"PYTHONWARNINGS": "ignore"},
            )
            if done.returncode:
                raise RuntimeError(f"{way}: {done.stderr.strip().splitlines()[-1]}")
            seconds, peak = done.stdout.split()[-2:]
            taken[way].append((float(seconds), float(peak)))
    middle = {way: tuple(sorted(x)[len(x) // 2] for x in zip(*both, strict=True)) for way, both in taken.items()}
    base = middle["transformers sdpa"]
    for way, (seconds, peak) in middle.items():
        say(f"{way:30} {seconds:7.2f} s ({seconds / base[0]:.2f}x)  peak {peak / 1e6:8.0f} MB ({peak / base[1]:.2f}x)")
        yield {
            "name": way,
            "tokens": tokens,
            "rounds": rounds,
            "seconds": seconds,
            "peak": peak,
            "times": seconds / base[0],
            "peaks": peak / base[1],
        }


STUDIES: dict[str, Callable[..., Iterator[Row]]] = {
    "compress": compress,
    "prefill": prefill,
    "recall": recall,
    "stream": streaming,
    "overlap": place_studies.overlap,
    "selective": place_studies.selective,
    "paging": serving_studies.paging,
    "blocks": serving_studies.blocks,
    "batching": serving_studies.batching,
    "batch8": serving_studies.batch8,
    "prefix": serving_studies.prefix,
    "shared": serving_studies.shared,
    "simulator": serving_studies.simulator,
}
RESULTS = dict.fromkeys(("overlap", "selective"), "place.jsonl") | dict.fromkeys(
    ("paging", "blocks", "batching", "batch8", "prefix", "shared", "simulator"), "serving.jsonl"
)  # others in keep.jsonl


def recorded(name: str) -> list[Row]:
    """The newest recorded row of each name of a study, as the study's command wrote them to ``data/results``.

    Raises ``ValueError`` for a study that is not known, or of which nothing is recorded.
    """
    if name not in STUDIES:
        raise ValueError(f"study={name!r} is not one of {', '.join(STUDIES)}")
    rows: dict[str, Row] = {}
    file = f"results/{RESULTS.get(name, 'keep.jsonl')}"
    for line in _data.path(file).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["study"] == name:
            rows.pop(row["name"], None)
            rows[row["name"]] = row
    if not rows:
        raise ValueError(f"nothing is recorded of the study {name!r}: kvlab study {name} --out data/{file}")
    return list(rows.values())


def study(name: str, lab: Lab, say: Callable[[str], None], out: str | Path | None = None) -> list[Row]:
    """Run one of :data:`STUDIES`; with ``out``, each row is added to that JSON-lines file as soon as it is there.

    Raises ``ValueError`` for a name that is none of them.
    """
    if name not in STUDIES:
        raise ValueError(f"study={name!r} is not one of {', '.join(STUDIES)}")
    rows = []
    about = {
        "study": name,
        "model": lab.name,
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "command": f"kvlab study {name}",
    }
    for row in STUDIES[name](lab, say):
        rows.append(row)
        if out:
            with open(out, "a", encoding="utf-8") as file:
                file.write(json.dumps(row | about) + "\n")
    return rows
