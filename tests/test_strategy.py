"""Settings are declared once: validation, data, code all follow from the declaration."""

import dataclasses

import pytest

import kvlab
from kvlab import Strategy, keep, place, store
from kvlab.strategy import AXES, Method, discover, methods
from tests.strategies import with_it

EVERY = [(axis, name, cls) for axis in AXES for name, cls in methods(axis).items()]


@pytest.mark.parametrize(("axis", "name", "cls"), EVERY, ids=lambda x: x if isinstance(x, str) else "")
def test_every_method_is_data(axis, name, cls):
    one = cls()
    strategy = with_it(axis, one)
    assert Strategy.from_dict(strategy.to_dict()) == strategy
    assert hash(one) == hash(cls())
    assert eval(strategy.to_code(), {"kvlab": kvlab, "keep": keep, "store": store, "place": place}) == strategy
    assert cls.title and cls.__doc__
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.x = 1


@pytest.mark.parametrize(("axis", "name", "cls"), EVERY, ids=lambda x: x if isinstance(x, str) else "")
def test_every_setting_is_bounded_and_explained(axis, name, cls):
    for setting, declared in cls.settings().items():
        assert declared.help
        bad = []
        if declared.choices:
            bad = ["no such choice", None]
        elif declared.low is not None:
            bad = [declared.low - 1, "many", None, True]
        if declared.high is not None:
            bad.append(declared.high + 1)
        for value in bad:
            with pytest.raises(ValueError, match=setting) as error:
                cls(**{setting: value})
            text = str(error.value)
            assert setting in text and repr(value) in text, text
            assert "allowed" in text or "not one of" in text, text


def test_every_method_stands_in_the_readme():
    from pathlib import Path

    text = (Path(__file__).parents[1] / "README.md").read_text()
    for axis, name, cls in EVERY:
        (row,) = [line for line in text.splitlines() if line.startswith(f"| {axis} | `{name}")]
        for setting in cls.settings():
            assert setting in row or setting in ("scales", "folder"), f"{name}: {setting} is missing in the README's row"


def test_a_choice_is_of_its_own_type():
    with pytest.raises(ValueError, match=r"bits=4.0 is not one of 8, 4, 3, 2"):
        store.Int(bits=4.0)


def test_what_does_not_combine_says_what_does():
    for keys in (store.KIVI(), store.Rotated(inner=store.KIVI())):
        with pytest.raises(
            ValueError, match=r"Window needs evict, which .* cannot give with these settings \(allowed: .*Dense, .*Int"
        ):
            Strategy(keep=keep.Window(), store=keys)


def test_rules_between_settings():
    with pytest.raises(ValueError, match="budget=16 is below recent \\+ sinks = 68"):
        keep.HeavyHitter(budget=16)
    with pytest.raises(ValueError, match="bits=5 is not one of 8, 4, 3, 2"):
        store.Int(bits=5)
    with pytest.raises(ValueError, match="size=0 is out of range \\(allowed: 1 to 1048576 tokens\\)"):
        keep.Window(size=0)
    with pytest.raises(ValueError, match="chunk=-1"):
        Strategy(chunk=-1)
    with pytest.raises(ValueError, match="keep=.*not a method of the keep axis"):
        Strategy(keep=store.Int())
    with pytest.raises(AttributeError, match="it has"):
        keep.Nothing  # noqa: B018


def test_what_does_not_combine_is_refused_by_both_names():
    @dataclasses.dataclass(frozen=True)
    class Picky(keep.Everything):
        title = "needs the impossible"
        needs = frozenset({"telepathy"})
        instead = "Use Everything."

    try:
        with pytest.raises(ValueError, match="Picky needs telepathy, which Int and Resident cannot give. Use Everything."):
            Strategy(keep=Picky(), store=store.Int())
    finally:
        from kvlab.strategy import registry

        del registry["keep"]["Picky"]


def test_code_and_text_say_only_what_differs():
    strategy = Strategy(keep=keep.Window(size=128), store=store.Int(bits=4), chunk=256)
    assert strategy.to_code() == "kvlab.Strategy(keep=keep.Window(size=128), store=store.Int(bits=4), chunk=256)"
    assert str(Strategy()) == "full cache"
    assert str(Strategy(chunk=64)) == "chunk=64"
    assert str(strategy) == "Window(size=128) + Int(bits=4) + chunk=256"


def test_data_from_others_is_checked():
    for bad in ({"keep": {"method": "Nope"}}, {"keep": {"method": "Window", "sise": 3}}, {"keep": 3}, {"kep": {}}):
        with pytest.raises(ValueError, match="it has|not one of|no method"):
            Strategy.from_dict(bad)


def test_two_caches_of_one_strategy_do_not_share(llama, ids):
    from tests.reference import ours

    strategy = Strategy(keep=keep.Window(size=8), store=store.Int(bits=8, group_size=8))
    before = strategy.to_dict()
    first, _ = ours(llama, strategy, ids, [20, 40])
    second, _ = ours(llama, strategy, ids, [20, 40])
    assert (first == second).all()
    assert strategy.to_dict() == before


def test_a_method_is_one_file(tmp_path, monkeypatch):
    """A new file in the folder is found: nothing else is touched."""
    import sys

    source = '''
from dataclasses import dataclass
from kvlab.keep.base import Keep
from kvlab.strategy import param

@dataclass(frozen=True)
class Newcomer(Keep):
    """Found by itself."""
    title = "newcomer"
    needs = frozenset({"evict"})
    size: int = param(8, low=1, high=99, unit="tokens", help="How many.")
    def limit(self): return self.size
    def priority(self, held): return held.columns.float()
'''
    (tmp_path / "newcomer.py").write_text(source)
    monkeypatch.setattr(keep, "__path__", [*keep.__path__, str(tmp_path)])
    discover("kvlab.keep", keep.__path__)
    try:
        assert issubclass(methods("keep")["Newcomer"], Method)
        assert Strategy.from_dict({"keep": {"method": "Newcomer", "size": 3}}).keep.size == 3
    finally:
        kvlab.strategy.registry["keep"].pop("Newcomer", None)
        sys.modules.pop("kvlab.keep.newcomer", None)
