"""The place axis: one file a method. A new file here is found by itself."""

from __future__ import annotations

import importlib
import pkgutil

from kvlab.strategy import Method, registry

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def __getattr__(name: str) -> type[Method]:
    try:
        return registry["place"][name]
    except KeyError:
        raise AttributeError(f"kvlab.place has no {name!r}; it has {', '.join(registry['place'])}") from None


def __dir__() -> list[str]:
    return list(registry["place"])
