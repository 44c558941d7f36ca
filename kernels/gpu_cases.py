"""Every kernel against float64 on a GPU (or, small, through the interpreter): memory poisoned, each case three times, which must give the same bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab_kernels.decode import decode_attention, scored_decode_attention
from kvlab_kernels.layout import FLOATS, Codes, Places, normal_levels, unpack
from kvlab_kernels.quantize import quantize, rotate_quantize, rotate_quantize_torch
from kvlab_kernels.reference import quantize_torch
from kvlab_kernels.rows import gather_tokens, rope_shift
from kvlab_kernels.scored import scored_attention

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FORMATS: dict[str, tuple[int, dict]] = {
    "int8 symmetric": (8, {"zeros": False}),
    "int4 symmetric": (4, {"zeros": False}),
    "int3": (3, {}),
    "e4m3": (8, {"zeros": False, "format": "e4m3"}),
    "e5m2": (8, {"zeros": False, "format": "e5m2"}),
    "normal4": (4, {"format": "normal"}),
    "normal3": (3, {"format": "normal"}),
    "normal2": (2, {"zeros": False, "format": "normal"}),
}


# -- caches ---------------------------------------------------------------------------------------------------------------------------


def random_codes(batch: int, heads: int, n: int, dim: int, bits: int, axis: str, group_size: int, *, table: bool = False, capacity: int = 0,
                 scale_dtype: torch.dtype = torch.float16, zeros: bool = True, format: str = "int") -> Codes:  # fmt: skip
    """Codes of every value (8-bit floats below 2); scales behind the last token are NaN."""
    capacity = max(capacity, n)
    groups = -(-capacity // group_size) if axis == "channel" else capacity
    shape = (batch, heads, groups, dim if axis == "channel" else dim // group_size)
    codes = torch.randint(0, 256, (batch, heads, capacity, dim * bits // 8), dtype=torch.uint8, device=GPU)
    if format in FLOATS:
        codes &= 0xBF if format == "e4m3" else 0xBB
    scale = (torch.rand(shape, device=GPU) + 0.5).div(2 ** (bits - 1)).to(scale_dtype)
    zero = (torch.randn(shape, device=GPU) * 0.5 - 1).to(scale_dtype)
    used = -(-n // group_size) if axis == "channel" else n
    scale[:, :, used:], zero[:, :, used:] = torch.nan, torch.nan
    group = torch.randint(0, max(used, 1), (batch, heads, n), device=GPU).sort(-1).values.int() if table else None
    return Codes(codes[:, :, :n], scale[:, :, :used], zero[:, :, :used] if zeros else None, bits, axis, group_size, group, format)


def size(x: Tensor | Codes) -> int:
    """Bytes a kernel must read."""
    tensors = [x] if isinstance(x, Tensor) else [t for t in (x.codes, x.scale, x.zero, x.group) if t is not None]
    return sum(t.numel() * t.element_size() for t in tensors)


# -- float64 --------------------------------------------------------------------------------------------------------------------------


def values(x: Tensor | Codes) -> Tensor:
    if isinstance(x, Tensor):
        return x.double()
    code, scale = unpack(x.codes, x.bits).double(), x.scale.double()
    zero = torch.zeros_like(scale) if x.zero is None else x.zero.double()
    if x.format in FLOATS:
        code = x.codes.view(FLOATS[x.format]).double()
    elif x.format == "normal":
        code = torch.tensor(normal_levels(x.bits), device=GPU).double()[unpack(x.codes, x.bits).int()]
    elif x.zero is None:
        code = code - 2 ** (x.bits - 1)
    if x.axis == "token":
        return code * scale.repeat_interleave(x.group_size, -1) + zero.repeat_interleave(x.group_size, -1)
    row = (
        x.group.long()
        if x.group is not None
        else (torch.arange(code.shape[2], device=GPU) // x.group_size).expand(code.shape[:3])
    )
    row = row[..., None].expand(code.shape)
    return code * scale.gather(2, row) + zero.gather(2, row)


def turned(k: Tensor, places: Places) -> Tensor:
    """Keys after RoPE."""
    half, (b, h, n, _) = places.waves.shape[1] // 2, k.shape
    at = (
        torch.arange(places.start, places.start + n, device=GPU).expand(b, h, n)
        if places.columns is None
        else places.columns.expand(b, h, n)
    )
    cos, sin = places.waves.double()[at.long()].chunk(2, -1)
    one, two, rest = k[..., :half], k[..., half : 2 * half], k[..., 2 * half :]
    return torch.cat([one * cos - two * sin, two * cos + one * sin, rest], -1)


def exact(
    q,
    k,
    v,
    scaling,
    bias=None,
    softcap=None,
    sinks=None,
    length=None,
    start=None,
    residual_k=None,
    residual_v=None,
    places=None,
    since=0,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> output, log-sum-exp, and what each key got from the queries from ``since`` on."""
    k, v = values(k), values(v)
    k = k if places is None else turned(k, places)
    batch, heads, queries, dim = q.shape
    kv_heads, n = k.shape[1:3]
    hidden = torch.zeros(batch, kv_heads, n, device=GPU, dtype=torch.bool)
    for bound, after in ((length, True), (start, False)):
        if bound is not None:
            bound = torch.as_tensor(bound, device=GPU)
            bound = (bound[:, None] if bound.ndim == 1 else bound).expand(batch, kv_heads)[..., None]
            hidden |= (torch.arange(n, device=GPU) >= bound) == after
    if residual_k is not None:
        k, v = torch.cat([k, residual_k.double()], 2), torch.cat([v, residual_v.double()], 2)
        hidden = F.pad(hidden, (0, residual_k.shape[2]))
    s = q.double().view(batch, kv_heads, -1, dim) @ k.mT * scaling
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    s = s.view(batch, kv_heads, -1, queries, k.shape[2])
    if bias is not None:
        s = s + bias.double()[:, :, None]
    s = s.masked_fill(hidden[:, :, None, None], -torch.inf).view(batch, heads, queries, -1)
    if sinks is not None:
        s = torch.cat([s, sinks.double().view(1, -1, 1, 1).expand(batch, heads, queries, 1)], -1)
    lse = torch.logsumexp(s, -1)
    p = (s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()[..., : k.shape[2]]
    mass = p.view(batch, kv_heads, -1, queries, k.shape[2])[..., since:, :].sum((2, 3))
    return (p.view(batch, kv_heads, -1, k.shape[2]) @ v).view(q.shape), lse, mass


# -- step 1: cases --------------------------------------------------------------------------------------------------------------------


def poison() -> None:
    """From now on memory from torch.empty is full of NaN, so that what a kernel leaves out shows."""
    plain = torch.empty

    def empty(*args, **kwargs):
        x = plain(*args, **kwargs)
        return x.fill_(torch.nan) if x.is_floating_point() else x

    torch.empty = empty


def compare(q: Tensor, k: Tensor | Codes, v: Tensor | Codes, scored: bool = False, **options) -> dict:
    scaling = q.shape[-1] ** -0.5
    runs = [decode_attention(q, k, v, scaling=scaling, **options) for _ in range(3)]
    for out, lse in runs[1:]:
        assert torch.equal(out, runs[0][0]) and torch.equal(lse, runs[0][1]), "three runs gave different bits"
    out, lse = runs[0]
    want, lse64, mass64 = exact(
        q, k, v, scaling, **{name: x for name, x in options.items() if name not in ("splits", "settings")}
    )
    found = verdict(out, lse, want, lse64)
    if scored:
        *_, mass = scored_decode_attention(q, k, v, scaling=scaling, **options)
        found["mass"] = near(mass, mass64, q.dtype, "mass")
    return found


def near(got: Tensor, want: Tensor, dtype: torch.dtype, what: str) -> float:
    """Relative error in the Euclidean norm; AssertionError beyond the dtype's tolerance, or where anything is NaN."""
    error = float((got.double() - want).norm() / want.norm().clamp_min(1e-30))
    assert error < TOLERANCE[dtype], f"{what}: relative error {error:.2e}, allowed {TOLERANCE[dtype]:.0e}"
    return error


def verdict(out: Tensor, lse: Tensor, want: Tensor, lse64: Tensor) -> dict:
    blind = lse64 == -torch.inf
    assert torch.equal(lse == -torch.inf, blind), "log-sum-exp is -inf in the wrong rows"
    assert not out[blind].any(), "rows that see nothing must be zero"
    error = float((out.double() - want).norm() / want.norm().clamp_min(1e-30))
    off = float((lse.double() - lse64)[~blind].abs().max()) if (~blind).any() else 0.0
    tolerance = TOLERANCE[out.dtype]
    assert error < tolerance, f"relative error {error:.2e}, allowed {tolerance:.0e}"
    assert off < 2 * tolerance * (1 + float(lse64[~blind].abs().max() if (~blind).any() else 0)), f"log-sum-exp off by {off:.2e}"
    return {"error": error, "lse": off}


def query(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=GPU).to(dtype)


def side(kind, batch: int, heads: int, n: int, dim: int, dtype: torch.dtype, **options) -> Tensor | Codes:
    if kind == "dense":
        return query(batch, heads, n, dim, dtype=dtype)
    bits, axis, group, *how = kind
    return random_codes(batch, heads, n, dim, bits, axis, group, **options, **(how[0] if how else {}))


def decode_case(dtype, k_kind, v_kind, *, n=777, dim=128, heads=8, kv_heads=2, queries=1, batch=2, tail=0, capacity=0, table=False, masked=False,
                sinks=False, blind=False, turned=0, scored=False, scale_dtype=torch.float16, **options) -> Callable[[], dict]:  # fmt: skip
    def run() -> dict:
        q = query(batch, heads, queries, dim, dtype=dtype)
        given = dict(capacity=capacity, scale_dtype=scale_dtype)
        k = side(k_kind, batch, kv_heads, n, dim, dtype, **({} if k_kind == "dense" else {**given, "table": table}))
        v = side(v_kind, batch, kv_heads, n, dim, dtype, **({} if v_kind == "dense" else given))
        more = dict(options)
        if tail:
            more |= dict(
                residual_k=query(batch, kv_heads, tail, dim, dtype=dtype),
                residual_v=query(batch, kv_heads, tail, dim, dtype=dtype),
            )
        if masked or blind:
            bias = torch.randn(batch, kv_heads, queries, n + tail, device=GPU)
            more["bias"] = bias.masked_fill(torch.rand(n + tail, device=GPU) < 0.4, -torch.inf)
            if blind:
                more["bias"][0] = -torch.inf
                more["bias"][:, :, :, : n // 2] = -torch.inf
        if sinks:
            more["sinks"] = query(heads, dtype=dtype)
        if turned:
            columns = torch.stack([torch.randperm(4 * n, device=GPU)[:n].sort().values for _ in range(batch * kv_heads)])
            more["places"] = Places(waves(4 * n, turned), columns.view(batch, kv_heads, n).int() if turned != dim else None)
        if more.get("start") == "heads":
            more["start"] = torch.randint(0, n, (batch, kv_heads), device=GPU, dtype=torch.int32)
        if more.get("length") == "rows":
            more["length"] = torch.tensor([0] + [n - 5] * (batch - 1), device=GPU, dtype=torch.int32)
        return compare(q, k, v, scored, **more)

    return run


def waves(places: int, dims: int) -> Tensor:
    """Cosines and sines of every place."""
    angles = torch.arange(places, device=GPU).double()[:, None] * 10000.0 ** -(
        torch.arange(dims // 2, device=GPU).double() / (dims // 2)
    )
    return torch.cat([angles.cos(), angles.sin()], 1).float()


def paged_case(dtype, kind, page: int, *, dim=128, kv_heads=2, pages=40, per_head=False) -> Callable[[], dict]:
    """Rows of the batch with 0 to 12 pages, in any order; entries of the table that do not count are wild."""

    def run() -> dict:
        pool = 1 if per_head else kv_heads
        k, v = (
            side(own, pages, pool, page, dim, dtype)
            for own in ((kind, kind) if kind == "dense" else (kind, (kind[0], "token", 32)))
        )
        if per_head:
            k, v = k.expand(-1, kv_heads, -1, -1), v.expand(-1, kv_heads, -1, -1)
        heads = kv_heads if per_head else 1
        table = torch.stack([torch.randperm(pages, device=GPU)[:12] for _ in range(4 * heads)]).view(4, heads, 12).int()
        length = torch.tensor([12 * page, 5 * page + 1, 1, 0], device=GPU, dtype=torch.int32)
        wild = table.masked_fill(torch.arange(12, device=GPU) * page >= length[:, None, None], 1 << 30)
        q = query(4, 4 * kv_heads, 1, dim, dtype=dtype)
        runs = [scored_decode_attention(q, k, v, wild, length=length, scaling=dim**-0.5) for _ in range(3)]
        assert all(torch.equal(a, b) for one in runs[1:] for a, b in zip(one, runs[0])), "three runs gave different bits"
        rows = [gathered(values(x), table) for x in (k, v)]
        want, lse, mass = exact(q, *rows, dim**-0.5, length=length)
        return verdict(*runs[0][:2], want, lse) | {"mass": near(runs[0][2], mass, dtype, "mass")}

    return run


def gathered(x: Tensor, table: Tensor) -> Tensor:
    """Pages ``[P, Hk, page, D]`` one behind the other, ``[B, Hk, N, D]``."""
    heads = x.shape[1]
    own = table.long().expand(-1, heads, -1)
    return x[own, torch.arange(heads, device=GPU)[None, :, None]].flatten(2, 3)


def scored_case(dtype, *, n=700, queries=None, dim=128, heads=8, kv_heads=2, since=0, **options) -> Callable[[], dict]:
    def run() -> dict:
        count = queries or n
        q, k, v = (
            query(2, heads, count, dim, dtype=dtype),
            query(2, kv_heads, n, dim, dtype=dtype),
            query(2, kv_heads, n, dim, dtype=dtype),
        )
        more = dict(options)
        if more.get("sinks"):
            more["sinks"] = query(heads, dtype=dtype)
        if more.get("first"):
            more["first"] = torch.tensor([0, n // 3], device=GPU)
        runs = [scored_attention(q, k, v, scaling=dim**-0.5, since=since, **more) for _ in range(3)]
        assert all(torch.equal(a, b) for one in runs[1:] for a, b in zip(one, runs[0])), "three runs gave different bits"
        at, own = torch.arange(n, device=GPU), torch.arange(n - count, n, device=GPU)
        seen = (at <= own[:, None]) & (at > own[:, None] - (more.get("window") or n))
        bias = torch.zeros(2, 1, count, n, device=GPU).masked_fill(~seen, -torch.inf)
        if "first" in more:
            bias = bias.masked_fill(at < more["first"][:, None, None, None], -torch.inf)
        want, lse, mass = exact(q, k, v, dim**-0.5, bias=bias, softcap=more.get("softcap"), sinks=more.get("sinks"), since=since)
        out, sums, given = runs[0]
        return verdict(out, sums, want, lse) | {"mass": near(given, mass, dtype, "mass")}

    return run


def rows_case(dtype: torch.dtype) -> Callable[[], dict]:
    """Rows moved together, turned there and back, rotated and quantized."""

    def run() -> dict:
        x = query(2, 3, 333, 128, dtype=dtype)
        index = torch.stack([torch.randperm(333, device=GPU)[:200] for _ in range(6)]).view(2, 3, 200)
        assert torch.equal(gather_tokens(x, index), x.gather(2, index[..., None].expand(-1, -1, -1, 128))), "rows are not copies"
        table = waves(500, 128)
        places = torch.randint(-499, 500, (2, 1, 333), device=GPU, dtype=torch.int32)
        sign = torch.where(places < 0, -1.0, 1.0).double()
        cos, sin = table.double()[places.abs().long()].chunk(2, -1)
        one, two = x.double().chunk(2, -1)
        sin = sin * sign[..., None]
        error = near(rope_shift(x, places, table), torch.cat([one * cos - two * sin, two * cos + one * sin], -1), dtype, "turned")
        matrix = torch.linalg.qr(torch.randn(128, 128, device=GPU))[0]
        for bits in (8, 4, 2):
            got, want = rotate_quantize(x, matrix, bits, 64), rotate_quantize_torch(x, matrix, bits, 64)
            off = (unpack(got.codes, bits).int() - unpack(want.codes, bits).int()).abs()
            assert int(off.max()) <= 1 and float(off.float().mean()) < 0.02, (
                f"{bits} bits: codes differ by up to {int(off.max())}"
            )
        return {"error": error}

    return run


def far_case(bits: int) -> Callable[[], dict]:
    """A cache whose last tokens lie beyond 2**31 elements; only they may be seen."""

    def run() -> dict:
        dim, kept = 128, 300
        n = (1 << 31) // dim + 4099
        bias = torch.full((1, 1, 1, n), -torch.inf, device=GPU)
        bias[..., -kept:] = 0
        q = query(1, 4, 1, dim, dtype=torch.bfloat16)
        if bits == 16:
            k, v = (torch.zeros(1, 1, n, dim, device=GPU, dtype=torch.bfloat16) for _ in range(2))
            for x in (k, v):
                x[:, :, -kept:] = torch.randn(kept, dim, device=GPU)
            near_k, near_v = k[:, :, -kept:], v[:, :, -kept:]
        else:
            k = random_codes(1, 2, n, dim, bits, "token", 128)
            v = random_codes(1, 2, n, dim, bits, "token", 128)
            near_k, near_v = (
                Codes(x.codes[:, :, -kept:], x.scale[:, :, -kept:], x.zero[:, :, -kept:], bits, "token", 128) for x in (k, v)
            )
        out, lse = decode_attention(q, k, v, scaling=dim**-0.5, bias=bias)
        return verdict(out, lse, *exact(q, near_k, near_v, dim**-0.5)[:2])

    return run


def quantize_case(
    dtype: torch.dtype, bits: int, axis: str, group: int, n: int, dim: int, scale_dtype: torch.dtype
) -> Callable[[], dict]:
    def run() -> dict:
        x = (torch.randn(2, n, 3, dim, device=GPU) * torch.logspace(-4, 3, dim, device=GPU)).to(dtype).transpose(1, 2)
        x[0, 0] = 3.3
        got, want = quantize(x, bits, axis, group, scale_dtype), quantize_torch(x.cpu(), bits, axis, group, scale_dtype)
        for name in ("codes", "scale", "zero"):
            a, b = getattr(got, name).cpu(), getattr(want, name)
            assert torch.equal(a, b), f"{name}: {int((a != b).sum())} of {a.numel()} differ from torch"
        return {"error": 0.0}

    return run


def cases() -> dict[str, Callable[[], dict]]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    found: dict[str, Callable[[], dict]] = {}

    def add(name: str, run: Callable[[], dict]) -> None:
        found[name] = run

    for dtype in (bf16, fp16, fp32):
        add(f"decode dense {NAMES[dtype]}", decode_case(dtype, "dense", "dense", tail=33, masked=True))
        for bits in (8, 4, 2):
            add(f"decode int{bits} {NAMES[dtype]}", decode_case(dtype, (bits, "channel", 64), (bits, "token", 64), tail=128))
        add(f"decode int4 keys per token {NAMES[dtype]}", decode_case(dtype, (4, "token", 32), (4, "token", 32), n=701))
        add(f"decode int8 softcap sinks {NAMES[dtype]}",
            decode_case(dtype, (8, "channel", 32), (8, "token", 128), softcap=20.0, sinks=True, masked=True, tail=7, queries=3))  # fmt: skip
        add(
            f"decode int4 blind rows {NAMES[dtype]}",
            decode_case(dtype, (4, "channel", 64), (4, "token", 64), blind=True, splits=5),
        )
    for dim in (64, 80, 96, 256):
        small = {64: 32, 80: 40, 96: 32, 256: 64}[dim]
        add(f"decode dense d{dim}", decode_case(bf16, "dense", "dense", dim=dim, n=513))
        for bits in (8, 4, 2):
            add(
                f"decode int{bits} d{dim}",
                decode_case(fp16, (bits, "channel", 64), (bits, "token", small), dim=dim, n=513, tail=5),
            )
    for n in (1, 63, 64, 65, 4097):
        add(f"decode int8 n{n}", decode_case(fp16, (8, "channel", 64), (8, "token", 64), n=n))
        add(f"decode int4 n{n}", decode_case(bf16, (4, "channel", 64), (4, "token", 64), n=n))
    for heads in (1, 5, 7, 16):
        add(f"decode int4 {heads} heads a group", decode_case(bf16, (4, "channel", 64), (4, "token", 64), heads=2 * heads))
    add("decode int8 16 queries", decode_case(fp16, (8, "channel", 64), (8, "token", 64), queries=16, masked=True))
    add("decode int4 keys int8 values", decode_case(bf16, (4, "channel", 64), (8, "token", 64)))
    add("decode int8 keys dense values", decode_case(bf16, (8, "channel", 64), "dense"))
    for bits in (8, 4, 2):
        add(f"decode int{bits} table", decode_case(bf16, (bits, "channel", 64), (bits, "token", 64), table=True, n=300))
        add(
            f"decode int{bits} capacity",
            decode_case(fp16, (bits, "channel", 32), (bits, "token", 32), n=611, capacity=1024, length=600),
        )
    add("decode int8 uneven groups", decode_case(bf16, (8, "channel", 20), (8, "token", 64), n=300))
    add("decode int4 float32 scales", decode_case(fp16, (4, "channel", 64), (4, "token", 64), scale_dtype=fp32))
    add("decode int4 lengths", decode_case(bf16, (4, "channel", 64), (4, "token", 64), length="rows", splits=4, batch=3))
    add("decode int4 more splits than tiles", decode_case(bf16, (4, "channel", 64), (4, "token", 64), n=100, splits=9))
    add("decode int8 beyond 2**31", far_case(8))
    add("decode dense beyond 2**31", far_case(16))
    for name, own in FORMATS.items():
        for dtype in (bf16, fp32):
            for axis in ("channel", "token"):
                add(
                    f"decode {name} {axis} {NAMES[dtype]}",
                    decode_case(dtype, (own[0], axis, 64, own[1]), (own[0], "token", 128, own[1]), n=333, tail=5, scored=True),
                )
    for dtype in (bf16, fp16, fp32):
        add(f"decode dense before RoPE {NAMES[dtype]}", decode_case(dtype, "dense", "dense", turned=128, scored=True))
        add(
            f"decode int4 before RoPE, kept columns {NAMES[dtype]}",
            decode_case(dtype, (4, "channel", 64), (4, "token", 64), turned=64, tail=9),
        )
        add(
            f"decode dense mass {NAMES[dtype]}",
            decode_case(dtype, "dense", "dense", tail=33, masked=True, scored=True, queries=5, heads=16, sinks=True),
        )
        for page in (16, 64, 48, 5):
            add(f"pages of {page} dense {NAMES[dtype]}", paged_case(dtype, "dense", page))
        for bits in (8, 4, 2):
            add(f"pages of 64 int{bits} {NAMES[dtype]}", paged_case(dtype, (bits, "channel", 64), 64))
            add(f"pages of 16 int{bits} {NAMES[dtype]}", paged_case(dtype, (bits, "token", 32), 16))
        add(f"pages of a head each {NAMES[dtype]}", paged_case(dtype, "dense", 16, per_head=True))
        for more in ({}, {"since": 600}, {"softcap": 20.0, "window": 100, "sinks": True}, {"queries": 3, "first": True}):
            add(f"scored {more} {NAMES[dtype]}", scored_case(dtype, **more))
        add(f"rows {NAMES[dtype]}", rows_case(dtype))
    for dim in (64, 80, 96, 256):
        add(f"scored d{dim}", scored_case(bf16, dim=dim, n=333, heads=6, kv_heads=2))
        add(
            f"decode int8 before RoPE d{dim}",
            decode_case(bf16, (8, "channel", 32), (8, "token", dim), turned=dim, dim=dim, n=200),
        )
    add(
        "decode int8 from a start for each head",
        decode_case(bf16, (8, "channel", 64), (8, "token", 64), start="heads", splits=5, scored=True),
    )
    add("decode int3 d256", decode_case(bf16, (3, "channel", 64), (3, "token", 64), dim=256))
    for dtype in (bf16, fp32):
        for bits in (8, 4, 2):
            for axis, group, n, dim in (
                ("channel", 64, 320, 128),
                ("channel", 20, 100, 80),
                ("token", 64, 333, 128),
                ("token", 32, 100, 96),
            ):
                for scale_dtype in (fp16, fp32):
                    name = f"quantize int{bits} {axis} g{group} d{dim} {NAMES[dtype]} scales {NAMES[scale_dtype]}"
                    add(name, quantize_case(dtype, bits, axis, group, n, dim, scale_dtype))
    return found
