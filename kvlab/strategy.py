"""A strategy answers three questions about the KV cache: which tokens to keep, how to store them, where to place them.

A setting is declared once, with :func:`param`; validation, sliders, tooltips and command-line options are made from that
declaration. A method is a frozen dataclass below one of the three axis classes and registers itself when its file is imported.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

AXES = ("keep", "store", "place")
#: What the cache itself offers: attention's weights and queries, the keys and values it holds, how the model's layers turn their keys by position, and
#: who speaks in a conversation, once it was told.
CACHE = frozenset({"attention", "queries", "keys", "rope", "roles"})
#: axis -> class name -> class, in the order of definition.
registry: dict[str, dict[str, type[Method]]] = {axis: {} for axis in AXES}


@dataclass(frozen=True)
class Setting:
    """What one setting of a method may be: bounds or choices, and the words a panel shows."""

    low: float | None = None
    high: float | None = None
    step: float | None = None
    choices: tuple[Any, ...] | None = None
    unit: str = ""
    help: str = ""
    title: str = ""
    covers: bool = False  # at a value that covers the sequence nothing is lost
    also: Callable[[Any], bool] | None = (
        None  # other ways of saying it than by the default's kind; raises ValueError for a wrong one
    )

    def check(self, owner: str, name: str, value: Any, default: Any) -> None:
        """Raise ``ValueError`` naming the setting, the value and the allowed range; ``TypeError`` never: panels show one kind."""
        if self.choices is not None:
            if not any(value == choice and type(value) is type(choice) for choice in self.choices):
                raise ValueError(f"{owner}: {name}={value!r} is not one of {', '.join(map(repr, self.choices))}")
            return
        if self.also is not None:
            try:
                if self.also(value):
                    return
            except ValueError as error:
                raise ValueError(f"{owner}: {name}={value!r} {error}") from None
        if isinstance(default, Method):
            if not isinstance(value, Method) or value.axis != default.axis:
                raise ValueError(f"{owner}: {name}={value!r} must be a method of the {default.axis} axis")
            return
        if isinstance(default, bool):
            if not isinstance(value, bool):
                raise ValueError(f"{owner}: {name}={value!r} must be True or False")
            return
        if isinstance(default, int):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{owner}: {name}={value!r} must be a whole number{self.range()}")
        elif isinstance(default, float):
            if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
                raise ValueError(f"{owner}: {name}={value!r} must be a number{self.range()}")
        elif isinstance(default, str):
            if not isinstance(value, str):
                raise ValueError(f"{owner}: {name}={value!r} must be text")
            return
        if (self.low is not None and value < self.low) or (self.high is not None and value > self.high):
            raise ValueError(f"{owner}: {name}={value!r} is out of range{self.range()}")

    def range(self) -> str:
        if self.low is None and self.high is None:
            return ""
        unit = f" {self.unit}" if self.unit else ""
        return f" (allowed: {self.low} to {self.high if self.high is not None else 'any'}{unit})"


def param(
    default: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    step: float | None = None,
    choices: tuple[Any, ...] | None = None,
    unit: str = "",
    help: str = "",
    title: str = "",
    covers: bool = False,
    also: Callable[[Any], bool] | None = None,
) -> Any:
    """Declare one setting of a method: its default, bounds (inclusive) or choices, unit and help text.

    ``covers``: a number of tokens; where it covers the sequence, the method loses nothing. The parity tests find it by this. ``also(value)``: True for a
    value that is fine in another form than the default's, ``ValueError`` for one that means to be and is wrong.
    """
    setting = Setting(low, high, step, choices, unit, help, title, covers, also)
    return dataclasses.field(default=default, metadata={"setting": setting})


class Method:
    """One answer on one axis: settings only. ``state(...)``, defined per axis, builds what a layer needs at run time.

    ``needs`` and ``offers`` say what combines with what: a strategy is refused unless each need of one method is offered by
    the other two, or by the cache itself (``CACHE``).
    """

    axis: ClassVar[str] = ""
    title: ClassVar[str] = ""  # what a person reads in a panel
    paper: ClassVar[str] = ""  # the source, as an arXiv number or a sentence
    needs: ClassVar[frozenset[str]] = frozenset()
    offers: ClassVar[frozenset[str]] = frozenset()
    instead: ClassVar[str] = ""  # what to use when this method is refused
    lossless: ClassVar[bool] = False  # nothing is lost, whatever the settings

    def __init_subclass__(cls, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not abstract:
            registry[cls.axis][cls.__name__] = cls

    def __post_init__(self) -> None:
        for name, setting in self.settings().items():
            field = type(self).__dataclass_fields__[name]  # type: ignore[attr-defined]
            setting.check(type(self).__name__, name, getattr(self, name), field.default)
        self.check()

    def check(self) -> None:
        """Rules that join two settings; raise ``ValueError``."""

    @classmethod
    def settings(cls) -> dict[str, Setting]:
        fields = getattr(cls, "__dataclass_fields__", {})
        return {name: field.metadata["setting"] for name, field in fields.items() if "setting" in field.metadata}

    def covering(self, tokens: int) -> Self | None:
        """This method with room for ``tokens`` tokens, so that nothing of them is lost; None if it always loses something."""
        for name, setting in self.settings().items():
            if setting.covers:
                now = getattr(self, name)
                return dataclasses.replace(self, **{name: max(now, tokens) if isinstance(now, int) else tokens})  # type: ignore[type-var]
        inner = {name: value for name in self.settings() if isinstance(value := getattr(self, name), Method)}
        if inner:
            full = {name: value.covering(tokens) for name, value in inner.items()}
            return None if None in full.values() else dataclasses.replace(self, **full)  # type: ignore[type-var]
        return self if self.lossless else None

    def __str__(self) -> str:
        return self.to_code().partition(".")[2]

    def to_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.settings()}
        return {"method": type(self).__name__} | {k: v.to_dict() if isinstance(v, Method) else v for k, v in values.items()}

    def to_code(self) -> str:
        """The expression that builds this method again; settings at their default are left out."""
        parts = []
        for name in self.settings():
            value = getattr(self, name)
            if value != type(self).__dataclass_fields__[name].default:  # type: ignore[attr-defined]
                parts.append(f"{name}={value.to_code() if isinstance(value, Method) else repr(value)}")
        return f"{self.axis}.{type(self).__name__}({', '.join(parts)})"


def discover(package: str, paths: Iterable[str]) -> None:
    """Import every file of an axis's folder, so that the classes in them register themselves."""
    for module in pkgutil.iter_modules(paths):
        importlib.import_module(f"{package}.{module.name}")


