"""Which strategy, for this model on that hardware? What binds, by how much, what to try in which order, and what each choice rests on.

    print(advise("Llama-3.1-8B", "A10 24GB", context=32768, concurrency=4))

Bytes and times are predicted (the roofline: floors that nothing beats). Quality is what was measured here or published elsewhere, each with its model; what
was measured on a small model is shown, and ranks nothing for a big one.
"""

from __future__ import annotations

import csv
import importlib
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from kvlab import _data, geometry, hardware
from kvlab.geometry import Geometry
from kvlab.hardware import Hardware
from kvlab.keep.base import LONGEST
from kvlab.measure import roofline
from kvlab.measure.experiment import Evidence, recorded
from kvlab.measure.memory import predict
from kvlab.strategy import Strategy

keep: Any = importlib.import_module("kvlab.keep")
store: Any = importlib.import_module("kvlab.store")
place: Any = importlib.import_module("kvlab.place")

RESERVE = 0.1  # of a device's memory, for what nobody predicts: the runtime, fragments, temporary buffers
WORKLOADS = ("chat", "edge", "throughput", "long context", "multi-turn")


@dataclass(frozen=True)
class Limits:
    """What must be met. ``memory``: bytes for weights and caches (None: what the devices have, a tenth held back); ``per_token``, ``first_token``: seconds."""

    memory: int | None = None
    per_token: float | None = None
    first_token: float | None = None

    def __post_init__(self) -> None:
        for name in ("memory", "per_token", "first_token"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"Limits: {name}={value} must be above 0, or None")


@dataclass(frozen=True)
class Constraint:
    """One thing that can bind: ``need`` against ``limit`` in ``unit``. ``binds`` where the need is larger."""

    name: str
    need: float
    limit: float
    unit: str

    @property
    def ratio(self) -> float:
        return self.need / self.limit if self.limit else float("inf")

    @property
    def binds(self) -> bool:
        return self.ratio > 1

    def __str__(self) -> str:
        need, limit = (geometry.text(x) if self.unit == "bytes" else f"{1e3 * x:.1f} ms" for x in (self.need, self.limit))
        return f"{self.name}: {need} of {limit} ({self.ratio:.2f} x)" + (" BINDS" if self.binds else "")


@dataclass(frozen=True)
class Quality:
    """What is known of a method's loss: measured here (``kl`` in nats, ``perplexity_change``, ``needles``) or a claim of its paper."""

    model: str
    source: str
    claim: str = ""
    kl: float | None = None
    perplexity_change: float | None = None
    needles: str = ""

    def __str__(self) -> str:
        if self.claim:
            return f"published: {self.claim} ({self.model}; {self.source})"
        return f"measured here: KL {self.kl:.4f} nats, perplexity {100 * (self.perplexity_change or 0):+.1f}%, pass keys {self.needles} ({self.model}; {self.source})"


@dataclass(frozen=True)
class Option:
    """A strategy as it would be. ``bytes``: of one sequence's cache on the devices; ``most``: sequences that fit at once; ``step``: predicted seconds of one
    decode step of all; ``fails``: what it does not meet, and by how much. ``stage``: 1 quantize, 2 evict, 3 offload, 4 several of them.
    """

    strategy: Strategy
    stage: int
    danger: str
    bytes: int
    most: int
    step: float
    bound: str
    fails: tuple[str, ...]
    quality: tuple[Quality, ...]

    @property
    def meets(self) -> bool:
        return not self.fails


