"""Advisor: the checklist of choosing a strategy, one card a step, filled in for a model, a device and a load.

Advisor(lab)          # your model, as the last line of a cell; Advisor() offers the models of the table

Profile, name what binds, start with what risks little, measure quality, layer more on; then take the choice away as settings.
"""

import html
from typing import Any, NamedTuple

import ipywidgets as widgets

from kvlab import advise as advising
from kvlab import geometry, hardware
from kvlab.advise import WORKLOADS, Advice, Limits, Option
from kvlab.export import ENGINES, export
from kvlab.geometry import Geometry
from kvlab.lab import Lab, Progress
from kvlab.measure import roofline
from kvlab.measure.device import device_memory
from kvlab.measure.experiment import Evidence, experiment, recorded
from kvlab.measure.memory import predict_curve
from kvlab.measure.named import name_of
from kvlab.measure.tasks import Correction, Text, TwoKeys
from kvlab.panels.bench import Bench, Box, Drawing, dropdown, stops
from kvlab.panels.runner import Ticket
from kvlab.panels.widgets import HUES
from kvlab.plots import choosing as plots
from kvlab.plots import experiment as evidence
from kvlab.plots import style
from kvlab.strategy import Strategy

OWN = "this model"
TASKS = {
    "text, 256 tokens (seconds)": Text(prefill=192, scored=64),
    "two pass keys in 256 tokens": TwoKeys(tokens=256, texts=2),
    "a fact corrected, 256 tokens": Correction(tokens=256, texts=2),
    "text, the reference protocol (a minute)": Text(),
}
DRAWINGS = {
    "profile": Drawing("1 profile", 300, lambda: plots.bytes_by_context([0, 1], {"full cache": [0.0, 0.0]}, title="")),
    "binds": Drawing("2 what binds", 200, lambda: plots.constraints([], title="")),
    "options": Drawing("3 what to try, in order", 420, lambda: plots.options(None, title="")),
    "quality": Drawing("4 measure quality", 320, lambda: evidence.pareto([], title="")),
    "step": Drawing("5 where a step stands", 320, lambda: plots.roofline([], 1.0, 1.0, title="")),
}
COLUMNS = (("profile", "binds", "step"), ("options", "quality"))
CONTEXTS = [1 << power for power in range(9, 21)]
COUNTS = [1 << power for power in range(11)]


class Asked(NamedTuple):
    shape: Geometry
    device: str
    context: int
    concurrency: int
    workload: str
    limits: Limits
    devices: int
    weight_bits: int
    engine: str
    choice: int  # of the options, counted from the first
    measure: str  # a task's name; "": nothing is measured


