"""An engine's settings in other servers' words, as their documentation has them; what they cannot do is said."""

from typing import Any

import pytest

from kvlab import Strategy, store
from kvlab.export import hand_over
from kvlab.lab import Lab
from kvlab.serving import Engine
from tests.panels.conftest import Characters


@pytest.fixture(scope="module")
def lab(llama: Any) -> Lab:
    return Lab("tiny", llama, Characters())  # type: ignore[arg-type]


def test_to_vllm(lab: Lab) -> None:
    engine = Engine(lab, Strategy(store=store.Fp8()), kv_memory="1 MB", block_size=16, token_budget=2048, max_running=128)
    made = hand_over(engine, "vllm")
    assert made.complete and made.settings == {
        "--kv-cache-dtype": "fp8_e4m3", "--block-size": 16, "--num-gpu-blocks-override": engine.pool.blocks, "--max-num-batched-tokens": 2048,
        "--max-num-seqs": 128, "--enable-prefix-caching": True,
    }  # fmt: skip
    assert "vllm serve MODEL --kv-cache-dtype fp8_e4m3 --block-size 16" in str(made) and "cache_salt" in str(made)
    odd = Engine(lab, kv_memory="1 MB", block_size=24, batching="static", reserve="worst", preempt="swap", prefix_caching=False)
    made = hand_over(odd, "vllm")
    assert "--no-enable-prefix-caching" in made.settings
    assert (made.settings["--block-size"], made.settings["--num-gpu-blocks-override"]) == (16, odd.pool.blocks * 24 // 16)
    assert len(made.missing) == 4 and "nearest: --block-size 16" in made.missing[0]


def test_to_sglang(lab: Lab) -> None:
    engine = Engine(lab, kv_memory="1 MB", block_size=8, policy="lfu")
    made = hand_over(engine, "sglang")
    assert made.complete and made.settings["--radix-eviction-policy"] == "lfu"
    assert made.settings["--max-total-tokens"] == 8 * engine.pool.blocks and made.settings["--page-size"] == 8
    assert hand_over(Engine(lab, kv_memory="1 MB", prefix_caching=False), "sglang").settings["--disable-radix-cache"] is True
    with pytest.raises(ValueError, match="to='ollama' is not one of vllm, sglang"):
        hand_over(engine, "ollama")
