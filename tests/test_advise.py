"""Advice: what binds is arithmetic that can be done by hand, nothing is ranked by a small model, and what nothing meets is said; exports name what is missing."""

import pytest

from kvlab import Strategy, geometry, keep, place, store
from kvlab.advise import WORKLOADS, Limits, advise
from kvlab.export import ENGINES, export

MODEL, CARD = "Llama-3.1-8B", "A10 24GB"


def test_capacity_by_hand():
    """4 x 32,768 tokens of 131,072 bytes are 17.2 GB beside 16.1 GB of weights, in nine tenths of 24 GB."""
    made = advise(MODEL, CARD, 32768, 4)
    (capacity,) = made.constraints
    cache = 4 * 32768 * 2 * 32 * 8 * 128 * 2
    weights = geometry.weight_bytes(geometry.find(MODEL))
    assert capacity.name == "capacity" and capacity.binds and capacity.limit == int(24e9 * 0.9)
    assert capacity.need == pytest.approx(cache + weights, rel=0.01)
    assert made.share == pytest.approx(cache / (cache + weights), rel=0.07)  # an embedding table is not read


def test_the_step_is_bytes_over_bandwidth():
    made = advise(MODEL, CARD, 32768, 1)
    full = next(option for option in made.options if option.strategy == Strategy())
    read = 32768 * 131072 + geometry.weight_bytes(geometry.find(MODEL)) - 128256 * 4096 * 2
    assert full.meets and made.options[0] is full and full.bound == "memory"
    assert full.step == pytest.approx(read / 600e9, rel=0.01)
    int4 = next(option for option in made.options if option.strategy == Strategy(store=store.Int(bits=4)))
    assert int4.step < full.step and int4.most > 3 * full.most
    away = next(option for option in made.options if option.strategy == Strategy(place=place.Offload(to="cpu")))
    assert away.bound == "link" and away.bytes == pytest.approx(full.bytes * 3 / 32, rel=0.01)
    assert away.step == pytest.approx(32768 * 131072 / 31.5e9, rel=0.05)


def test_the_order_is_quantize_then_evict_then_offload():
    stages = [option.stage for option in advise(MODEL, CARD, 32768, 4).options if option.meets]
    assert stages == sorted(stages) and set(stages) == {1, 2, 3, 4}
    quantized = [option.bytes for option in advise(MODEL, CARD, 32768, 2).options if option.meets and option.stage == 1]
    assert quantized == sorted(quantized, reverse=True)  # the mildest first


def test_what_was_measured_on_a_small_model_ranks_nothing():
    made = advise(MODEL, CARD, 8192)
    measured = [one for option in made.options for one in option.quality if not one.claim]
    assert measured and {one.model for one in measured} == {"smollm2-135m"}
    assert any("not used to rank anything for Llama-3.1-8B" in note for note in made.notes)
    assert all(option.danger in str(made) for option in made.options)


def test_limits_that_nothing_meets_are_said_by_how_much():
    made = advise(MODEL, CARD, 8192, limits=Limits(per_token=1e-3))
    assert made.best is None and made.constraint.name == "bandwidth" and made.constraint.ratio > 20
    assert "nothing meets the limits; nearest is" in str(made) and "allowed 1.0 ms" in made.nearest.fails[-1]
    slow = advise(MODEL, CARD, 32768, limits=Limits(first_token=0.01))
    assert slow.best is None and "no cache strategy changes that" in slow.nearest.fails[-1]
    assert any("weights and activations alone" in note for note in advise("Llama-3.1-70B", CARD, 8192).notes)


def test_a_memory_of_ones_own():
    made = advise(MODEL, CARD, 8192, limits=Limits(memory=17_000_000_000))
    assert made.constraint.limit == 17e9 and made.constraint.binds
    assert made.best is not None and made.best.bytes < 600e6


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Llama-3.1-70B", "GPT-2"])
def test_every_workload_and_model(model, workload):
    context = min(8192, geometry.find(model).context or 8192)
    made = advise(model, "H100 SXM 80GB", context, 2, workload, devices=4)
    assert made.best is not None and str(made).count("\n") > 10
    assert ("prefix caching" in str(made)) == (workload == "multi-turn")


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(model="Llama-9"), "Llama"),
        (dict(device="H1000"), "H100 SXM 80GB"),
        (dict(context=0), "context=0 is out of range"),
        (dict(context=10**7), "is beyond what Llama-3.1-8B was trained for"),
        (dict(concurrency=0), "concurrency=0"),
        (dict(workload="dreams"), "workload='dreams' is not one of chat"),
        (dict(device="PCIe 5.0 x16"), "is a link"),
    ],
)
def test_what_cannot_be_asked(given, message):
    asked = dict(model=MODEL, device=CARD, context=8192) | given
    with pytest.raises(ValueError, match=message):
        advise(**asked)
    with pytest.raises(ValueError, match="per_token=0 must be above 0"):
        Limits(per_token=0)


# exports


@pytest.mark.parametrize("engine", ENGINES)
def test_the_full_cache_needs_nothing(engine):
    made = export(Strategy(), engine)
    assert made.complete and not made.notes and made.version in str(made) and made.source in str(made)
    assert engine == "transformers" or not made.settings


def test_by_the_engines_own_names():
    assert export(Strategy(store=store.Fp8()), "vllm").settings == {"--kv-cache-dtype": "fp8_e4m3"}
    assert export(Strategy(store=store.Fp8(format="e5m2"), chunk=512), "sglang").text == (
        "python3 -m sglang.launch_server --model-path MODEL --kv-cache-dtype fp8_e5m2 --chunked-prefill-size 512"
    )
    window = Strategy(keep.Window(size=1000, sinks=4))
    assert export(window, "tensorrt-llm").settings == {
        "max_attention_window": [1004],
        "sink_token_length": 4,
        "enable_block_reuse": False,
    }
    assert export(window, "llama.cpp").text == "llama-server -m MODEL.gguf --ctx-size 1004 --keep 4 --context-shift"
    assert "--cache-type-k q4_1" in export(Strategy(store=store.Int(bits=4)), "llama.cpp").text
    assert "--cache-type-k q4_0" in export(Strategy(store=store.Int(bits=4, symmetric=True)), "llama.cpp").text
    assert export(Strategy(place=place.Offload(to="cpu")), "vllm").settings["--kv-offloading-backend"] == "native"


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_missing_is_said_and_what_is_near(engine):
    odd = Strategy(keep.HeavyHitter(budget=256), store.PreRope(store.Int(bits=3)))
    made = export(odd, engine)
    assert not made.complete and "HeavyHitter" in str(made) and "PreRope" in str(made) and "nearest" in str(made)


def test_transformers_code_runs(llama):
    """The line that is exported makes the cache it names."""
    from transformers import DynamicCache

    made = export(Strategy(), "transformers")
    names = {"DynamicCache": DynamicCache, "model": llama}
    exec(made.text.splitlines()[0], names)
    assert isinstance(names["cache"], DynamicCache)
    offloaded = export(Strategy(place=place.Offload(to="cpu")), "transformers")
    assert "offloading=True" in offloaded.text and offloaded.complete
    assert not export(Strategy(place=place.Offload(to="disk")), "transformers").complete


def test_an_engine_that_is_not_known():
    with pytest.raises(ValueError, match="engine='triton' is not one of transformers, vllm"):
        export(Strategy(), "triton")
