"""The machine code behind :mod:`kvlab_kernels.cpu`: LLVM's intermediate code, written vector by vector and compiled in a tenth of a second.

A function is made for one way of reading (:class:`Reading`), head dim and number of query rows, so every loop over channels is unrolled and
every shift is a constant. Its one argument is a table of numbers: addresses and strides in bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Any

import llvmlite.binding as llvm
import torch
from llvmlite import ir

from .cpu import openmp
from .layout import PARTS, normal_levels

ROWS = 4  # query rows that share the loads of a key or value
LANES = 8  # numbers in a vector
BLOCK = 64  # tokens whose weights are scaled together
FIELDS = (
    "rows", "sums", "data", "scale", "zero", "table", "out",
    "tokens", "data_head", "scale_head", "zero_head", "table_head", "row_bytes", "out_bytes", "heads", "splits",
    "waves", "places", "places_head", "start",
)  # fmt: skip

I8, I16, I32, I64, F16, F32 = (
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.HalfType(),
    ir.FloatType(),
)


@dataclass(frozen=True)
class Reading:
    """How one side lies in memory. ``kind``: "float32", "float16", "bfloat16", or of codes "int", "normal", "e4m3", "e5m2"; the rest is about codes.

    ``axis``: "channel" or "token"; ``group``: tokens or channels that share a scale; ``table``: a token's row of scales is looked up;
    ``half``: scales are float16; ``symmetric``: there are no zero points. ``turn``: how many channels of keys are turned by their place before the
    product (RoPE; halves are pairs), ``placed``: places are looked up.
    """

    kind: str
    bits: int = 8
    axis: str = ""
    group: int = 1
    table: bool = False
    half: bool = False
    symmetric: bool = False
    turn: int = 0
    placed: bool = False

    def row(self, dim: int) -> int:
        """Bytes of a token."""
        return dim * {"float32": 32, "float16": 16, "bfloat16": 16}.get(self.kind, self.bits) // 8

    def step(self, dim: int) -> int:
        """Channels in a piece that lies in one plane and in one scale group."""
        plane = dim * min(PARTS[self.bits]) // 8 if self.kind in ("int", "normal") else dim
        return gcd(plane, self.group) if self.axis == "token" else plane

    @property
    def scale_item(self) -> int:
        return 2 if self.half else 4


def odd_polynomial(levels: tuple[float, ...]) -> list[float]:
    """Coefficients of x, x^3, ... of the odd polynomial that is ``levels[i]`` at ``x = (2 i + 1) / n - 1`` scaled so that the last is at 1."""
    half = len(levels) // 2
    places = torch.arange(half, dtype=torch.float64) * 2 + 1
    places = places / places[-1]
    matrix = places[:, None] ** (torch.arange(half) * 2 + 1)
    return torch.linalg.solve(matrix, torch.tensor(levels[half:], dtype=torch.float64)).tolist()  # type: ignore[no-any-return]


class Writer:
    """An LLVM function under construction, with the few things this file needs said shortly."""

    def __init__(self, module: ir.Module, name: str, arguments: list[Any]) -> None:
        self.module = module
        self.function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), name)
        self.entry = self.function.append_basic_block("entry")
        self.b = ir.IRBuilder(self.entry)

    def number(self, value: int) -> Any:
        return ir.Constant(I64, value)

    def add(self, a: Any, b: Any) -> Any:
        return self.b.add(a, self.number(b) if isinstance(b, int) else b)

    def mul(self, a: Any, b: Any) -> Any:
        return self.b.mul(a, self.number(b) if isinstance(b, int) else b)

    def least(self, a: Any, b: Any) -> Any:
        return self.b.select(self.b.icmp_signed("<", a, b), a, b)

    @contextlib.contextmanager
    def loop(self, start: Any, stop: Any, step: int = 1) -> Iterator[Any]:
        before = self.b.block
        head, body, done = (self.function.append_basic_block(name) for name in ("head", "body", "done"))
        self.b.branch(head)
        self.b.position_at_end(head)
        index = self.b.phi(I64)
        index.add_incoming(start, before)
        self.b.cbranch(self.b.icmp_signed("<", index, stop), body, done)
        self.b.position_at_end(body)
        yield index
        index.add_incoming(self.add(index, step), self.b.block)
        self.b.branch(head)
        self.b.position_at_end(done)

    def room(self, kind: Any, count: int = 1) -> Any:
        """Memory on the stack (which becomes a register where it can)."""
        with self.b.goto_block(self.entry):
            self.b.position_at_start(self.entry)
            return self.b.alloca(kind, size=ir.Constant(I32, count))

    def address(self, room: Any) -> Any:
        return self.b.ptrtoint(room, I64)

    def load(self, address: Any, kind: Any, offset: int = 0, align: int = 1) -> Any:
        place = self.add(address, offset) if offset else address
        return self.b.load(self.b.inttoptr(place, kind.as_pointer()), align=align)

    def store(self, value: Any, address: Any, offset: int = 0, align: int = 1) -> None:
        place = self.add(address, offset) if offset else address
        self.b.store(value, self.b.inttoptr(place, value.type.as_pointer()), align=align)

    def floats(self, address: Any, lanes: int, offset: int = 0) -> Any:
        return self.load(address, ir.VectorType(F32, lanes), offset, 4)

    def zeros(self, lanes: int) -> Any:
        return ir.Constant(ir.VectorType(F32, lanes), [0.0] * lanes)

    def splat(self, value: Any, lanes: int) -> Any:
        kind = ir.VectorType(value.type, lanes)
        first = self.b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
        return self.b.shuffle_vector(first, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        kind = a.type
        name = f"llvm.fma.v{kind.count}f32" if isinstance(kind, ir.VectorType) else "llvm.fma.f32"
        return self.b.call(self._declare(name, ir.FunctionType(kind, [kind] * 3)), [a, b, c])

    def total(self, vector: Any) -> Any:
        name = f"llvm.vector.reduce.fadd.v{vector.type.count}f32"
        function = self._declare(name, ir.FunctionType(F32, [F32, vector.type]))
        return self.b.call(function, [ir.Constant(F32, 0.0), vector], fastmath=("reassoc",))

    def _declare(self, name: str, kind: Any) -> Any:
        return self.module.globals.get(name) or ir.Function(self.module, kind, name)

    def numbers(self, address: Any, reading: Reading, channel: int, dim: int, lanes: int) -> Any:
        """``lanes`` numbers of a token of ``dim`` from ``channel`` on, as floats; codes bare, symmetric ones around zero."""
        floats, whole = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)
        kind = reading.kind
        if kind == "float32":
            return self.floats(address, lanes, 4 * channel)
        if kind == "float16":
            return self.b.fpext(self.load(address, ir.VectorType(F16, lanes), 2 * channel), floats)
        if kind == "bfloat16":
            raw = self.b.zext(self.load(address, ir.VectorType(I16, lanes), 2 * channel), whole)
            return self.b.bitcast(self.b.shl(raw, ir.Constant(whole, [16] * lanes)), floats)
        small = ir.VectorType(I8, lanes)
        if kind in ("e4m3", "e5m2"):
            return self._small_floats(self.load(address, small, channel), kind, lanes)
        code, start, done = None, 0, 0
        for part in PARTS[reading.bits]:
            width = dim * part // 8
            plane, byte = divmod(channel, width)
            raw = self.load(address, small, start + byte)
            if plane:
                raw = self.b.lshr(raw, ir.Constant(small, [plane * part] * lanes))
            if (plane + 1) * part < 8:
                raw = self.b.and_(raw, ir.Constant(small, [2**part - 1] * lanes))
            code = raw if code is None else self.b.or_(code, self.b.shl(raw, ir.Constant(small, [done] * lanes)))
            start, done = start + width, done + part
        out = self.b.sitofp(self.b.zext(code, whole), floats)
        if kind == "normal":
            return self._normal(out, reading.bits)
        return self.b.fsub(out, ir.Constant(floats, [float(2 ** (reading.bits - 1))] * lanes)) if reading.symmetric else out

    def _small_floats(self, raw: Any, kind: str, lanes: int) -> Any:
        """Bytes as 8-bit floats: moved to where float16 has its exponent, then, for e4m3, scaled by what the exponents' biases differ."""
        wide, floats = ir.VectorType(I16, lanes), ir.VectorType(F32, lanes)
        bits = self.b.zext(raw, wide)
        if kind == "e5m2":
            moved = self.b.shl(bits, ir.Constant(wide, [8] * lanes))
            return self.b.fpext(self.b.bitcast(moved, ir.VectorType(F16, lanes)), floats)
        sign = self.b.shl(self.b.and_(bits, ir.Constant(wide, [0x80] * lanes)), ir.Constant(wide, [8] * lanes))
        size = self.b.shl(self.b.and_(bits, ir.Constant(wide, [0x7F] * lanes)), ir.Constant(wide, [7] * lanes))
        half = self.b.bitcast(self.b.or_(sign, size), ir.VectorType(F16, lanes))
        return self.b.fmul(self.b.fpext(half, floats), ir.Constant(floats, [256.0] * lanes))

    def _normal(self, code: Any, bits: int) -> Any:
        """The level that a code numbers: an odd polynomial that goes through all of them, which needs no table."""
        lanes, top = code.type.count, (2**bits - 1) / 2
        constant = lambda x: ir.Constant(code.type, [x] * lanes)  # noqa: E731
        place = self.b.fmul(self.b.fsub(code, constant(top)), constant(1 / top))
        square = self.b.fmul(place, place)
        *higher, last = odd_polynomial(normal_levels(bits))
        out = constant(last)
        for coefficient in reversed(higher):
            out = self.fma(out, square, constant(coefficient))
        return self.b.fmul(out, place)

    def scales(self, address: Any, half: bool, first: int, lanes: int) -> Any:
        return self.numbers(address, Reading("float16" if half else "float32"), first, 1, lanes)


