"""Everything: no token ever leaves."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.keep.base import Keep


@dataclass(frozen=True)
class Everything(Keep):
    """Every token stays: the full cache, and the control for all others."""

    title = "everything"
    lossless = True
