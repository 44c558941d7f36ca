"""The place axis: one file a method. A new file here is found by itself."""

from kvlab.strategy import Method, discover, registry

discover(__name__, __path__)


def __getattr__(name: str) -> type[Method]:
    try:
        return registry["place"][name]
    except KeyError:
        raise AttributeError(f"kvlab.place has no {name!r}; it has {', '.join(registry['place'])}") from None


def __dir__() -> list[str]:
    return list(registry["place"])
