"""The compiled products against float64, at every kind of reading."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvlab_kernels import cpu
from kvlab_kernels.layout import FLOATS, Codes, dequantize, pack, unpack

pytest.importorskip("llvmlite")

OTHERS = [(3, "channel", False, True), (3, "channel", True, False), (3, "token", False, True)]
KINDS = OTHERS + [
    (bits, axis, table, half)
    for bits in (8, 4, 2)
    for axis, table in (("channel", False), ("channel", True), ("token", False))
    for half in (True, False)
]
SHAPES = [(1, 8, 4, 256, 128, 64), (2, 3, 3, 131, 64, 32), (1, 1, 1, 5, 8, 8), (2, 2, 16, 72, 24, 8), (1, 3, 7, 321, 64, 64)]
# every kind at three of the shapes, every shape at most kinds: each pair is a function to compile
PAIRS = [(kind, SHAPES[(number + step) % len(SHAPES)]) for number, kind in enumerate(KINDS) for step in range(3)]


def codes(b: int, h: int, n: int, d: int, bits: int, axis: str, group: int, table: bool = False, half: bool = True) -> Codes:
    rows = -(-n // group)
    shape = (b, h, rows, d) if axis == "channel" else (b, h, n, d // group)
    scale, zero = torch.rand(shape) * 0.1, torch.randn(shape)
    number = torch.float16 if half else torch.float32
    packed = pack(torch.randint(0, 2**bits, (b, h, n, d), dtype=torch.uint8), bits)
    lookup = torch.randint(0, rows, (b, h, n), dtype=torch.int32) if table else None
    return Codes(packed, scale.to(number), zero.to(number), bits, axis, group, lookup)


def check(query: torch.Tensor, weights: torch.Tensor, x: Codes | torch.Tensor) -> None:
    plain = (dequantize(x) if isinstance(x, Codes) else x).double()
    exact = query.double() @ plain.mT
    torch.testing.assert_close(cpu.score(query, x).double(), exact, rtol=2e-5, atol=2e-6 * float(exact.abs().max()))
    if not isinstance(x, Codes) or x.axis == "token":
        exact = weights.double() @ plain
        torch.testing.assert_close(cpu.mix(weights, x).double(), exact, rtol=2e-5, atol=2e-6 * float(exact.abs().max()))


@pytest.mark.parametrize(("kind", "shape"), PAIRS, ids=str)
def test_codes(kind: tuple, shape: tuple) -> None:
    torch.manual_seed(0)
    bits, axis, table, half = kind
    b, h, m, n, d, group = shape
    if axis == "token":
        group = min(group, d)
    check(torch.randn(b, h, m, d), torch.randn(b, h, m, n), codes(b, h, n, d, bits, axis, group, table, half))


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize(("axis", "table"), [("channel", False), ("channel", True), ("token", False)])
def test_symmetric_codes(bits: int, axis: str, table: bool, shape: tuple) -> None:
    torch.manual_seed(0)
    b, h, m, n, d, group = shape
    x = codes(b, h, n, d, bits, axis, min(group, d) if axis == "token" else group, table)
    check(torch.randn(b, h, m, d), torch.randn(b, h, m, n), dataclasses.replace(x, zero=None))


def turned(x: torch.Tensor, places: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Pairs of halves as complex numbers times e^(i place frequency), float64."""
    half = len(frequencies)
    pairs = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double())
    angle = places[..., None].double() * frequencies.double()
    pairs = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag, x[..., 2 * half :].double()], -1)


@pytest.mark.parametrize("part", [1.0, 0.5], ids=["all channels", "half of them"])
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("kind", ["float32", "float16", "channel", "table", "token", "symmetric", "normal", "e4m3"])
def test_keys_turned_by_their_place(kind: str, placed: bool, part: float) -> None:
    torch.manual_seed(0)
    b, h, m, n, d = 2, 3, 5, 70, 32
    if kind in ("float32", "float16"):
        x: torch.Tensor | Codes = torch.randn(b, h, n, d).to(getattr(torch, kind))
    elif kind == "e4m3":
        raw = torch.randn(b, h, n, d).to(FLOATS["e4m3"]).view(torch.uint8)
        x = Codes(raw, (torch.rand(b, h, n, 1) + 0.1).half(), None, 8, "token", d, None, "e4m3")
    else:
        x = codes(b, h, n, d, 3, "token" if kind == "token" else "channel", 16, kind == "table")
        if kind == "symmetric":
            x = dataclasses.replace(x, zero=None)
        if kind == "normal":
            x = dataclasses.replace(x, format="normal")
    plain = dequantize(x) if isinstance(x, Codes) else x
    half = int(d * part) // 2
    frequencies = 100.0 ** -(torch.arange(half) / half)
    angle = torch.arange(400)[:, None] * frequencies
    waves = torch.cat([angle.cos(), angle.sin()], 1)
    if placed:
        columns = torch.stack([torch.randperm(400)[:n].sort().values for _ in range(b * h)]).view(b, h, n)
        places = cpu.Places(waves, columns.int())
    else:
        columns, places = torch.arange(37, 37 + n).expand(b, h, n), cpu.Places(waves, None, 37)
    query = torch.randn(b, h, m, d)
    exact = query.double() @ turned(plain, columns, frequencies).mT
    torch.testing.assert_close(cpu.score(query, x, places).double(), exact, rtol=2e-5, atol=2e-5 * float(exact.abs().max()))


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize(("axis", "table"), [("channel", False), ("channel", True), ("token", False)])
def test_levels_of_a_normal_number(bits: int, axis: str, table: bool, zeros: bool) -> None:
    torch.manual_seed(0)
    b, h, m, n, d, group = SHAPES[1]
    x = codes(b, h, n, d, bits, axis, min(group, d) if axis == "token" else group, table)
    x = dataclasses.replace(x, format="normal", zero=x.zero if zeros else None)
    check(torch.randn(b, h, m, d), torch.randn(b, h, m, n), x)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_small_floats(form: str, shape: tuple) -> None:
    """Every byte that is a finite number, subnormals and both zeros among them."""
    torch.manual_seed(0)
    b, h, m, n, d, _ = shape
    every = torch.arange(256, dtype=torch.uint8)
    finite = every[every.view(FLOATS[form]).float().isfinite()]
    raw = finite[torch.arange(b * h * n * d) % len(finite)].view(b, h, n, d)
    scale = torch.rand(b, h, n, 1) + 0.1
    check(torch.randn(b, h, m, d), torch.randn(b, h, m, n), Codes(raw, scale.half(), None, 8, "token", d, None, form))


