"""Where the package's tables lie (`models.json`, `hardware.csv`, ...), and how a person's spelling finds a row in one."""

import sys
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def path(name: str) -> Path:
    """The file `name` of the data folder: beside the package in a checkout, else under `share/kvlab/data` of the installation.

    Raises `FileNotFoundError` that lists the places looked at.
    """
    share = Path("share", "kvlab", "data")
    roots = [
        _PACKAGE.parent / "data",  # a checkout, or an editable install
        Path(sys.prefix) / share,  # pip install
        Path(sysconfig.get_path("data")) / share,  # a distribution's own scheme
        _PACKAGE.parent / share,  # pip install --target
    ]
    with suppress(KeyError):  # a Python without a user scheme
        roots.append(Path(sysconfig.get_path("data", sysconfig.get_preferred_scheme("user"))) / share)  # pip install --user
    for root in roots:
        if (root / name).is_file():
            return root / name
    raise FileNotFoundError(f"data file {name!r} not found; looked in {', '.join(str(root) for root in dict.fromkeys(roots))}")


def pick(name: str, names: Iterable[str], what: str) -> str:
    """The one of `names` meant by `name`: case, spaces and punctuation do not matter, and a unique beginning is enough.

    Raises `ValueError` that lists the names (or, when several begin that way, the candidates).
    """

    def plain(text: str) -> str:
        return "".join(character for character in str(text).lower() if character.isalnum())

    names, wanted = list(names), plain(name)
    exact = [known for known in names if plain(known) == wanted]
    found = exact or [known for known in names if wanted and plain(known).startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"{what} {name!r} could be any of: {', '.join(found)}")
    raise ValueError(f"no {what} {name!r}; known: {', '.join(names)}")
