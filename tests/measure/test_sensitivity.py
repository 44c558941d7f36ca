"""Sensitivity by layer, and the profile made of it."""

import pytest
import torch

from kvlab import Strategy, store
from kvlab.lab import Lab
from kvlab.measure import Sensitivity, control, profile, quality, sensitivity
from tests.conftest import make_llama
from tests.measure.test_measure import Words


def test_the_profile_gives_bits_to_what_suffers_most():
    found = [Sensitivity(0, 0.5, 0.1), Sensitivity(1, 0.05, 0.3), Sensitivity(2, 0.01, 0.02), Sensitivity(3, 0.01, 0.02)]
    # three of eight sides: layer 0's keys, layer 1's values, layer 0's values
    assert profile(found, mean=2.75) == "0=4/4, 1=2/4, 2-3=2/2"
    assert profile(found, mean=2) == "0-3=2/2" and profile(found, mean=4) == "0-3=4/4"
    assert store.Mixed(layers=profile(found, mean=2.75)).profile() == {0: (4, 4), 1: (2, 4), 2: (2, 2), 3: (2, 2)}
    for bad in ({"mean": 5}, {"mean": 3, "low": 5}, {"mean": 4, "low": 4, "high": 4}):
        with pytest.raises(ValueError, match="low="):
            profile(found, **bad)


def test_a_layer_whose_keys_count_most_is_found():
    model = make_llama(seed=2, head_dim=16)
    with torch.no_grad():  # layer 1 sends nothing on: its keys and values cannot matter
        model.model.layers[1].self_attn.o_proj.weight.zero_()
    lab = Lab("tiny", model, Words())
    text = " ".join(str(3 + (7 * i * i) % 90) for i in range(80))
    own = store.Mixed(group_size=16)
    found = sensitivity(lab, store=own, text=text, protocol=(48, 24, 8))
    assert [x.layer for x in found] == [0, 1, 2]
    assert found[1].keys == pytest.approx(found[1].values, abs=1e-6)  # what is left is the eight bits of the others
    assert min(found[0].keys, found[0].values, found[2].keys, found[2].values) > 3 * found[1].keys
    against = control(lab, lab.encode(text)[:, :72], prefill=48, step=8)
    same = quality(lab, Strategy(store=store.Mixed(bits=8, value_bits=8, group_size=16, layers="2=2/8")), against).mean_kl
    assert found[2].keys == pytest.approx(same, rel=1e-6)


def test_wrong_arguments_are_named():
    lab = Lab("tiny", make_llama(), Words())
    with pytest.raises(ValueError, match="bits=5"):
        sensitivity(lab, bits=5)
    with pytest.raises(ValueError, match="the text has 3 tokens"):
        sensitivity(lab, text="4 5 6")
