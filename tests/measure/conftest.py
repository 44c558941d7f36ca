"""The lab of the panels' tests, once for all."""

from typing import Any

import pytest

from kvlab.lab import Lab
from tests.panels.conftest import Characters


@pytest.fixture(scope="session")
def tiny_lab(llama: Any) -> Lab:
    """Context 512 tokens, 3 layers, 4 query heads, 2 KV heads of dim 16; a character is a token."""
    return Lab("tiny", llama, Characters())  # type: ignore[arg-type]