def test_three_bits_fill_their_bytes() -> None:
    """Bit by bit: channel j's lower bits lie in byte j % (D/4), two bits a field; its third bit in the bytes behind them, one bit a field."""
    values = torch.randint(0, 8, (5, 32), dtype=torch.uint8)
    packed = pack(values, 3)
    assert packed.shape == (5, 12)
    for row in range(5):
        for j in range(32):
            low = int(packed[row, j % 8]) >> (2 * (j // 8)) & 3
            high = int(packed[row, 8 + j % 4]) >> (j // 4) & 1
            assert low | high << 2 == int(values[row, j])
    assert torch.equal(unpack(packed, 3), values)
    with pytest.raises(ValueError, match="multiple of 8"):
        pack(values[:, :12], 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plain_numbers(dtype: torch.dtype, shape: tuple) -> None:
    torch.manual_seed(0)
    b, h, m, n, d, _ = shape
    check(torch.randn(b, h, m, d), torch.randn(b, h, m, n), torch.randn(b, h, n, d).to(dtype))


def test_views_of_the_rows_in_use_are_read_where_they_lie() -> None:
    torch.manual_seed(0)
    room = torch.randn(2, 3, 40, 16)
    some = room[:, :, 5:31]
    assert cpu._rows(some).data_ptr() == some.data_ptr()
    wide = torch.randn(2, 3, 4, 40)
    check(torch.randn(2, 3, 4, 16), wide[..., 5:31], some)
    turned = torch.randn(2, 3, 16, 26).mT  # strides that no row reading fits: copied
    check(torch.randn(2, 3, 4, 16), torch.randn(2, 3, 4, 26), turned)


def test_the_number_of_threads_changes_no_bit() -> None:
    torch.manual_seed(0)
    x = codes(1, 3, 4096, 64, 4, "token", 32)
    query, weights = torch.randn(1, 3, 3, 64), torch.randn(1, 3, 3, 4096)
    before = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append((cpu.score(query, x), cpu.mix(weights, x)))
    finally:
        torch.set_num_threads(before)
    for score, mix in found[1:]:
        assert torch.equal(score, found[0][0]) and torch.equal(mix, found[0][1])


def test_nan_and_infinity_come_out_again() -> None:
    keys = torch.randn(1, 1, 9, 8)
    keys[0, 0, 3, 2] = float("nan")
    keys[0, 0, 5, 1] = float("inf")
    out = cpu.score(torch.ones(1, 1, 2, 8), keys)
    assert out[0, 0, :, 3].isnan().all() and out[0, 0, :, 5].isinf().all() and out.isfinite().sum() == 14
    assert cpu.mix(torch.ones(1, 1, 2, 9), keys)[0, 0, :, 2].isnan().all()


def test_no_tokens() -> None:
    none = torch.empty(1, 2, 0, 8)
    assert cpu.score(torch.ones(1, 2, 3, 8), none).shape == (1, 2, 3, 0)
    assert cpu.mix(torch.empty(1, 2, 3, 0), none).equal(torch.zeros(1, 2, 3, 8))


def test_what_does_not_fit_is_refused() -> None:
    keys = torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match="1 to 16"):
        cpu.score(torch.randn(1, 2, 17, 8), keys)
    with pytest.raises(ValueError, match="does not fit keys"):
        cpu.score(torch.randn(1, 3, 4, 8), keys)
    with pytest.raises(ValueError, match="do not fit values"):
        cpu.mix(torch.randn(1, 2, 4, 6), keys)
    with pytest.raises(ValueError, match="per token"):
        cpu.mix(torch.randn(1, 2, 4, 64), codes(1, 2, 64, 8, 8, "channel", 8))
    assert not cpu.serves(torch.randn(1, 2, 17, 8), keys) and not cpu.serves(torch.randn(1, 2, 4, 9), torch.randn(1, 2, 5, 9))
