"""Traffic: a stream of requests on any model and device, simulated: static against continuous batching, the worst case reserved against blocks, shared beginnings.

Traffic()          # as the last line of a cell; no model is loaded

The engine's own scheduler, pool and tree, on a clock by the datasheets: every time in it is predicted.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ipywidgets as widgets

from kvlab import geometry, hardware
from kvlab.lab import Lab, Progress
from kvlab.measure.studies import recorded
from kvlab.panels.bench import Bench, Box, Drawing, dropdown, slider, start
from kvlab.panels.runner import Ticket
from kvlab.panels.widgets import HUES
from kvlab.plots import serving as plots
from kvlab.plots import style
from kvlab.serving import Served, simulate, traces
from kvlab.serving.reservation import reserve
from kvlab.serving.simulate import block_bytes
from kvlab.serving.traces import Arrival
from kvlab.store.int import Int
from kvlab.strategy import Strategy

SHOWN = 24  # requests of a timeline
STATIC, CONTINUOUS = "static", "continuous"
WORST, BLOCKS = "the worst case reserved", "blocks as needed"
Make = Callable[["Asked"], Sequence[Arrival]]
KINDS: dict[str, Make] = {
    "chat": lambda a: traces.chat(a.requests, rate=a.rate, limit=a.limit),
    "chat, in bursts": lambda a: traces.bursts(
        a.requests, size=max(1, a.requests // 5), pause=a.requests / a.rate / 5, limit=a.limit
    ),
    "one system prompt": lambda a: traces.shared_prompt(a.requests, prefix=a.prefix, rate=a.rate),
    "four tenants' system prompts": lambda a: traces.shared_prompt(a.requests, prefix=a.prefix, rate=a.rate, tenants=4),
    "RAG, chunks by how well they fit": lambda a: traces.rag(a.requests, system=a.prefix, rate=a.rate),
    "RAG, chunks in a fixed order": lambda a: traces.rag(a.requests, system=a.prefix, rate=a.rate, ordered=True),
    "conversations of 5 turns": lambda a: traces.turns(
        max(1, a.requests // 5), system=a.prefix, think=max(0.1, a.requests / a.rate / 5)
    ),
    "agents of 8 tool calls": lambda a: traces.tools(max(1, a.requests // 8), system=a.prefix),
}
DRAWINGS = {
    "static": Drawing("static batching", 340, lambda: plots.timeline(title="")),
    "continuous": Drawing("continuous batching", 340, lambda: plots.timeline(title="")),
    "usage": Drawing("how full the blocks are", 250, lambda: plots.usage(title="")),
    "reservation": Drawing("reserved, or in blocks", 190, lambda: plots.reservation(title="")),
    "prefixes": Drawing("prompt tokens", 150, lambda: plots.prompts(title="")),
    "block": Drawing("block size", 250, lambda: plots.block_sizes(*_rows(), title="")),
}
COLUMNS = (("static", "continuous", "usage"), ("reservation", "prefixes", "block"))


class Asked(NamedTuple):
    model: str
    device: str
    devices: int
    memory: float  # GB; 0: what the weights leave
    kind: str
    requests: int
    rate: float
    prefix: int
    limit: int
    bits: int
    block_size: int
    running: int
    sharing: bool


class Traffic(Bench):
    """Driven by `model`, `device`, `devices`, `memory` (GB); `kind`, `requests`, `rate` (a second), `prefix`, `limit` (tokens); `bits`, `block_size`, `running`,
    `sharing`. `shown` holds "runs" by name, all predicted. `cards`, `figures`: by the names of `DRAWINGS`. Raises ``ValueError`` for settings that it does not have.
    """

    asked = "runs"
    needs_model = False

    def __init__(self, lab: Lab | None = None, **settings: Any) -> None:
        names = [name for name in geometry.names() if geometry.find(name).kv_layers]
        self.model_choice = dropdown("model", {name: name for name in names}, "Llama-3.1-8B", "whose cache it is")
        self.device = dropdown("device", {name: name for name in hardware.names("gpu", "cpu")}, "A10 24GB", "what it runs on")
        self.devices = dropdown("how many", {str(n): n for n in (1, 2, 4, 8, 16)}, 1, "devices that share the work")
        sizes = {"what the weights leave": 0.0} | {
            f"{size:g} GB": float(size) for size in (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256)
        }
        self.memory = dropdown("memory for the cache", sizes, 1.0, "of all devices together")
        self.kind = dropdown("requests", {name: name for name in KINDS}, "chat", "what they have in common")
        self.requests = dropdown("how many", {str(n): n for n in (20, 50, 100, 200, 400)}, 100, "in all")
        self.rate = dropdown(
            "a second", {f"{n:g}": float(n) for n in (0.5, 1, 2, 4, 8, 16, 32, 64)}, 8.0, "how many arrive a second, on average"
        )
        self.prefix = slider("shared beginning (tokens)", "of those that have one", min=0, max=8000, step=100, value=2000)
        self.limit = dropdown(
            "longest (tokens)",
            {f"{n:,}": n for n in (1024, 2048, 4096, 8192, 16384, 32768)},
            2048,
            "prompt and answer together, for all that a server knows",
        )
        self.bits = dropdown("bits of a number", {"16": 16, "8": 8, "4": 4}, 16, "in a full block")
        self.block_size = dropdown(
            "block size (tokens)", {str(n): n for n in (1, 4, 8, 16, 32, 64, 128)}, 16, "tokens of a block"
        )
        self.running = dropdown(
            "at most at once", {str(n): n for n in (4, 8, 16, 32, 64, 128, 256)}, 64, "requests that run together"
        )
        self.sharing = widgets.Checkbox(
            description="prefix caching", value=True, indent=False, tooltip="lend out again what was read before"
        )
        self.sharing.add_class("kvlab-setting")
        self._controls = {"model": self.model_choice} | {name: getattr(self, name) for name in Asked._fields if name != "model"}
        start(self, self._controls, settings)
        boxes = [
            Box("model", "what serves?", style.FULL, [self.model_choice, self.device, self.devices, self.memory]),
            Box("requests", "who asks for what?", HUES["keep"], [self.kind, self.requests, self.rate, self.prefix, self.limit]),
            Box("cache", "what goes into a block?", HUES["store"], [self.bits, self.block_size]),
            Box("rules", "who gets what?", HUES["place"], [self.running, self.sharing]),
        ]
        super().__init__(lab, None, boxes=boxes, drawings=DRAWINGS, columns=COLUMNS)
        for one in self._controls.values():
            one.observe(lambda _: self._changed(), "value")
        self._changed()

    def _read(self) -> Asked:
        return Asked(**{name: control.value for name, control in self._controls.items()})

    # on the runner's thread

    def _answer(self, ticket: Ticket, lab: Lab | None, asked: Asked, progress: Progress) -> None:
        trace = _limited(KINDS[asked.kind](asked._replace(prefix=max(1, asked.prefix))), asked.limit)
        shape, strategy = geometry.find(asked.model), _strategy(asked)
        ticket.show(self._load_words, asked)
        runs: dict[str, Served] = {}
        ways: dict[str, dict[str, Any]] = {CONTINUOUS: {}, STATIC: {"batching": "static"}, WORST: {"reserve": "worst"}}
        for number, (name, how) in enumerate(ways.items()):
            progress("simulating", number, len(ways))
            runs[name] = simulate(
                trace, shape, asked.device, strategy=strategy, devices=asked.devices, kv_memory=int(asked.memory * 1e9) or None, block_size=asked.block_size,
                max_running=asked.running, prefix_caching=asked.sharing, progress=lambda done, whole: ticket.check(), **how,
            )  # fmt: skip
        ticket.show(self._show, asked, trace, runs)

    # always under the runner's lock

    def _load_words(self, asked: Asked) -> None:
        self.model.value = f"{asked.model} on {asked.devices} × {asked.device}: predicted"

    def _show(self, asked: Asked, trace: Sequence[Arrival], runs: dict[str, Served]) -> None:
        self.shown["runs"] = runs
        begin = min(one.time for one in trace)
        static, continuous = runs[STATIC], runs[CONTINUOUS]
        spans = {name: plots.spans_of_requests(runs[name].requests[:SHOWN], begin) for name in (STATIC, CONTINUOUS)}
        most = max((span.end for own in spans.values() for span in own), default=1.0)
        plots.update_timeline(self.figures["static"], spans[STATIC], most=most)
        plots.update_timeline(self.figures["continuous"], spans[CONTINUOUS], most=most)
        first = f"first {SHOWN} of {len(trace)}" if len(trace) > SHOWN else f"{len(trace)} requests"
        self._say(
            "static",
            f"{static.throughput:,.0f} tokens a second; half of the first tokens within {plots.seconds(static.first_token)}.",
            f"{first}, predicted",
        )
        self._say("continuous", plots.timeline_summary(static, continuous), f"{first}, predicted")
        plots.update_usage(self.figures["usage"], {WORST: runs[WORST], BLOCKS: continuous})
        self._say("usage", plots.usage_summary({WORST: runs[WORST], BLOCKS: continuous}), "predicted")
        lengths = [len(one.prompt) + one.new for one in trace]
        shape, strategy = geometry.find(asked.model), _strategy(asked)
        made = reserve(shape, lengths, max(asked.limit, *lengths), block_size=asked.block_size, strategy=strategy)
        plots.update_reservation(self.figures["reservation"], made)
        token = block_bytes(shape, strategy, asked.block_size) / asked.block_size
        self._say(
            "reservation",
            f"{plots.reservation_summary(made)} A token takes {geometry.text(round(token))}.",
            f"all {len(trace)} at once",
        )
        plots.update_prompts(self.figures["prefixes"], continuous)
        self._say("prefixes", plots.prompts_summary(continuous), "predicted" if asked.sharing else "prefix caching is off")
        plots.update_block_sizes(self.figures["block"], asked.block_size)
        self._say("block", plots.block_sizes_summary(*_rows()), "recorded on SmolLM2")

    def __repr__(self) -> str:
        return f"Traffic: predicted\n{self.text}" if "runs" in self.shown else "Traffic: nothing simulated yet"


def _rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    return recorded("paging"), recorded("blocks")


def _strategy(asked: Asked) -> Strategy:
    if asked.bits == 16:
        return Strategy()
    group = min(64, *(min(layer.key_dim, layer.value_dim) for layer in geometry.find(asked.model).kv_layers))
    return Strategy(store=Int(bits=asked.bits, key_axis="token", group_size=group))


def _limited(trace: Sequence[Arrival], limit: int) -> list[Arrival]:
    """A server that knows no better counts with the limit."""
    return [dataclasses.replace(one, most=max(one.new, limit - len(one.prompt))) for one in trace]