def score(w: Writer, reading: Reading, dim: int, rows: int, a: dict[str, Any], first: Any, last: Any) -> None:
    """Products of ``rows`` query rows with tokens ``first`` to ``last`` of one head. ``a``: addresses of this head."""
    folds = reading.axis == "channel" and not reading.table
    by_group = reading.axis == "token"
    groups = dim // reading.group if by_group else 1
    query, room = a["rows"], w.room(ir.VectorType(F32, LANES), -(-rows * dim // LANES))
    offsets = [w.room(F32) for _ in range(rows)]
    row_bytes = 4 * dim

    def tokens(start: Any, stop: Any, query: Any) -> None:
        for m in range(0, rows, ROWS):
            count = min(ROWS, rows - m)
            with w.loop(start, stop) as n:
                key = w.add(a["data"], w.mul(n, reading.row(dim)))
                scale = zero = None
                if reading.table:
                    line = w.b.sext(w.load(w.add(a["table"], w.mul(n, 4)), I32, align=4), I64)
                    scale, zero = (w.add(a[x], w.mul(line, dim * reading.scale_item)) for x in ("scale", "zero"))
                elif by_group:
                    scale, zero = (w.add(a[x], w.mul(n, groups * reading.scale_item)) for x in ("scale", "zero"))
                sums = _products(w, reading, dim, count, w.add(query, m * row_bytes), key, scale, zero)
                for r in range(count):
                    total = w.total(sums[r])
                    if folds and not reading.symmetric:
                        total = w.b.fadd(total, w.b.load(offsets[m + r]))
                    for g in range(groups if by_group and not reading.symmetric else 0):
                        z = w.b.extract_element(w.scales(zero, reading.half, g, 1), ir.Constant(I32, 0))
                        total = w.fma(w.load(a["sums"], F32, 4 * ((m + r) * groups + g), 4), z, total)
                    w.store(total, w.add(w.add(a["out"], w.mul(a["out_bytes"], m + r)), w.mul(n, 4)), align=4)

    if not folds:
        tokens(first, last, query)
        return
    # the scales of a group of tokens go into the query, and its zero points into a number a row
    size = w.number(reading.group)
    folded = w.address(room)
    with w.loop(w.b.sdiv(first, size), w.b.sdiv(w.add(last, reading.group - 1), size)) as group:
        scale, zero = (w.add(a[x], w.mul(group, dim * reading.scale_item)) for x in ("scale", "zero"))
        lanes = gcd(LANES, dim)
        offset = [w.zeros(lanes) for _ in range(rows)]
        for channel in range(0, dim, lanes):
            s = w.scales(scale, reading.half, channel, lanes)
            z = None if reading.symmetric else w.scales(zero, reading.half, channel, lanes)
            for r in range(rows):
                q = w.floats(query, lanes, 4 * (r * dim + channel))
                w.store(w.b.fmul(q, s), folded, 4 * (r * dim + channel), 4)
                if z is not None:
                    offset[r] = w.fma(q, z, offset[r])
        for r in range(rows):
            w.b.store(w.total(offset[r]), offsets[r])
        start = w.mul(group, reading.group)
        begin = w.b.select(w.b.icmp_signed("<", start, first), first, start)
        tokens(begin, w.least(w.add(start, reading.group), last), folded)


def _products(w: Writer, reading: Reading, dim: int, rows: int, query: Any, key: Any, scale: Any, zero: Any) -> list[Any]:
    """Sums, still in vectors, of ``rows`` queries times one token."""
    step = reading.step(dim)
    lanes = gcd(LANES, step)
    by_group = reading.axis == "token"
    whole = [w.zeros(lanes) for _ in range(rows)]
    for start in range(0, dim, step):
        sums = [w.zeros(lanes) for _ in range(rows)] if by_group else whole
        for channel in range(start, start + step, lanes):
            x = w.numbers(key, reading, channel, dim, lanes)
            if reading.table:
                s = w.scales(scale, reading.half, channel, lanes)
                x = w.b.fmul(x, s) if reading.symmetric else w.fma(x, s, w.scales(zero, reading.half, channel, lanes))
            for r in range(rows):
                sums[r] = w.fma(w.floats(query, lanes, 4 * (r * dim + channel)), x, sums[r])
        if by_group:
            s = w.b.extract_element(w.scales(scale, reading.half, start // reading.group, 1), ir.Constant(I32, 0))
            for r in range(rows):
                whole[r] = w.fma(w.splat(s, lanes), sums[r], whole[r])
    return whole


def turned(w: Writer, reading: Reading, dim: int, rows: int, a: dict[str, Any], first: Any, last: Any) -> None:
    """As :func:`score`, for keys that are turned by their place first: nothing can be folded into the query, so each number is made whole."""
    by_group, half = reading.axis == "token", reading.turn // 2
    groups = dim // reading.group if by_group else 1
    lanes = gcd(gcd(LANES, reading.step(dim)), gcd(half, dim - reading.turn) if dim > reading.turn else half)
    for m in range(0, rows, ROWS):
        count = min(ROWS, rows - m)
        query = w.add(a["rows"], m * 4 * dim)
        with w.loop(first, last) as n:
            key = w.add(a["data"], w.mul(n, reading.row(dim)))
            if reading.placed:
                place = w.b.sext(w.load(w.add(a["places"], w.mul(n, 4)), I32, align=4), I64)
            else:
                place = w.add(a["start"], n)
            wave = w.add(a["waves"], w.mul(place, 4 * reading.turn))
            scale = zero = None
            if reading.axis:
                if reading.table:
                    line = w.b.sext(w.load(w.add(a["table"], w.mul(n, 4)), I32, align=4), I64)
                else:
                    line = n if by_group else w.b.sdiv(n, w.number(reading.group))
                width = (groups if by_group else dim) * reading.scale_item
                scale, zero = (w.add(a[x], w.mul(line, width)) for x in ("scale", "zero"))

            sums = [w.zeros(lanes) for _ in range(count)]
            for channel in range(0, half, lanes):
                one, two = (_whole(w, reading, dim, lanes, c, key, scale, zero) for c in (channel, channel + half))
                cos, sin = w.floats(wave, lanes, 4 * channel), w.floats(wave, lanes, 4 * (half + channel))
                _add(w, sums, query, dim, channel, w.b.fsub(w.b.fmul(one, cos), w.b.fmul(two, sin)))
                _add(w, sums, query, dim, channel + half, w.fma(two, cos, w.b.fmul(one, sin)))
            for channel in range(reading.turn, dim, lanes):
                _add(w, sums, query, dim, channel, _whole(w, reading, dim, lanes, channel, key, scale, zero))
            for r in range(count):
                w.store(w.total(sums[r]), w.add(w.add(a["out"], w.mul(a["out_bytes"], m + r)), w.mul(n, 4)), align=4)


def _whole(w: Writer, reading: Reading, dim: int, lanes: int, channel: int, key: Any, scale: Any, zero: Any) -> Any:
    """Numbers of one token with its scales and zero points, whose lines begin at ``scale`` and ``zero`` (None: there are none)."""
    x = w.numbers(key, reading, channel, dim, lanes)
    if scale is None:
        return x

    def of(line: Any) -> Any:
        if reading.axis != "token":
            return w.scales(line, reading.half, channel, lanes)
        return w.splat(_one(w, w.scales(line, reading.half, channel // reading.group, 1)), lanes)

    return w.b.fmul(x, of(scale)) if reading.symmetric else w.fma(x, of(scale), of(zero))


def _add(w: Writer, sums: list[Any], query: Any, dim: int, channel: int, x: Any) -> None:
    for r in range(len(sums)):
        sums[r] = w.fma(w.floats(query, x.type.count, 4 * (r * dim + channel)), x, sums[r])


def _one(w: Writer, vector: Any) -> Any:
    return w.b.extract_element(vector, ir.Constant(I32, 0))


def mix(w: Writer, reading: Reading, dim: int, rows: int, a: dict[str, Any], part: Any, parts: Any) -> None:
    """Weighted sums of one head's values. Threads that share a head take chunks of channels: ``part`` of ``parts`` (tokens would need a sum)."""
    step = reading.step(dim)
    lanes = gcd(LANES, step)
    wide = 2 if step // lanes % 2 == 0 else 1  # vectors at a time: with four rows, eight sums stay in registers
    by_group = reading.axis == "token"
    groups = dim // reading.group if by_group else 1
    scaled = w.room(F32, rows * groups * BLOCK)
    offsets = [[w.room(ir.VectorType(F32, 1)) for _ in range(groups)] for _ in range(rows)]
    tokens, zero_vector = a["tokens"], w.zeros(1)
    for r in range(rows):
        for g in range(groups):
            w.b.store(zero_vector, offsets[r][g])
    chunks = list(range(0, dim, wide * lanes))
    mine = [w.b.icmp_signed("==", w.b.srem(w.number(i), parts), part) for i in range(len(chunks))]
    for number, channel in enumerate(chunks):
        with w.b.if_then(mine[number]):
            for r in range(rows):
                for v in range(wide):
                    w.store(w.zeros(lanes), w.add(a["out"], w.mul(a["out_bytes"], r)), 4 * (channel + v * lanes), 4)
    with w.loop(w.number(0), tokens, BLOCK) as start:
        count = w.least(w.b.sub(tokens, start), w.number(BLOCK))
        if by_group:
            _scale_weights(w, reading, rows, groups, a, start, count, scaled, offsets)
        base = w.address(scaled) if by_group else w.add(a["rows"], w.mul(start, 4))
        row_bytes = w.number(BLOCK * 4) if by_group else a["row_bytes"]
        data = w.add(a["data"], w.mul(start, reading.row(dim)))
        for number, channel in enumerate(chunks):
            with w.b.if_then(mine[number]):
                for m in range(0, rows, ROWS):
                    few = min(ROWS, rows - m)
                    group = channel // reading.group if by_group else 0
                    lines = [w.add(base, w.mul(row_bytes, group * rows + m + r)) for r in range(few)]
                    places = [w.add(w.add(a["out"], w.mul(a["out_bytes"], m + r)), 4 * channel) for r in range(few)]
                    sums = [[w.room(ir.VectorType(F32, lanes)) for _ in range(wide)] for _ in range(few)]
                    for r in range(few):
                        for v in range(wide):
                            w.b.store(w.floats(places[r], lanes, 4 * v * lanes), sums[r][v])
                    with w.loop(w.number(0), count) as n:
                        row = w.add(data, w.mul(n, reading.row(dim)))
                        x = [w.numbers(row, reading, channel + v * lanes, dim, lanes) for v in range(wide)]
                        for r in range(few):
                            weight = w.splat(w.load(w.add(lines[r], w.mul(n, 4)), F32, align=4), lanes)
                            for v in range(wide):
                                w.b.store(w.fma(weight, x[v], w.b.load(sums[r][v])), sums[r][v])
                    for r in range(few):
                        for v in range(wide):
                            w.store(w.b.load(sums[r][v]), places[r], 4 * v * lanes, 4)
    if not by_group or reading.symmetric:
        return
    for number, channel in enumerate(chunks):
        with w.b.if_then(mine[number]):
            for r in range(rows):
                place = w.add(w.add(a["out"], w.mul(a["out_bytes"], r)), 4 * channel)
                offset = w.b.extract_element(w.b.load(offsets[r][channel // reading.group]), ir.Constant(I32, 0))
                for v in range(wide):
                    old = w.floats(place, lanes, 4 * v * lanes)
                    w.store(w.b.fadd(old, w.splat(offset, lanes)), place, 4 * v * lanes, 4)


def _scale_weights(
    w: Writer,
    reading: Reading,
    rows: int,
    groups: int,
    a: dict[str, Any],
    start: Any,
    count: Any,
    scaled: Any,
    offsets: list[list[Any]],
) -> None:
    """A block's weights times the tokens' scales, a copy a group of channels; weights times zero points are summed up on the way."""
    to, item = w.address(scaled), reading.scale_item
    scale, zero = (w.add(a[x], w.mul(start, groups * item)) for x in ("scale", "zero"))
    line = w.add(a["rows"], w.mul(start, 4))
    lanes = LANES
    wholes = w.b.and_(count, w.number(-lanes))

    def some(n: Any, lanes: int) -> None:
        both = []
        for address in (scale,) if reading.symmetric else (scale, zero):
            raw = w.scales(w.add(address, w.mul(n, groups * item)), reading.half, 0, lanes * groups)
            undefined = ir.Constant(raw.type, ir.Undefined)
            masks = [ir.Constant(ir.VectorType(I32, lanes), [j * groups + g for j in range(lanes)]) for g in range(groups)]
            both.append([w.b.shuffle_vector(raw, undefined, mask) for mask in masks])
        for r in range(rows):
            p = w.floats(w.add(w.add(line, w.mul(a["row_bytes"], r)), w.mul(n, 4)), lanes)
            for g in range(groups):
                w.store(w.b.fmul(p, both[0][g]), w.add(w.add(to, 4 * BLOCK * (g * rows + r)), w.mul(n, 4)), align=4)
                if reading.symmetric:
                    continue
                more = (
                    w.total(w.b.fmul(p, both[1][g]))
                    if lanes > 1
                    else w.b.extract_element(w.b.fmul(p, both[1][g]), ir.Constant(I32, 0))
                )
                w.b.store(w.b.fadd(w.b.load(offsets[r][g]), w.splat(more, 1)), offsets[r][g])

    with w.loop(w.number(0), wholes, lanes) as n:
        some(n, lanes)
    with w.loop(wholes, count) as n:
        some(n, 1)


@functools.cache
def _engine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=3, jit=True, codemodel="jitdefault"
    )
    for name, address in zip(("omp_get_thread_num", "omp_get_num_threads"), openmp()[1:], strict=True):
        if address:
            llvm.add_symbol(name, address)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), target), target


_functions: dict[tuple[Any, ...], int] = {}
_compiling = threading.Lock()


def function(what: str, reading: Reading, dim: int, rows: int) -> int:
    """The address of ``void f(const int64_t *numbers)``; compiled at the first call, by one thread."""
    key = (what, reading, dim, rows)
    if key not in _functions:
        with _compiling:
            if key not in _functions:
                _functions[key] = _compile(*key)
    return _functions[key]


def _compile(what: str, reading: Reading, dim: int, rows: int) -> int:
    module = ir.Module(name="kvlab")
    module.triple = llvm.get_default_triple()
    w = Writer(module, f"kvlab_{what}_{len(_functions)}", [I64.as_pointer()])
    fields = {name: w.b.load(w.b.gep(w.function.args[0], [w.number(i)])) for i, name in enumerate(FIELDS)}
    if openmp()[0]:
        kind = ir.FunctionType(I32, [])
        thread, threads = (
            w.b.sext(w.b.call(ir.Function(module, kind, name), []), I64) for name in ("omp_get_thread_num", "omp_get_num_threads")
        )
    else:
        thread, threads = w.number(0), w.number(1)
    heads, splits = fields["heads"], fields["splits"]
    items = w.mul(heads, splits)
    # item i is part i % splits of head i // splits; a thread takes every item that falls to it in turn
    counter = w.room(I64)
    w.b.store(thread, counter)
    with w.loop(w.number(0), w.b.sdiv(w.add(w.b.sub(items, w.number(1)), threads), threads)):
        item = w.b.load(counter)
        w.b.store(w.add(item, threads), counter)
        with w.b.if_then(w.b.icmp_signed("<", item, items)):
            head, part = w.b.sdiv(item, splits), w.b.srem(item, splits)
            a = dict(fields)
            for name in ("data", "scale", "zero", "table"):
                a[name] = w.add(fields[name], w.mul(head, fields[f"{name}_head"]))
            a["rows"] = w.add(fields["rows"], w.mul(w.mul(fields["row_bytes"], rows), head))
            a["out"] = w.add(fields["out"], w.mul(w.mul(fields["out_bytes"], rows), head))
            if what == "score":
                groups = dim // reading.group if reading.axis == "token" else dim
                a["sums"] = w.add(fields["sums"], w.mul(head, 4 * rows * groups))
                share = w.b.sdiv(w.add(w.b.sub(fields["tokens"], w.number(1)), splits), splits)
                first = w.mul(part, share)
                a["places"] = w.add(fields["places"], w.mul(head, fields["places_head"]))
                products = turned if reading.turn else score
                products(w, reading, dim, rows, a, first, w.least(w.add(first, share), fields["tokens"]))
            else:
                mix(w, reading, dim, rows, a, part, splits)
    w.b.ret_void()
    compiled = llvm.parse_assembly(str(module))
    compiled.verify()
    engine, target = _engine()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    passes = llvm.create_pass_builder(target, options)
    passes.getModulePassManager().run(compiled, passes)
    engine.add_module(compiled)
    engine.finalize_object()
    return int(engine.get_function_address(w.function.name))


def call(what: str, reading: Reading, dim: int, rows: int, threads: int, numbers: tuple[int, ...]) -> None:
    """Run it on ``threads`` of torch's threads. ``numbers``: in the order of ``FIELDS``."""
    address = function(what, reading, dim, rows)
    table = (ctypes.c_int64 * len(FIELDS))(*numbers)
    _parallel()(address, ctypes.addressof(table), threads, 0)


@functools.cache
def _parallel() -> Any:
    """``GOMP_parallel``, or a plain call where there is no OpenMP. Either lets go of the interpreter's lock."""
    address = openmp()[0]
    if address:
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(address)
    plain = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    return lambda function, table, threads, flags: plain(function)(table)
