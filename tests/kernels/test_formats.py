"""Decode attention over every format a store writes, over keys from before RoPE, and over pages."""

import pytest
import torch
from kernel_oracle import attention, check, error, random_codes, unpaged, values
from kernel_oracle import mass as expected_mass

from kvlab_kernels import launch
from kvlab_kernels.decode import decode_attention, paged_decode_attention, scored_decode_attention
from kvlab_kernels.layout import Codes, Places, dequantize

SMALL = launch.Settings(block_n=16)
FORMATS = [
    dict(bits=8, zeros=False),
    dict(bits=4, zeros=False),
    dict(bits=2, zeros=False),
    dict(bits=3),
    dict(bits=3, zeros=False),
    dict(bits=8, zeros=False, format="e4m3"),
    dict(bits=8, zeros=False, format="e5m2"),
    dict(bits=4, format="normal"),
    dict(bits=3, format="normal"),
    dict(bits=2, zeros=False, format="normal"),
]


def query(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def waves(places, dims):
    angles = torch.arange(places)[:, None] * 10000.0 ** -(torch.arange(dims // 2) / (dims // 2))
    return torch.cat([angles.cos(), angles.sin()], 1).float()


def run(q, k, v, **options):
    reference = {name: x for name, x in options.items() if name not in ("splits", "settings")}
    got = decode_attention(q, k, v, scaling=0.2, settings=SMALL, **options)
    check(got, attention(q, k, v, 0.2, **reference), q.dtype)
    return got


@pytest.mark.parametrize("dtype, axis, size", [(torch.float32, "channel", 10), (torch.bfloat16, "channel", 16)])
@pytest.mark.parametrize("how", FORMATS, ids=lambda how: "-".join(f"{x}" for x in how.values()))
def test_formats(how, dtype, axis, size, poison):
    bits, more = how["bits"], {name: x for name, x in how.items() if name != "bits"}
    k = random_codes(1, 1, 20, 32, bits, axis, size, table=size == 10, **more)
    v = random_codes(1, 1, 20, 32, bits, "token", 32, **more)
    run(query(1, 2, 1, 32, dtype=dtype), k, v)
    if dtype == torch.float32:
        run(query(1, 2, 1, 32), v, v)  # keys per token
    assert torch.allclose(dequantize(k, torch.float64), values(k), atol=1e-5)


@pytest.mark.parametrize("dim", [40, 96])
def test_three_bits_of_odd_rows(dim):
    """40 channels: third bits begin at odd bytes, so rows are read byte by byte."""
    k, v = random_codes(1, 1, 20, dim, 3, "channel", 16), random_codes(1, 1, 20, dim, 3, "token", dim)
    for dtype in (torch.float32, torch.float16):
        run(query(1, 2, 1, dim, dtype=dtype), k, v)


BEFORE = [
    ("dense", 32, torch.float32),
    ("dense", 16, torch.bfloat16),
    ((8, "channel", 16), 32, torch.float16),
    ((8, "channel", 16), 16, torch.float32),
    ((4, "channel", 16), 32, torch.bfloat16),
    ((4, "channel", 16), 16, torch.float16),
    ((4, "token", 16), 16, torch.float32),
    ((2, "channel", 10), 32, torch.float16),
    ((3, "channel", 16), 32, torch.float32),
    ((3, "token", 16), 16, torch.bfloat16),
]


@pytest.mark.parametrize("kind, dims, dtype", BEFORE, ids=str)
def test_keys_before_rope(kind, dims, dtype, poison):
    """Of all or of half of the channels, wherever each head's keys stand."""
    n = 20
    k = query(1, 2, n, 32, dtype=dtype) if kind == "dense" else random_codes(1, 2, n, 32, *kind)
    v = random_codes(1, 2, n, 32, 4, "token", 32)
    columns = torch.stack([torch.randperm(200)[:n].sort().values for _ in range(2)]).view(1, 2, n).int()
    run(query(1, 2, 1, 32, dtype=dtype), k, v, places=Places(waves(200, dims), columns))


@pytest.mark.parametrize("shared", [False, True])
def test_places_of_all_heads(shared):
    k, v, tail = query(2, 2, 20, 32), query(2, 2, 20, 32), (query(2, 2, 3, 32), query(2, 2, 3, 32))
    places = (
        Places(waves(60, 32), torch.arange(7, 27, dtype=torch.int32).view(1, 1, -1)) if shared else Places(waves(60, 32), None, 7)
    )
    run(query(2, 2, 1, 32), k, v, places=places, splits=2, residual_k=tail[0], residual_v=tail[1])


def test_a_turn_by_hand():
    """One pair of channels, a quarter of a circle a place: the key (1, 0) at place 1 is (0, 1)."""
    k = torch.zeros(1, 1, 1, 2)
    k[..., 0] = 1
    angle = torch.arange(3)[:, None] * torch.pi / 2
    places = Places(torch.cat([angle.cos(), angle.sin()], 1), torch.ones(1, 1, 1, dtype=torch.int32))
    _, lse = decode_attention(torch.tensor([3.0, 5.0]).view(1, 1, 1, 2), k, k, scaling=1.0, places=places)
    assert lse.item() == pytest.approx(5.0, abs=1e-5)


@pytest.mark.parametrize("start", [0, 5, 16, 37, torch.tensor([0, 20]), torch.tensor([[3, 30], [37, 17]])])
def test_start(start, poison):
    k, v = random_codes(2, 2, 37, 32, 4, "channel", 16), random_codes(2, 2, 37, 32, 8, "token", 32)
    length = None if isinstance(start, int) else torch.tensor([[37, 36], [36, 20]])
    run(query(2, 2, 1, 32), k, v, start=start, length=length, splits=3)


def pool(kind, page, heads=2, pages=9, dtype=torch.float32, **more):
    return query(pages, heads, page, 32, dtype=dtype) if kind == "dense" else random_codes(pages, heads, page, 32, *kind, **more)


PAIRS = [
    ("dense", "dense"),
    ((8, "channel", 16), (8, "token", 32)),
    ((4, "channel", 16), (4, "token", 16)),
    ((2, "token", 16), "dense"),
    ((3, "channel", 4), (3, "token", 32)),
]


@pytest.mark.parametrize("page, dtype", [(16, torch.float32), (48, torch.float16), (5, torch.float32)])
@pytest.mark.parametrize("kinds", PAIRS, ids=str)
def test_pages(kinds, page, dtype, poison):
    if any(kind != "dense" and kind[1] == "channel" and page % kind[2] for kind in kinds):
        kinds = [kind if kind == "dense" or kind[1] == "token" else (kind[0], "channel", page) for kind in kinds]
    k, v = (pool(kind, page, heads=1, dtype=dtype) for kind in kinds)
    table = torch.stack([torch.randperm(9)[:3] for _ in range(3)]).int()[:, None]
    length = torch.tensor([3 * page, 2 * page - 1, 0], dtype=torch.int32)
    q = query(3, 2, 1, 32, dtype=dtype)
    more = dict(length=length, bias=torch.randn(3, 1, 1, 3 * page))
    beyond = table.clone()
    beyond[1, :, 2:], beyond[2] = 1 << 30, -(1 << 30)  # entries of tokens that do not count
    got = paged_decode_attention(q, k, v, beyond, scaling=0.2, splits=2, settings=SMALL, **more)
    check(got, attention(q, unpaged(k, table), unpaged(v, table), 0.2, **more), dtype)
    assert not got[0][2].any() and (got[1][2] == -torch.inf).all()


def test_pages_of_one_head_each(poison):
    """As many pages as each head needs, as they lie in a store of AdaKV; keys from before RoPE, and tokens beside the pages."""
    k, v = query(12, 1, 8, 32), query(12, 1, 8, 32)
    table = torch.randperm(12).view(2, 2, 3).int()
    start = torch.tensor([[0, 13], [24, 7]], dtype=torch.int32)  # the oldest page of a head begins with holes
    tail = query(2, 2, 5, 32), query(2, 2, 5, 32)
    for places in (None, Places(waves(300, 32), torch.randint(0, 300, (2, 2, 24), dtype=torch.int32))):
        more = dict(start=start, residual_k=tail[0], residual_v=tail[1], places=places, length=24)
        q = query(2, 4, 1, 32)
        got = paged_decode_attention(
            q, k.expand(-1, 2, -1, -1), v.expand(-1, 2, -1, -1), table, scaling=0.2, settings=SMALL, **more
        )
        rows = [
            torch.stack([torch.stack([x[table[b, h].long(), 0].flatten(0, 1) for h in range(2)]) for b in range(2)])
            for x in (k, v)
        ]
        check(got, attention(q, *rows, 0.2, **more), torch.float32)


def test_the_layout_of_vllm():
    """Pages ``[P, page, Hk, D]``, read where they lie."""
    k, v = query(9, 16, 2, 32), query(9, 16, 2, 32)
    table = torch.tensor([[[4, 0, 7]]], dtype=torch.int32)
    q = query(1, 4, 1, 32)
    got = paged_decode_attention(q, k.transpose(1, 2), v.transpose(1, 2), table, length=41, scaling=0.2, settings=SMALL)
    rows = [x[[4, 0, 7]].flatten(0, 1).transpose(0, 1)[None, :, :41] for x in (k, v)]
    check(got, attention(q, *rows, 0.2), torch.float32)


SCORED = [
    ("dense", 1, 0, {}),
    ((4, "channel", 16), 3, 1, dict(softcap=3.0)),
    ((8, "token", 16), 1, 0, dict(start=torch.tensor([[3, 18]]), length=torch.tensor([[17, 20]]))),
    ((3, "channel", 10), 9, 5, dict(masked=True)),
]


@pytest.mark.parametrize("kind, queries, since, more", SCORED, ids=str)
def test_what_each_key_gets(kind, queries, since, more, poison):
    """By one key's value being 1, in float64; 18 query rows of a KV head are more than a program holds."""
    k = query(1, 2, 20, 32) if kind == "dense" else random_codes(1, 2, 20, 32, *kind)
    v, tail = random_codes(1, 2, 20, 32, 4, "token", 32), (query(1, 2, 3, 32), query(1, 2, 3, 32))
    more = more | dict(residual_k=tail[0], residual_v=tail[1], sinks=torch.randn(4))
    if more.pop("masked", False):
        more["bias"] = torch.zeros(1, 1, queries, 23).masked_fill(torch.rand(23) < 0.4, -torch.inf)
        more["bias"][:, :, 2] = -torch.inf
    q = query(1, 4, queries, 32)
    *got, mass = scored_decode_attention(q, k, v, scaling=0.2, since=since, splits=2, settings=SMALL, **more)
    check(got, attention(q, k, v, 0.2, **more), torch.float32)
    want = expected_mass(q, k, v, 0.2, since, **more)
    assert error(mass, want) < 1e-5


def test_what_each_key_in_pages_gets(poison):
    k, v = query(9, 2, 5, 32), query(9, 2, 5, 32)
    table = torch.tensor([[[4, 0, 7]], [[8, 1, 2]]], dtype=torch.int32)
    q, length = query(2, 4, 1, 32), torch.tensor([15, 6])
    *_, mass = scored_decode_attention(q, k, v, table, length=length, scaling=0.2, settings=SMALL)
    assert error(mass, expected_mass(q, unpaged(k, table), unpaged(v, table), 0.2, length=length)) < 1e-5
    assert not mass[1, :, 6:].any() and torch.allclose(
        mass.sum(2), torch.full((2, 2), 2.0), atol=1e-5
    )  # two query heads share a key


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(table=torch.zeros(1, 1, 2)), "table is torch.float32"),
        (dict(table=torch.zeros(2, 1, 2, dtype=torch.int32)), r"table is \[2, 1, 2\]"),
        (dict(length=33), "length=33 must be 0 to 32"),
        (dict(start=torch.zeros(3, dtype=torch.int32)), r"start is torch.int32 \[3\]"),
        (dict(k=random_codes(4, 2, 16, 32, 8, "channel", 10)), "group_size=10, must divide the page"),
        (dict(k=random_codes(4, 2, 16, 32, 8, "channel", 8, table=True)), "table of groups"),
        (dict(v=torch.zeros(4, 2, 8, 32)), "must agree"),
        (dict(places=Places(torch.zeros(8, 34))), "must be float32 \\[P, R\\]"),
        (dict(places=Places(torch.zeros(8, 32))), "needs waves for each, there are 8"),
        (
            dict(places=Places(torch.zeros(8, 32), torch.zeros(1, 1, 7, dtype=torch.int32))),
            r"places.columns is torch.int32 \[1, 1, 7\]",
        ),
    ],
)
def test_refuses(change, message):
    given = dict(q=torch.zeros(1, 4, 1, 32), k=torch.zeros(4, 2, 16, 32), v=torch.zeros(4, 2, 16, 32), table=torch.zeros(1, 1, 2, dtype=torch.int32),
                 scaling=1.0, length=3) | change  # fmt: skip
    with pytest.raises(ValueError, match=message):
        paged_decode_attention(**given)


