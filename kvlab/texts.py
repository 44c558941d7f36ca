"""Texts to work on: the reference text that every Python carries, and the prompts that come with kvlab."""

import re

from kvlab import _data

PROMPTS = ("reference", "story", "question")
_SLICE = re.compile(r"\{\{reference (\d+) (\d+)\}\}")


def reference_text() -> str:
    """The Python reference's chapter on special method names, as `pydoc` has it: about 63,000 characters of real English.

    It comes with every CPython, so nothing is downloaded; its wording differs a little between Python's minor versions.
    """
    from pydoc_data.topics import topics

    return str(topics["specialnames"])


def long_text() -> str:
    """All chapters of the Python reference that `pydoc` has, :func:`reference_text` first: more than 400,000 characters."""
    from pydoc_data.topics import topics

    return "\n\n".join([reference_text(), *(str(topics[name]) for name in sorted(topics) if name != "specialnames")])


def prompts() -> dict[str, str]:
    """The shipped prompts by name: "reference" (about 512 tokens of it), "story" (a beginning), "question" (on the reference).

    They are the files `data/prompts/*.txt`; `{{reference 0 500}}` in one stands for those characters of the reference text.
    """
    return {
        name: _SLICE.sub(_cut, _data.path(f"prompts/{name}.txt").read_text(encoding="utf-8").rstrip("\n")) for name in PROMPTS
    }


def _cut(found: re.Match[str]) -> str:
    return reference_text()[int(found[1]) : int(found[2])]