def methods(axis: str) -> dict[str, type[Method]]:
    """Every registered method of an axis, by class name."""
    if axis not in AXES:
        raise ValueError(f"axis={axis!r} is not one of {', '.join(AXES)}")
    importlib.import_module(f"kvlab.{axis}")
    return dict(registry[axis])


def from_dict(axis: str, data: dict[str, Any]) -> Method:
    """The inverse of :meth:`Method.to_dict`. Raises ``ValueError`` for an unknown method or setting."""
    if not isinstance(data, dict) or "method" not in data:
        raise ValueError(f"{axis}: {data!r} is no method (a mapping with the key 'method' is needed)")
    known = methods(axis)
    cls = known.get(data["method"])
    if cls is None:
        raise ValueError(f"{axis}: method {data['method']!r} is not one of {', '.join(known)}")
    values = {name: value for name, value in data.items() if name != "method"}
    unknown = set(values) - set(cls.settings())
    if unknown:
        raise ValueError(f"{cls.__name__}: unknown setting {sorted(unknown)}; it has {', '.join(cls.settings())}")
    return cls(**{k: from_dict(axis, v) if isinstance(v, dict) else v for k, v in values.items()})


def numbers(text: str, owner: str) -> set[int]:
    """The numbers that ``text`` such as ``"0-1, 29"`` names. Raises ``ValueError`` for anything else, naming ``owner``."""
    found: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not (first.strip().isdecimal() and (last.strip().isdecimal() or not dash)) or int(last or first) < int(first):
            raise ValueError(f"{owner}={text!r}: {part!r} is not of the form 3 or 0-2")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _default(axis: str, name: str) -> Any:
    return dataclasses.field(default_factory=lambda: methods(axis)[name]())