def test_it_refuses_formats_it_does_not_know():
    good = random_codes(1, 2, 16, 32, 8, "token", 32)
    for change, message in ((dict(format="e3m4"), "format='e3m4'"), (dict(format="e4m3", bits=4), "bits=4")):
        k = Codes(**{**good.__dict__, **change})
        with pytest.raises(ValueError, match=message):
            decode_attention(torch.zeros(1, 2, 1, 32), k, good, scaling=1.0)


# what a reader with fresh eyes broke


@pytest.mark.parametrize("start", [5, torch.tensor([5])])
def test_what_lies_before_the_start_is_not_read(start):
    """Neither its scales nor its pages: they may hold anything."""
    k, v = random_codes(1, 1, 20, 32, 8, "token", 16), random_codes(1, 1, 20, 32, 8, "token", 16)
    q = query(1, 2, 1, 32)
    want = decode_attention(q, k, v, scaling=0.2, start=start, settings=SMALL)
    for x in (k.scale, k.zero, v.scale, v.zero):
        x[:, :, :5] = torch.nan
    got = decode_attention(q, k, v, scaling=0.2, start=start, settings=SMALL)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    pages = [random_codes(6, 1, 4, 32, 8, "token", 32) for _ in range(2)]
    table = torch.tensor([[[3, 0, 5, 1, 2]]], dtype=torch.int32)
    want = paged_decode_attention(q, *pages, table, start=start, length=18, scaling=0.2, settings=SMALL)
    wild = table.clone()
    wild[..., 0] = 10**6
    got = paged_decode_attention(q, *pages, wild, start=start, length=18, scaling=0.2, settings=SMALL)
    assert torch.equal(got[0], want[0])


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e6])
@pytest.mark.parametrize("kind", ["channel", "token", "rows"])
def test_keys_of_any_size(size, kind):
    """16-bit queries are multiplied in float16, whatever the scales' size."""
    k = random_codes(
        1, 1, 20, 32, 8, "token" if kind == "token" else "channel", 10 if kind == "rows" else 16, scale_dtype=torch.float32
    )
    k = Codes(k.codes, k.scale * size, k.zero * size, 8, k.axis, k.group_size)
    v, q = query(1, 1, 20, 32, dtype=torch.bfloat16), (query(1, 2, 1, 32) / size).bfloat16()
    run(q, k, v)


