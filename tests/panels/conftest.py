"""A lab that costs nothing: a tiny random Llama, and a tokenizer with one token for each character."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvlab.lab import Lab


class Characters:
    """ASCII characters as token ids 3 to 96; others are question marks."""

    eos_token_id = 1

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 29 if " " <= c <= "}" else ord("?") - 29 for c in text]

    def decode(self, tokens: Any) -> str:
        return "".join(chr(int(token) + 29) for token in tokens if int(token) > 2)

    def __call__(self, text: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(input_ids=torch.tensor([self.encode(text)], dtype=torch.int64))


@pytest.fixture
def tiny_lab(llama: Any) -> Lab:
    """Context 512 tokens, 3 layers, 4 query heads, 2 KV heads of dim 16."""
    return Lab("tiny", llama, Characters())