@dataclass(frozen=True)
class Strategy:
    """What to do with a KV cache: three answers, and how the prompt is fed.

    Args:
        keep: which tokens stay (default: every one).
        store: how a kept token is written down (default: as the model made it).
        place: where the bytes live (default: on the model's device).
        chunk: tokens per piece when the prompt is fed in pieces, with eviction between them; 0 feeds it in one piece.

    Raises:
        ValueError: a setting out of range, or methods that do not combine (both are named, and what to use instead).
    """

    keep: Any = _default("keep", "Everything")
    store: Any = _default("store", "Dense")
    place: Any = _default("place", "Resident")
    chunk: int = param(
        0,
        low=0,
        high=65536,
        step=64,
        unit="tokens",
        title="prefill chunk",
        help="Feed the prompt in pieces of this size. 0: one piece.",
    )

    def __post_init__(self) -> None:
        for axis in AXES:
            value = getattr(self, axis)
            if not isinstance(value, Method) or value.axis != axis:
                raise ValueError(f"Strategy: {axis}={value!r} is not a method of the {axis} axis ({', '.join(methods(axis))})")
        Strategy.chunk_setting().check("Strategy", "chunk", self.chunk, 0)
        for axis in AXES:
            one = getattr(self, axis)
            others = [getattr(self, other) for other in AXES if other != axis]
            missing = one.needs - CACHE - frozenset().union(*(o.offers for o in others))
            if missing:
                names = " and ".join(type(o).__name__ for o in others)
                able = [n for a in AXES if a != axis for n, cls in methods(a).items() if cls().offers >= missing]
                which = f"cannot give with these settings (allowed: {', '.join(able)})" if able else "cannot give"
                raise ValueError(
                    f"{type(one).__name__} needs {', '.join(sorted(missing))}, which {names} {which}. {one.instead}".rstrip()
                )

    @staticmethod
    def chunk_setting() -> Setting:
        return Strategy.__dataclass_fields__["chunk"].metadata["setting"]

    def to_dict(self) -> dict[str, Any]:
        return {axis: getattr(self, axis).to_dict() for axis in AXES} | {"chunk": self.chunk}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Strategy:
        """The inverse of :meth:`to_dict`; what is absent takes its default."""
        unknown = set(data) - {*AXES, "chunk"}
        if unknown:
            raise ValueError(f"Strategy: unknown key {sorted(unknown)}; it has {', '.join((*AXES, 'chunk'))}")
        parts: dict[str, Any] = {axis: from_dict(axis, data[axis]) for axis in AXES if axis in data}
        if "chunk" in data:
            parts["chunk"] = data["chunk"]
        return cls(**parts)

    def to_code(self) -> str:
        """Python that builds this strategy (needs ``import kvlab; from kvlab import keep, store, place``)."""
        parts = [
            f"{axis}={getattr(self, axis).to_code()}" for axis in AXES if getattr(self, axis) != methods(axis)[DEFAULTS[axis]]()
        ]
        if self.chunk:
            parts.append(f"chunk={self.chunk}")
        return f"kvlab.Strategy({', '.join(parts)})"

    def __str__(self) -> str:
        names = [str(getattr(self, axis)) for axis in AXES if getattr(self, axis) != methods(axis)[DEFAULTS[axis]]()]
        if self.chunk:
            names.append(f"chunk={self.chunk}")
        return " + ".join(names) or "full cache"


DEFAULTS = {"keep": "Everything", "store": "Dense", "place": "Resident"}