@dataclass(frozen=True)
class Advice:
    """``constraints``: of the full cache, the tightest first. ``options``: those that meet the limits first, in the order to try them; the full cache leads
    where it does. ``nearest``: where none meets them, the one that comes nearest.
    """

    model: str
    hardware: str
    devices: int
    context: int
    concurrency: int
    workload: str
    constraints: tuple[Constraint, ...]
    share: float  # of a decode step's bytes that are cache, with the full cache
    options: tuple[Option, ...]
    notes: tuple[str, ...]

    @property
    def constraint(self) -> Constraint:
        return self.constraints[0]

    @property
    def best(self) -> Option | None:
        return next((option for option in self.options if option.meets), None)

    @property
    def nearest(self) -> Option:
        return min(self.options, key=lambda option: (len(option.fails), option.bytes))

    def __str__(self) -> str:
        lines = [
            f"{self.model} on {self.devices} x {self.hardware}: {self.concurrency} x {self.context:,} tokens, {self.workload}",
            "what binds the full cache: " + "; ".join(map(str, self.constraints)),
            f"a decode step reads {100 * self.share:.0f}% cache, {100 - 100 * self.share:.0f}% weights",
        ]
        if self.best is None:
            lines.append(f"nothing meets the limits; nearest is {self.nearest.strategy}: " + "; ".join(self.nearest.fails))
        for option in self.options:
            mark = "meets" if option.meets else "fails"
            lines.append(
                f"  {mark} | {option.strategy} | {geometry.text(option.bytes)} a sequence, at most {option.most} | {1e3 * option.step:.1f} ms a step ({option.bound})"
            )
            lines += [f"         {one}" for one in (*option.fails, *option.quality)]
            if option.danger:
                lines.append(f"         danger: {option.danger}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def advise(
    model: str | Geometry,
    device: str | Hardware,
    context: int,
    concurrency: int = 1,
    workload: str = "chat",
    limits: Limits | None = None,
    *,
    devices: int = 1,
    weight_bits: int = 16,
) -> Advice:
    """Advice for ``concurrency`` sequences of ``context`` tokens at once.

    Args:
        model: a name of the models' table, or a geometry (``Geometry.from_config(config)``).
        device: a name of the hardware table, or a ``Hardware`` that computes.
        workload: "chat", "edge" (one user, little memory), "throughput" (many at once), "long context" (facts from anywhere in a long text), "multi-turn".
        limits: None: only what the devices hold.
        weight_bits: 16, 8, 4, ... of a weight.

    Raises ``ValueError`` for unknown names (near ones are listed), numbers below 1, a context beyond the model's, or a model of unknown size.
    """
    shape = geometry.find(model) if isinstance(model, str) else model
    kind = hardware.find(device) if isinstance(device, str) else device
    for name, value in (("context", context), ("concurrency", concurrency), ("devices", devices)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} is out of range (allowed: 1 or more)")
    if shape.context is not None and context > shape.context:
        raise ValueError(f"context={context} is beyond what {shape.name} was trained for (allowed: up to {shape.context})")
    if workload not in WORKLOADS:
        raise ValueError(f"workload={workload!r} is not one of {', '.join(WORKLOADS)}")
    limits = limits or Limits()
    case = _Case(shape, kind, devices, context, concurrency, weight_bits, limits)
    options = [case.option(*row) for row in _candidates(shape, workload, context)]
    full = options[0]
    chosen = [full] if full.meets else []
    chosen += sorted((o for o in options[1:] if o.meets), key=lambda o: (o.stage, o.bytes if o.stage > 1 else -o.bytes))
    chosen += sorted((o for o in options if not o.meets), key=lambda o: (len(o.fails), o.bytes))
    return Advice(
        shape.name,
        kind.name,
        devices,
        context,
        concurrency,
        workload,
        case.constraints(),
        case.share,
        tuple(chosen),
        case.notes(workload, options),
    )


