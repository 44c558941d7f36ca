import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlab_kernels import reference
from kvlab_kernels.layout import Codes, dequantize, unpack
from kvlab_kernels.quantize import quantize
from kvlab_kernels.reference import quantize_torch

BOTH = pytest.mark.parametrize("run", [quantize, quantize_torch], ids=["triton", "torch"])


@BOTH
def test_by_hand(run):
    """0 1 2 3 in two bits: zero 0, scale 1, codes 0 1 2 3 in planes of one byte: 0b11100100."""
    got = run(torch.tensor([0.0, 1.0, 2.0, 3.0]).view(1, 1, 1, 4), 2, "token", 4)
    assert (got.codes.item(), got.scale.item(), got.zero.item()) == (0b11100100, 1.0, 0.0)


@BOTH
def test_planes(run):
    """Eight channels at four bits: byte j holds channel j below and channel j + 4 above."""
    got = run(torch.arange(8.0).view(1, 1, 1, 8) * 2 + 1, 4, "token", 8)
    scale = torch.tensor(14 / 15, dtype=torch.float16).item()
    codes = [round(2 * i / scale) for i in range(8)]
    assert got.codes.flatten().tolist() == [low | high << 4 for low, high in zip(codes[:4], codes[4:])]


@BOTH
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_constant_groups(run, axis):
    """No range: scale 0, codes 0, no NaN; also where rounding the zero to float16 leaves a difference of almost 8."""
    got = run(torch.full((1, 2, 16, 16), 40007.7), 4, axis, 16)
    assert not got.scale.any() and not got.codes.any() and (got.zero == 40000).all()


@BOTH
def test_half_to_even(run):
    x = torch.tensor([0.0, 0.5, 1.5, 2.5, 3.5, 255.0, 254.5, 253.5]).view(1, 1, 1, 8)
    assert run(x, 8, "token", 8).codes.flatten().tolist() == [0, 0, 2, 2, 4, 255, 254, 254]


@BOTH
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_error_is_half_a_step(run, axis, bits):
    x = torch.randn(2, 2, 64, 32) * torch.logspace(-1, 1, 32)
    got = run(x, bits, axis, 32, torch.float32)
    step = got.scale.repeat_interleave(32, 2 if axis == "channel" else 3)
    assert ((dequantize(got) - x).abs() <= step * 0.5001 + 1e-6).all()


@st.composite
def inputs(draw):
    axis = draw(st.sampled_from(["channel", "token"]))
    dim = draw(st.sampled_from([16, 40, 64, 80, 96, 128]))
    size = draw(
        st.sampled_from([1, 5, 16, 32, 48])
        if axis == "channel"
        else st.sampled_from([s for s in (8, 16, 20, 32, 40, 64) if dim % s == 0])
    )
    tokens = draw(st.integers(1, 3)) * size if axis == "channel" else draw(st.integers(1, 40))
    return dict(axis=axis, dim=dim, size=size, tokens=tokens, bits=draw(st.sampled_from([8, 4, 2])),
                dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
                scale=draw(st.sampled_from([torch.float16, torch.float32])))  # fmt: skip


@settings(max_examples=14, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(inputs())
def test_triton_equals_torch(case):
    """Bit for bit, into views of a poisoned cache whose neighbours stay as they were."""
    x = (torch.randn(1, case["tokens"], 2, case["dim"]) * torch.logspace(-4, 3, case["dim"])).to(case["dtype"]).transpose(1, 2)
    axis, size, bits = case["axis"], case["size"], case["bits"]
    want = quantize_torch(x, bits, axis, size, case["scale"])
    storage = torch.full((1, 2, case["tokens"] + 6, want.codes.shape[3]), 77, dtype=torch.uint8)
    scales = [torch.full((1, 2, want.scale.shape[2] + 4, want.scale.shape[3]), torch.nan, dtype=case["scale"]) for _ in range(2)]
    out = Codes(storage[:, :, 2:-4], scales[0][:, :, 1:-3], scales[1][:, :, 1:-3], bits, axis, size)
    got = quantize(x, bits, axis, size, case["scale"], out=out)
    assert got is out
    for name in ("codes", "scale", "zero"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert (storage[:, :, :2] == 77).all() and (storage[:, :, -4:] == 77).all()
    assert all(s[:, :, :1].isnan().all() and s[:, :, -3:].isnan().all() for s in scales)


def test_torch_in_pieces(monkeypatch):
    """Small pieces give the same codes as one."""
    x = torch.randn(2, 2, 96, 32)
    for axis in ("channel", "token"):
        whole = quantize_torch(x, 4, axis, 16)
        with monkeypatch.context() as patch:
            patch.setattr(reference, "PIECE", 1)
            pieces = quantize_torch(x, 4, axis, 16)
        assert (
            torch.equal(whole.codes, pieces.codes)
            and torch.equal(whole.scale, pieces.scale)
            and torch.equal(whole.zero, pieces.zero)
        )


@BOTH
def test_saturates(run):
    """Beyond float16 the scale and the zero stop at its largest number instead of becoming infinite."""
    got = run(torch.tensor([-1e6, 1e9]).repeat(8).view(1, 1, 1, 16), 8, "token", 16)
    assert got.zero.item() == -65504 and got.scale.item() == 65504 and unpack(got.codes, 8)[..., 1].item() == 255


@BOTH
@pytest.mark.parametrize(
    "arguments, message",
    [
        ((torch.zeros(1, 1, 6, 8), 3, "token", 8), "bits=3 must be one of"),
        ((torch.zeros(1, 1, 6, 8), 4, "row", 8), "axis='row'"),
        ((torch.zeros(1, 1, 6, 8), 4, "channel", 4), "group_size=4 must be at least 1 and divide the tokens, 6"),
        ((torch.zeros(1, 1, 6, 8), 4, "token", 3), "divide the head dim, 8"),
        ((torch.zeros(1, 1, 6, 6), 2, "token", 3), "head dim 6 cannot be packed at 2 bits"),
        ((torch.zeros(1, 6, 8), 4, "token", 8), "x is torch.float32"),
        ((torch.zeros(1, 1, 6, 8), 4, "token", 8, torch.bfloat16), "scale_dtype=torch.bfloat16"),
        (
            (torch.zeros(1, 1, 6, 8), 4, "token", 8, torch.float16, quantize_torch(torch.zeros(1, 1, 5, 8), 4, "token", 8)),
            "out has",
        ),
    ],
)
def test_refuses(run, arguments, message):
    with pytest.raises(ValueError, match=message):
        run(*arguments)
