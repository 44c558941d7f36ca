"""Tiny random models and prompts that every test can use. ``KVLAB_TEST_DEVICE=cuda`` runs the same tests on a GPU."""

import os
import zlib

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

if "PYTEST_XDIST_WORKER" in os.environ:  # several processes share the processor: one thread each
    torch.set_num_threads(1)
DEVICE = torch.device(os.environ.get("KVLAB_TEST_DEVICE", "cpu"))
COMMON = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.15,
)


def make_llama(seed: int = 0, **changes) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**COMMON, **changes})).eval().to(DEVICE)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the kernels' tests and those marked `many`, about half of the cases run, the first always; all with ``KVLAB_ALL=1`` (`make nightly`)."""
    if os.environ.get("KVLAB_ALL") == "1":
        return
    met, left = set(), []
    for item in items:
        test = item.nodeid.partition("[")[0]
        if test in met and ("tests/kernels/" in test or item.get_closest_marker("many")) and zlib.crc32(item.nodeid.encode()) % 2:
            left.append(item)
        met.add(test)
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


@pytest.fixture(scope="session")
def device() -> torch.device:
    return DEVICE


@pytest.fixture(scope="session")
def llama() -> LlamaForCausalLM:
    return make_llama()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(0)).to(DEVICE)
