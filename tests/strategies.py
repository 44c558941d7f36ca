"""Every strategy there can be, found in the registry: a new method takes part in the parity tests with no line written for it."""

from __future__ import annotations

from itertools import product

from kvlab import Strategy
from kvlab.strategy import AXES, Method, methods


def covering(tokens: int) -> dict[str, list[Method]]:
    """axis -> its methods that can keep all of ``tokens`` tokens exactly, set so that they do."""
    return {axis: [full for method in methods(axis).values() if (full := method().covering(tokens)) is not None] for axis in AXES}


def full_budget(tokens: int) -> list[Strategy]:
    """Every combination of methods that keeps all of ``tokens`` tokens exactly. What cannot combine is left out."""
    found = []
    for combination in product(*covering(tokens).values()):
        try:
            found.append(Strategy(**dict(zip(AXES, combination, strict=True))))
        except ValueError:
            continue
    return found


def with_it(axis: str, method: Method) -> Strategy:
    """The method beside defaults, or, where it needs another store, beside the first that it combines with."""
    for other in [None, *methods("store").values()]:
        try:
            return Strategy(**{axis: method} | ({} if other is None else {"store": other()}))
        except ValueError as error:
            problem = error
    raise problem


def one_by_one(tokens: int) -> list[Strategy]:
    """Each such method once, beside defaults, and the last of each axis together."""
    answers = covering(tokens)
    alone = [with_it(axis, method) for axis, several in answers.items() for method in several]
    return list(dict.fromkeys([*alone, full_budget(tokens)[-1]]))
