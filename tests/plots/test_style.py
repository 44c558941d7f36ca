"""Colours that everybody can tell apart: by WCAG's contrast, and as people with each kind of colour blindness see them."""

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from kvlab.plots import attention, style

HUES = {
    name: getattr(style, name) for name in ("KEEP", "STORE", "PLACE", "FULL", "DANGER", "WEIGHTS", "ACTIVATIONS", "STATE", "SKY")
}
PAPER = {"light": "#ffffff", "dark": "#212121"}  # JupyterLab's

# Machado, Oliveira and Fernandes (2009), the whole loss of one kind of cone, on linear RGB
SEEN = {
    "all": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
}
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])
WHITE = np.array([0.95047, 1.0, 1.08883])


def linear(hue: str) -> NDArray[np.float64]:
    """sRGB "#rrggbb" -> linear RGB, 0 to 1."""
    value = np.array([int(hue[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.asarray(np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4))


def cielab(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    """Linear RGB -> L*, a*, b* (D65)."""
    xyz = XYZ @ rgb.clip(0, 1) / WHITE
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one: str, other: str) -> float:
    """WCAG 2.1's, 1 to 21."""
    dark, light = sorted(float(XYZ[1] @ linear(hue)) for hue in (one, other))
    return (light + 0.05) / (dark + 0.05)


def test_the_measures() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)  # the palest grey that WCAG allows for text
    assert cielab(linear("#ffffff")) == pytest.approx([100, 0, 0], abs=0.01)
    assert cielab(linear("#ff0000")) == pytest.approx([53.24, 80.09, 67.20], abs=0.02)


@pytest.mark.parametrize("eyes", SEEN)
def test_hues_are_told_apart(eyes: str) -> None:
    """2.3 is a difference that is just seen; side by side, 12 is plain."""
    seen = {name: cielab(SEEN[eyes] @ linear(hue)) for name, hue in HUES.items()}
    close = {
        (one, other): float(np.linalg.norm(seen[one] - seen[other]))
        for one, other in itertools.combinations(seen, 2)
        if np.linalg.norm(seen[one] - seen[other]) < 12
    }
    assert close == {}


def test_hues_stand_out_from_the_page() -> None:
    """3:1, WCAG's least for what is drawn; the pale ones fill areas, or are named in words beside them."""
    pale = {page: {name for name, hue in HUES.items() if contrast(hue, paper) < 3} for page, paper in PAPER.items()}
    assert pale == {"light": {"STORE", "WEIGHTS", "SKY"}, "dark": {"STATE"}}  # STATE is outlined in white there


@pytest.mark.parametrize("colours", [attention.BLUES, attention.ORANGES], ids=["blues", "oranges"])
@pytest.mark.parametrize("eyes", SEEN)
def test_scales_darken_step_by_step(eyes: str, colours: list[str]) -> None:
    """More is darker, for everybody, and in grey print."""
    light = [float(cielab(SEEN[eyes] @ linear(hue))[0]) for hue in colours]
    assert all(before - after > 8 for before, after in itertools.pairwise(light)), light


@pytest.mark.parametrize("eyes", SEEN)
def test_good_and_bad_of_a_score_are_told_apart(eyes: str) -> None:
    """The one scale with two ends: vermilion to blue, which no kind of colour blindness confuses."""
    bad, good = (cielab(SEEN[eyes] @ linear(hue)) for hue in (style.DANGER, style.KEEP))
    assert np.linalg.norm(bad - good) > 40
