"""The keep axis: one file a method. A new file here is found by itself."""

from kvlab.strategy import Method, discover, registry

discover(__name__, __path__)


def __getattr__(name: str) -> type[Method]:
    try:
        return registry["keep"][name]
    except KeyError:
        raise AttributeError(f"kvlab.keep has no {name!r}; it has {', '.join(registry['keep'])}") from None


def __dir__() -> list[str]:
    return list(registry["keep"])