class Advisor(Bench):
    """Driven by `model`, `weight_bits`, `device`, `devices`, `context`, `concurrency`, `workload`, `per_token` (ms), `first_token` (s), `choice` (an option's
    number), `engine`, `task` and the button `measure`. `settings` shows the choice as code and as an engine's settings. `shown` holds "advice" and "rows"
    (what was measured here). `cards`, `figures`: by the names of `DRAWINGS`.

    Args:
        lab: the model that is measured, and offered as "this model"; None loads SmolLM2-135M when `measure` is pressed.
        device: a name of the hardware table.
    """

    asked = "advice"
    needs_model = False

    def __init__(self, lab: Lab | None = None, *, device: str = "A10 24GB", model: str = "Llama-3.1-8B") -> None:
        names = [*([OWN] if lab is not None else []), *(name for name in geometry.names() if geometry.find(name).kv_layers)]
        if model not in names and geometry.find(model).kv_layers:  # your own
            names.insert(0, model)
        start = OWN if lab is not None else model
        self._own = None if lab is None else lab.geometry
        own = geometry.find(start).context if lab is None else lab.context
        self.model_choice = dropdown("model", names, start, "whose cache it is")
        self.weight_bits = dropdown("bits of a weight", [16, 8, 4], 16, "as the weights are held")
        self.device = dropdown("device", hardware.names("gpu", "cpu"), device, "what it runs on")
        self.devices = dropdown("how many", [1, 2, 4, 8, 16], 1, "devices that share the work")
        self.context = stops(
            "context (tokens)",
            CONTEXTS,
            max([n for n in CONTEXTS if n <= min(32768, own or 32768)], default=CONTEXTS[0]),
            "tokens of each sequence",
        )
        self.concurrency = stops("sequences at once", COUNTS, 4, "requests that are decoded together")
        self.workload = dropdown("workload", list(WORKLOADS), "chat", "what the cache must not lose")
        self.per_token = stops("limit: ms a token", [0, 5, 10, 20, 30, 50, 100, 200, 500], 0, "0: no limit")
        self.first_token = stops("limit: s to the first token", [0, 1, 2, 5, 10, 20, 60], 0, "0: no limit")
        self.choice = dropdown("option", [("1", 0)], 0, "which of the options, in their order, is taken away and measured")
        self.engine = dropdown("engine", list(ENGINES), "vllm", "whose settings are shown")
        self.task = dropdown("task", list(TASKS), next(iter(TASKS)), "what is asked of the strategy, on the model at hand")
        self.measure = widgets.Button(
            description="Measure", button_style="primary", tooltip="the full cache and the chosen option, on the model at hand"
        )
        self.settings = widgets.HTML()
        boxes = [
            Box("model", "whose cache?", style.FULL, [self.model_choice, self.weight_bits]),
            Box("device", "on what?", HUES["place"], [self.device, self.devices]),
            Box("load", "how much at once?", HUES["keep"], [self.context, self.concurrency, self.workload]),
            Box("limits", "what must hold?", style.DANGER, [self.per_token, self.first_token]),
            Box("take away", "which option?", HUES["store"], [self.choice, self.engine, self.settings, self.task, self.measure]),
        ]
        self._measuring = ""
        super().__init__(lab, None, boxes=boxes, drawings=DRAWINGS, columns=COLUMNS)
        for one in (self.model_choice, self.weight_bits, self.device, self.devices, self.context, self.concurrency, self.workload, self.per_token, self.first_token, self.choice, self.engine):  # fmt: skip
            one.observe(lambda _: self._changed(), "value")
        self.measure.on_click(lambda _: self._measure())
        self.shown["rows"] = []
        self._changed()

    @property
    def advice(self) -> Advice | None:
        return self.shown.get("advice")

    @property
    def option(self) -> Option | None:
        """The option that is chosen."""
        return None if self.advice is None else self.advice.options[min(self.choice.value, len(self.advice.options) - 1)]

    def _measure(self) -> None:
        self._measuring = self.task.value
        self._changed()

    def _read(self) -> Asked:
        name, self._measuring = self._measuring, ""
        shape = self._own if self.model_choice.value == OWN else geometry.find(self.model_choice.value)
        assert shape is not None
        limits = Limits(per_token=self.per_token.value / 1e3 or None, first_token=self.first_token.value or None)
        return Asked(
            shape, self.device.value, self.context.value, self.concurrency.value, self.workload.value, limits, self.devices.value, self.weight_bits.value,
            self.engine.value, self.choice.value, name,
        )  # fmt: skip

    # on the runner's thread

    def _answer(self, ticket: Ticket, lab: Lab | None, asked: Asked, progress: Progress) -> None:
        kind = hardware.find(asked.device)
        made = advising.advise(
            asked.shape, kind, asked.context, asked.concurrency, asked.workload, asked.limits, devices=asked.devices, weight_bits=asked.weight_bits
        )  # fmt: skip
        lengths = [asked.context * part // 32 for part in range(33)]
        curves = {"full cache": Strategy(), **{str(option.strategy): option.strategy for option in made.options[:5]}}
        sizes = {
            name: [sum(point) for point in zip(*predict_curve(asked.shape, one, lengths).values(), strict=True)]
            for name, one in curves.items()
        }
        points = [
            roofline.decode(
                asked.shape,
                kind,
                one,
                asked.context,
                requests=asked.concurrency,
                devices=asked.devices,
                weight_bits=asked.weight_bits,
            )
            for one in dict.fromkeys([Strategy(), *(option.strategy for option in made.options)])
        ]
        points.append(roofline.prefill(asked.shape, kind, asked.context, devices=asked.devices, weight_bits=asked.weight_bits))
        ticket.show(self._advise, asked, made, lengths, sizes, points)
        if asked.measure:
            lab = self._load(ticket)
            chosen = made.options[min(asked.choice, len(made.options) - 1)].strategy
            progress("measuring", 0, 1)
            rows = experiment(lab, [chosen], [TASKS[asked.measure]], progress=ticket.check)
            ticket.show(self._evidence, rows)

    # always under the runner's lock

    def _advise(self, asked: Asked, made: Advice, lengths: list[int], sizes: dict[str, list[float]], points: list[Any]) -> None:
        self.shown |= {"advice": made, "points": points}
        kind = hardware.find(asked.device)
        name = asked.shape.name if self.model_choice.value != OWN else f"{self._lab.name if self._lab else ''}"
        self.model.value = html.escape(f"{name} on {asked.devices} × {kind.name}")
        self._choices(made)
        style.become(self.figures["profile"], plots.bytes_by_context(lengths, sizes, title=""))
        self._say("profile", self._profile(asked, made, sizes), "predicted")
        plots.update_constraints(self.figures["binds"], made.constraints)
        self._say("binds", "; ".join(map(str, made.constraints)) + ".", "predicted")
        plots.update_options(self.figures["options"], made)
        order = " ".join(note[0].upper() + note[1:] + "." for note in made.notes)
        self._say("options", f"{plots.options_summary(made)} {order}", "predicted")
        assert kind.flops is not None
        plots.update_roofline(self.figures["step"], points, kind.bandwidth * asked.devices, kind.flops * asked.devices)
        self._say("step", plots.roofline_summary(points, kind.bandwidth * asked.devices, kind.flops * asked.devices), "predicted")
        self._take_away(asked)
        self._evidence([])

    def _choices(self, made: Advice) -> None:
        labels = [(f"{number + 1} {option.strategy}"[:60], number) for number, option in enumerate(made.options)]
        if [label for label, _ in labels] != [label for label, _ in self.choice.options]:
            self._setting = True
            try:
                kept = self.choice.value
                self.choice.options = labels
                self.choice.value = kept if kept is not None and kept < len(labels) else 0
            finally:
                self._setting = False

    def _profile(self, asked: Asked, made: Advice, sizes: dict[str, list[float]]) -> str:
        each = sizes["full cache"][-1]
        words = f"A token takes {geometry.text(round(each / asked.context))} in 16 bits, {asked.concurrency} × {asked.context:,} tokens {geometry.text(round(each * asked.concurrency))}; "
        words += f"a decode step reads {100 * made.share:.0f}% cache, {100 - 100 * made.share:.0f}% weights."
        found = device_memory()
        if found is not None:
            words += (
                f" This GPU ({found.name}): {geometry.text(found.used)} in use, peak {geometry.text(found.peak)}, {geometry.text(found.idle)} reserved and idle, of {geometry.text(found.total)}"
                + (f"; {found.retries} allocations found no room at first." if found.retries else ".")
            )
        return words

    def _take_away(self, asked: Asked) -> None:
        option = self.option
        assert option is not None
        given = str(export(option.strategy, asked.engine))
        said = (
            "".join(f"<li>{html.escape(str(one), quote=False)}</li>" for one in option.quality)
            or "<li>nothing measured or published is known here</li>"
        )
        danger = f'<div class="kvlab-lost">danger: {html.escape(option.danger, quote=False)}</div>' if option.danger else ""
        self.settings.value = f"<pre>{html.escape(option.strategy.to_code(), quote=False)}\n\n{html.escape(given, quote=False)}</pre>{danger}<ul>{said}</ul>"

    def _evidence(self, rows: list[Evidence]) -> None:
        self.shown["rows"] = [*self.shown["rows"], *rows]
        here = self.shown["rows"]
        if here:
            last = [row for row in here if row.task == here[-1].task]
            own = list({row.key: row for row in last}.values())
            said = "; ".join(
                f"{row.strategy}: {'failed' if row.score is None else f'{row.score:.2f}'}{' (' + row.why + ')' if row.why else ''}"
                for row in own
            )
            words, note = (
                f"{own[0].task['task']} on {own[0].model}: {said}. {evidence.pareto_summary(own, name=_name)}",
                "measured here",
            )
        else:
            own = [row for row in recorded() if row.task["task"] == "Text" and row.counts]
            when = max((row.date for row in own), default="")
            words, note = (
                f"Recorded on {own[0].model if own else 'no model'}: the share of tokens where the full cache would say the same. {evidence.pareto_summary(own, name=_name)}",
                f"recorded {when}",
            )
        named = [row for row in own if row.score is not None]
        style.become(self.figures["quality"], evidence.pareto(named, name=_name, title=""))
        self._say("quality", words, note)

    def __repr__(self) -> str:
        option = self.option
        if option is None:
            return "Advisor: nothing worked out yet"
        return f"Advisor: {name_of(option.strategy.to_dict())}: {option.strategy.to_code()}\n{self.text}"


def _name(row: Evidence) -> str:
    return name_of(row.settings)
