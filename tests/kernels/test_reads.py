"""What programs read, noted by the interpreter: by hand for a kernel whose reads are known, and each byte once for the fused one."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

pytest.importorskip("plotly")

from kvlab.measure.kernels import places, reads, recorded
from kvlab.plots import kernels as plots
from kvlab_kernels.decode import decode_attention
from kvlab_kernels.quantize import quantize


@triton.jit
def halves(x, out, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    first = tl.load(x + tl.arange(0, 1))
    tl.store(out + i, tl.load(x + i, mask=i != 3, other=0.0) + first)


def test_by_hand():
    x, out = torch.arange(12.0).view(3, 4), torch.empty(8)
    made = reads(lambda: halves[(2,)](x, out, N=4), x)
    assert made.programs == ((0, 0, 0), (1, 0, 0)) and made.row == 16
    want = np.zeros((2, 48), int)
    want[0, :12] += 1  # numbers 0 to 2; 3 is masked
    want[1, 16:32] += 1
    assert np.array_equal(made.counts[:, 4:], want[:, 4:])  # number 0 is read by both, unmasked
    picture = made.rows()
    assert picture.shape == (3, 16) and (picture[0, 12:] == -1).all() and (picture[1] == 1).all() and (picture[2] == -1).all()


def test_the_fused_kernel_reads_each_byte_once():
    k = quantize(torch.randn(1, 2, 128, 64), 4, "channel", 64)
    v = quantize(torch.randn(1, 2, 128, 64), 4, "token", 64)
    for side in (k.codes, v.codes):
        made = reads(lambda: decode_attention(torch.randn(1, 8, 1, 64), k, v, scaling=0.1, splits=2), side)
        assert (made.counts.sum(0) == 1).all() and len(made.programs) == 4  # two heads, two splits; four query heads share a load
        assert plots.reads_summary(made) == "4 programs read 8,192 of 8,192 bytes, each byte once."
        fig = plots.reads(made)
        assert fig.data[0].z.shape == (256, 32) and len(fig.data) == 5
        assert {int(z) for z in fig.data[0].z.reshape(-1)} == {2, 3, 4, 5}


def test_nothing_stays_behind():
    from triton.runtime import interpreter

    with pytest.raises(ZeroDivisionError):
        reads(lambda: 1 / 0, torch.zeros(1))
    assert "create_masked_load" not in vars(interpreter.interpreter_builder)
    none = reads(lambda: None, torch.zeros(2, 4))
    assert none.programs == () and (none.rows() == -1).all() and plots.reads_summary(none).startswith("0 programs read 0 of 32")


def test_what_was_recorded():
    run = recorded()
    assert run["device"] == "NVIDIA H200" and {row["name"] for row in run["benchmark"]} >= {"dense", "int8", "int4", "int2"}
    for name in ("none.json", "../../models.json", ""):
        with pytest.raises(ValueError, match="2026-11-29-h200.json"):
            recorded(name)


def test_a_place_on_the_roofline_by_hand():
    """8 query rows x 32 heads x 1,000 tokens x 128 numbers x 4 products in 1 ms, 1 MB read."""
    run = {
        "benchmark": [
            {"name": "int8", "model": "Llama-3.1-8B", "batch": 8, "context": 1000, "ms": 1.0, "bytes": 1_000_000},
            {"name": "int4", "failed": "no"},
        ]
    }
    (point,) = places(run)
    assert point.intensity == pytest.approx(131.072) and point.speed == pytest.approx(131.072e9)
    assert point.share(1e9, 1e15) == pytest.approx(1.0)  # memory allows 131 x 10**9 products a second
    assert point.share(1e12, 262.144e9) == pytest.approx(0.5)  # and here the tensor cores half of that
    assert plots.roofline_summary([point], 1e9, 1e15) == "All are bound by memory. Nearest the roof: int8 100%."
    assert plots.roofline_summary([point], 1e12, 262.144e9).startswith("0 of 1 are bound by memory")
    assert len(plots.roofline([point], 1e9, 1e15).data) == 2
