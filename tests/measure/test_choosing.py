"""What a choice rests on: the roofline of a step by hand, a recipe layer by layer, claims beside rows."""

import pytest
import torch

from kvlab import Strategy, geometry, hardware, keep, place, store
from kvlab.measure import control, quality
from kvlab.measure.claims import claims, frame
from kvlab.measure.device import device_memory
from kvlab.measure.experiment import Evidence
from kvlab.measure.named import named
from kvlab.measure.recipe import recipe
from kvlab.measure.roofline import decode, prefill, weights

MODEL, CARD = geometry.find("Llama-3.1-8B"), hardware.find("A10 24GB")


def test_a_decode_step_by_hand() -> None:
    """8.03 billion parameters but the embedding table, in 2 bytes; 131,072 bytes of cache a token; 2 FLOP a weight, 4 a query head, dim and token."""
    made = decode(MODEL, CARD, Strategy(), 8192, requests=4)
    read = weights(MODEL, 4)
    assert read == (geometry.weight_bytes(MODEL) // 2 - 128256 * 4096) * 2
    assert made.bytes == read + 4 * 8192 * 131072
    assert made.flops == pytest.approx(4 * (read + 4 * 32 * 32 * 128 * 8192), rel=1e-6)
    assert made.intensity == made.flops / made.bytes < 10 and made.bound == "memory"
    assert made.seconds == made.bytes / CARD.bandwidth and made.rate == made.flops / made.seconds


def test_strategies_move_the_point() -> None:
    full = decode(MODEL, CARD, Strategy(), 32768, requests=2)
    int4 = decode(MODEL, CARD, Strategy(store=store.Int(bits=4)), 32768, requests=2)
    window = decode(MODEL, CARD, Strategy(keep=keep.Window(size=1020)), 32768, requests=2)
    quest = decode(MODEL, CARD, Strategy(keep=keep.Quest(budget=0.25)), 32768, requests=2)
    away = decode(MODEL, CARD, Strategy(place=place.Offload(to="cpu")), 32768, requests=2)
    assert int4.flops == full.flops and int4.bytes < full.bytes  # fewer bytes for the same sums: to the right
    assert window.flops < full.flops and window.bytes < full.bytes
    cache = 2 * 32768 * 131072
    assert full.bytes - quest.bytes == pytest.approx(0.75 * cache, rel=0.1)
    assert away.bound == "link" and away.moved == cache and away.seconds > full.seconds


def test_a_prompt_is_bound_by_computing() -> None:
    made = prefill(MODEL, CARD, 8192)
    assert made.bound == "compute" and made.intensity > 100
    assert made.flops == pytest.approx(2 * MODEL.active_parameters * 8192 + 32 * 2 * 32 * 128 * 2 * 8192**2 / 2, rel=0.01)
    with pytest.raises(ValueError, match="does not compute"):
        prefill(MODEL, hardware.find("PCIe 4.0 x16"), 8192)


def test_a_recipe_is_its_layers(tiny_lab) -> None:
    ids = torch.randint(3, 97, (1, 120), generator=torch.Generator().manual_seed(0))
    against = control(tiny_lab, ids, prefill=80, step=8)
    int8 = store.Int(bits=8, group_size=16)
    layers = {
        "8 bits": Strategy(store=int8),
        "half": Strategy(keep.HeavyHitter(budget=60, recent=16), int8),
        "on disk": Strategy(keep.HeavyHitter(budget=60, recent=16), int8, place.Offload()),
    }
    full, bits, half, disk = recipe(tiny_lab, layers, against, steps=2)
    assert (full.kl, full.agreement, full.device) == (0.0, 1.0, full.bytes)
    want = quality(tiny_lab, layers["8 bits"], against)
    assert bits.kl == pytest.approx(want.mean_kl, abs=1e-6) and bits.bytes == want.memory.allocated
    assert disk.bytes <= half.bytes and disk.device < half.device < bits.device < full.device
    assert disk.kl == pytest.approx(half.kl, abs=1e-6) and all(step.per_token > 0 for step in (full, bits, half, disk))
    with pytest.raises(ValueError, match="no layer"):
        recipe(tiny_lab, {}, against)
    with pytest.raises(ValueError, match="steps=0"):
        recipe(tiny_lab, layers, against, steps=0)


def test_claims_stand_beside_what_was_measured() -> None:
    found = claims()
    assert len(found) == 10 and {one.strategy for one in found} <= set(named())
    assert all(one.model == "smollm2-135m" and "of 16-bit" in one.measured for one in found)
    h2o = named()["H2O"]
    rows = [
        Evidence(
            str(h2o),
            h2o.to_dict(),
            {"task": "Text"},
            "tiny",
            0.9,
            1.0,
            True,
            ratio=0.2,
            more={"kl": 0.25, "perplexity_change": 0.5},
        ),
        Evidence(str(h2o), h2o.to_dict(), {"task": "TwoKeys"}, "tiny", 0.25, 1.0, True, questions=4),
        Evidence(str(h2o), h2o.to_dict(), {"task": "Correction"}, "tiny", 0.5, 0.2, False, questions=2),  # says nothing
    ]
    by = {one.strategy: one for one in claims(rows)}
    assert by["H2O"].recall == (1, 4) and by["H2O"].measured == "20% of 16-bit, perplexity +50.0%, KL 0.250, 1 of 4 pass keys"
    assert by["SnapKV"].measured == "not measured"
    assert list(frame(found).columns)[-1] == "measured"


def test_a_processor_has_no_gpu_memory() -> None:
    assert device_memory("cpu") is None