def test_a_sum_over_many_queries():
    """More query rows than a program holds are added up one block after the other."""
    q, k, v = query(1, 8, 5, 32), query(1, 1, 20, 32), query(1, 1, 20, 32)
    *_, mass = scored_decode_attention(q, k, v, scaling=0.2, since=2, settings=SMALL)
    assert mass.sum().item() == pytest.approx(8 * 3, rel=1e-5)
    assert error(mass, expected_mass(q, k, v, 0.2, 2)) < 1e-5


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(length=3.7), "length=3.7 must be 0 to 16"),
        (dict(start=True), "start=True must be 0 to 16"),
        (dict(scaling=float("nan")), "scaling=nan must be a finite number"),
        (dict(scaling="1"), "scaling='1' must be a finite number"),
        (dict(softcap=float("inf")), "softcap=inf must be a finite number"),
        (dict(splits=1.5), "splits=1.5 must be 1 to 65535"),
        (dict(splits=70000), "splits=70000 must be 1 to 65535"),
        (dict(settings=launch.Settings(block_n=24)), "settings.block_n=24 must be a power of two"),
        (dict(settings=launch.Settings(num_warps=3)), "settings.num_warps=3 must be a power of two"),
        (dict(places=Places(torch.zeros(20, 32), None, 1.5)), "places.start=1.5 must be a whole number"),
        (
            dict(places=Places(torch.zeros(8, 32), torch.full((1, 1, 16), 9, dtype=torch.int32))),
            "columns go from 9 to 9, waves from 0 to 7",
        ),
    ],
)
def test_numbers_that_cannot_be(change, message):
    given = dict(scaling=1.0) | change
    q, k = torch.zeros(1, 2, 1, 32), torch.zeros(1, 1, 16, 32)
    with pytest.raises(ValueError, match=message):
        decode_attention(q, k, k, **given)
    with pytest.raises(ValueError, match=message):
        scored_decode_attention(q, k, k, **given)


def test_pages_need_a_length_and_whole_numbers():
    q, k = torch.zeros(1, 2, 1, 32), torch.zeros(4, 1, 16, 32)
    with pytest.raises(ValueError, match="length is None"):
        scored_decode_attention(q, k, k, torch.zeros(1, 1, 2, dtype=torch.int32), scaling=1.0)
    with pytest.raises(ValueError, match="table is torch.int64"):
        scored_decode_attention(q, k, k, torch.zeros(1, 1, 2, dtype=torch.int64), scaling=1.0, length=3)
    with pytest.raises(ValueError, match="since=0.5 must be 0 to 1"):
        scored_decode_attention(q, k[:1], k[:1], scaling=1.0, since=0.5)