def _candidates(shape: Geometry, workload: str, context: int) -> list[tuple[Strategy, int, str]]:
    """What may be tried: strategy, stage, and the known danger. The mildest of each stage first."""
    far = (
        "a fact that nothing pointed to when it was evicted is gone; perplexity does not show it"
        if workload != "edge"
        else "what was evicted is gone"
    )
    turns = "; in later turns questions come that nobody saw coming" if workload == "multi-turn" else ""
    budget = min(LONGEST, max(64, context // 5))  # a fifth, within what keeps take
    rows: list[tuple[Strategy, int, str]] = [
        (Strategy(), 0, ""),
        (Strategy(store=store.Fp8()), 1, "coarser than 8-bit integers away from zero"),
        (Strategy(store=store.Int(bits=8)), 1, ""),
        (Strategy(store=store.Int(bits=4)), 1, "keys with a few large channels need scales per channel (as here), not per token"),
        (
            Strategy(store=store.PreRope(store.Int(bits=3))),
            1,
            "keys are rebuilt at every step: slower where computing binds; long reasoning adds errors up",
        ),
        (Strategy(store=store.KIVI(bits=2)), 1, "2 bits: small models and long reasoning lose visibly"),
        (Strategy(keep.Window(size=budget, sinks=4)), 2, "everything outside the window is forgotten" + turns),
        (Strategy(keep.HeavyHitter(budget=budget, recent=budget // 4)), 2, far + turns),
        (
            Strategy(keep.SnapKV(budget=budget)),
            2,
            "judged by the prompt's last tokens: the second question has no such help" + turns,
        ),
        (Strategy(place=place.Offload(to="cpu")), 3, "each step moves the whole cache over the link"),
        (
            Strategy(store=store.Int(bits=4), place=place.Offload(to="cpu")),
            4,
            "each step moves the cache over the link, a quarter of it",
        ),
        (Strategy(keep.HeavyHitter(budget=budget, recent=budget // 4), store.Int(bits=4)), 4, far + turns),
    ]
    if workload == "long context":
        rows.append(
            (
                Strategy(keep.Quest(budget=budget), store.Int(bits=4)),
                4,
                "nothing is lost and nothing saved but what a step reads; blurred pages may be missed",
            )
        )
    if workload == "throughput":
        rows.append((Strategy(store=store.Int(bits=4), chunk=2048), 4, "smaller peaks while prompts are read, a little slower"))
    return [row for row in rows if _fits(shape, row[0])]


def _fits(shape: Geometry, strategy: Strategy) -> bool:
    try:
        predict(shape, strategy, 256)
    except ValueError:  # a group size that the head dim has no place for, say
        return False
    return True


@dataclass(frozen=True)
class _Case:
    shape: Geometry
    kind: Hardware
    devices: int
    context: int
    concurrency: int
    weight_bits: int
    limits: Limits

    @property
    def room(self) -> int:
        """Bytes for weights, activations and caches."""
        return self.limits.memory or int(self.kind.capacity(self.devices) * (1 - RESERVE))

    @property
    def beside(self) -> int:
        """Bytes of everything but caches."""
        whole = geometry.breakdown(self.shape, self.context, requests=self.concurrency, weight_bits=self.weight_bits)
        return whole.weights + whole.activations + whole.state

    def cache(self, strategy: Strategy) -> float:
        return sum(predict(self.shape, strategy, self.context).values())

    @property
    def share(self) -> float:
        cached = self.cache(Strategy()) * self.concurrency
        return cached / (cached + roofline.weights(self.shape, self.concurrency, self.weight_bits))

    def step(self, strategy: Strategy) -> tuple[float, str]:
        """Seconds of one decode step of all sequences, and what it waits for."""
        made = roofline.decode(
            self.shape, self.kind, strategy, self.context, requests=self.concurrency, devices=self.devices, weight_bits=self.weight_bits
        )  # fmt: skip
        return made.seconds, made.bound

    @property
    def first_token(self) -> float:
        """Seconds of a prompt's prefill at best: two products a weight and token."""
        return 2 * (self.shape.active_parameters or 0) * self.context / ((self.kind.flops or 1) * self.devices)

    def constraints(self) -> tuple[Constraint, ...]:
        full = Strategy()
        need = self.beside + self.cache(full) * self.concurrency
        found = [Constraint("capacity", need, self.room, "bytes")]
        step, bound = self.step(full)
        if self.limits.per_token:
            found.append(
                Constraint(
                    {"memory": "bandwidth", "compute": "compute", "link": "link"}[bound], step, self.limits.per_token, "seconds"
                )
            )
        if self.limits.first_token:
            found.append(Constraint("latency of the first token", self.first_token, self.limits.first_token, "seconds"))
        return tuple(sorted(found, key=lambda one: -one.ratio))

    def option(self, strategy: Strategy, stage: int, danger: str) -> Option:
        size = self.cache(strategy)
        away = not isinstance(strategy.place, place.Resident)
        here = (
            size * min(1.0, 3 / max(1, len(self.shape.kv_layers))) if away else size
        )  # the layer at work, one arriving, one leaving
        step, bound = self.step(strategy)
        most = max(0, int((self.room - self.beside) // max(1, here)))
        need = self.beside + here * self.concurrency
        fails = []
        if need > self.room:
            fails.append(f"capacity: {geometry.text(need)} needed, {geometry.text(self.room)} there ({need / self.room:.2f} x)")
        if self.limits.per_token and step > self.limits.per_token:
            fails.append(
                f"time per token: {1e3 * step:.1f} ms, allowed {1e3 * self.limits.per_token:.1f} ms ({step / self.limits.per_token:.2f} x)"
            )
        if self.limits.first_token and self.first_token > self.limits.first_token:
            fails.append(
                f"first token: {self.first_token:.2f} s of computing, allowed {self.limits.first_token:.2f} s; no cache strategy changes that"
            )
        return Option(strategy, stage, danger, round(here), most, step, bound, tuple(fails), _known(strategy))

    def notes(self, workload: str, options: list[Option]) -> tuple[str, ...]:
        notes = [
            "order: quantize first, then evict or offload; measure each step on your own text before the next (kvlab measure)"
        ]
        models = {one.model for option in options for one in option.quality if not one.claim}
        if models - {self.shape.name}:
            notes.append(f"measured on {', '.join(sorted(models))}: shown, not used to rank anything for {self.shape.name}")
        if self.share < 0.1:
            notes.append(
                f"the cache is {100 * self.share:.0f}% of what a step reads: fewer bits for weights would bring more speed than any cache strategy"
            )
        if self.beside > self.room:
            notes.append(
                f"weights and activations alone need {geometry.text(self.beside)} of {geometry.text(self.room)}: more devices or fewer bits a weight first"
            )
        fitting = [option for option in options if option.most >= self.concurrency]
        if not fitting or (self.context >= 131_072 and self.share > 0.8):
            notes.append(
                "a state-space or hybrid model (a state of one size whatever the context) would serve this better, if one of its quality is to be had"
            )
        if workload == "multi-turn":
            notes.append("many turns share their beginning: prefix caching saves the prefill of each turn, and loses nothing")
        return tuple(notes)


@cache
def _published() -> dict[str, Quality]:
    with _data.path("published.csv").open(encoding="utf-8", newline="") as file:
        return {row["method"]: Quality(row["model"], row["source"], row["claim"]) for row in csv.DictReader(file)}


@cache
def _measured() -> dict[Strategy, Quality]:
    """What the recorded evidence says, by strategy."""
    found: dict[Strategy, dict[str, Evidence]] = {}
    for row in recorded():
        if row.counts:
            found.setdefault(Strategy.from_dict(row.settings), {})[row.task["task"]] = row
    return {strategy: _said(rows) for strategy, rows in found.items() if {"Text", "TwoKeys"} <= set(rows)}


def _said(rows: dict[str, Evidence]) -> Quality:
    text, keys = rows["Text"], rows["TwoKeys"]
    recall = f"{round((keys.score or 0.0) * keys.questions)} of {keys.questions}"
    return Quality(text.model, "data/results/evidence.jsonl", "", text.more["kl"], text.more["perplexity_change"], recall)


def _known(strategy: Strategy) -> tuple[Quality, ...]:
    """Measured rows of the same store (and keep), then its paper's claim."""
    plain = replace(strategy, place=place.Resident(), chunk=0)
    own = _measured().get(plain)
    names = [type(part).__name__ for part in (strategy.keep, strategy.store)]
    return tuple(one for one in (own, *(_published().get(name) for name in names)) if one is not None)
