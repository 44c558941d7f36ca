"""Devices and links by their datasheets, and the roofline: how fast a decode step could be at best.

The table is `data/hardware.csv`, each row with its source. Sizes are read as printed, in units of 10^9 bytes, so a board often
reports a few percent more. Times here are predictions, floors that nothing beats, and say so.
"""

import csv
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from kvlab import _data
from kvlab.geometry import Geometry, _sequences, _whole, kv_bytes, state_bytes, weight_bytes

KINDS = ("gpu", "cpu", "link", "disk")


@dataclass(frozen=True)
class Hardware:
    """One device or link.

    kind: "gpu", "cpu", "link" or "disk". memory_bytes: its own memory (None for a link). bandwidth: bytes/s, of the memory, of
    one direction of a link, of a disk's sequential read. flops: dense 16-bit FLOP/s (`note` says when it is another precision).
    link: the name of the link to the host (to the disk, for a CPU).
    """

    name: str
    kind: str
    memory_bytes: int | None
    bandwidth: int
    flops: int | None = None
    link: str | None = None
    note: str = field(default="", compare=False)
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}; allowed: {', '.join(KINDS)}")
        _whole("bandwidth", self.bandwidth, low=1)
        for name in ("memory_bytes", "flops"):
            if (value := getattr(self, name)) is not None:
                _whole(name, value, low=1)

    def capacity(self, devices: int = 1) -> int:
        """Bytes that `devices` of it hold together. Raises `ValueError` for a link."""
        if self.memory_bytes is None:
            raise ValueError(f"{self.name} is a {self.kind}: it holds nothing; choose of: {', '.join(names('gpu', 'cpu'))}")
        return self.memory_bytes * _whole("devices", devices, low=1)


@cache
def _table() -> dict[str, Hardware]:
    with _data.path("hardware.csv").open(encoding="utf-8", newline="") as file:
        return {row["name"]: _row(row) for row in csv.DictReader(file)}


def _row(row: dict[str, str]) -> Hardware:
    return Hardware(
        name=row["name"],
        kind=row["kind"],
        memory_bytes=int(row["memory_bytes"]) if row["memory_bytes"] else None,
        bandwidth=int(row["bandwidth"]),
        flops=int(row["flops"]) if row["flops"] else None,
        link=row["link"] or None,
        note=row["note"],
        source=row["source"],
    )


def names(*kinds: str) -> list[str]:
    """The rows of the table, of these kinds or of all."""
    return [row.name for row in _table().values() if not kinds or row.kind in kinds]


def find(name: str) -> Hardware:
    """A row of the table; case and punctuation do not matter, a unique beginning is enough. `ValueError` lists the names."""
    return _table()[_data.pick(name, _table(), "hardware")]


@dataclass(frozen=True)
class Roofline:
    """A predicted floor for one step. bytes: read from memory; flops: computed; seconds: the slower of the two."""

    memory_seconds: float
    compute_seconds: float
    bytes: int
    flops: int
    label: str = "predicted"

    @property
    def seconds(self) -> float:
        return max(self.memory_seconds, self.compute_seconds)

    @property
    def bound(self) -> str:
        """What it waits for: "memory" or "compute"."""
        return "memory" if self.memory_seconds >= self.compute_seconds else "compute"

    def __str__(self) -> str:
        time = f"{self.seconds:,.2f} s" if self.seconds >= 1 else f"{self.seconds * 1e3:.2f} ms"
        return f"{self.label}: at least {time} a step, bound by {self.bound}"


def decode_time(
    geometry: Geometry,
    hardware: Hardware,
    tokens: int,
    *,
    batch: int = 1,
    requests: int = 1,
    devices: int = 1,
    weight_bits: int = 16,
    weight_bits_per_element: float | None = None,
    state_bits: int = 16,
    **how: Any,
) -> Roofline:
    """The floor of one decode step, max(bytes / bandwidth, FLOP / rate), with `tokens` tokens cached in each of batch x requests
    sequences.

    Bytes: the weights in use once, all KV once (`how`: as in `kvlab.geometry.kv_bytes`), the state read and written. FLOP: 2 a
    weight and sequence, 4 a query head, dim and token. `devices` share the work evenly. Left out: kernel launches, communication,
    dequantizing. Raises `ValueError` for hardware that does not compute.
    """
    if hardware.flops is None:
        raise ValueError(
            f"{hardware.name} is a {hardware.kind}: it does not compute; choose of: {', '.join(names('gpu', 'cpu'))}"
        )
    sequences, devices = _sequences(batch, requests), _whole("devices", devices, low=1)
    share = weights_read(geometry, sequences) / (geometry.parameters or 1)
    read = round(weight_bytes(geometry, weight_bits, bits_per_element=weight_bits_per_element) * share)
    read += kv_bytes(geometry, tokens, batch=batch, requests=requests, **how)
    read += 2 * state_bytes(geometry, batch=batch, requests=requests, bits=state_bits)
    flops = sequences * (2 * (geometry.active_parameters or 0) - 2 * _lookup(geometry) + attention_flops(geometry, tokens, **how))
    return Roofline(read / (hardware.bandwidth * devices), flops / (hardware.flops * devices), read, flops)


def weights_read(geometry: Geometry, sequences: int = 1) -> int:
    """Parameters that one decode step of `sequences` sequences reads: not an untied embedding table (a lookup), and of routed
    experts the expected number met, 1 - (1 - visited / experts)^sequences of them, if all are equally likely."""
    if geometry.parameters is None:
        raise ValueError(f"{geometry.name}: parameters unknown; give them: Geometry.from_config(config, parameters=...)")
    always = geometry.parameters - geometry.routed - _lookup(geometry)
    if not geometry.experts:
        return always
    return always + round(geometry.routed * (1 - (1 - geometry.experts_per_token / geometry.experts) ** sequences))


def attention_flops(geometry: Geometry, tokens: int, *, kept_tokens: Any = None, **_: Any) -> int:
    """FLOP of one new token's attention over `tokens` tokens: 2 a product of query and key, 2 a product of weight and value.

    MLA: in the absorbed form, where the latent serves as key and as value.
    """
    kept = tokens if kept_tokens is None else kept_tokens(tokens) if callable(kept_tokens) else kept_tokens
    total = 0
    for layer in geometry.kv_layers:
        products = layer.key_dim + layer.value_dim + (layer.key_dim if layer.kind == "latent" else 0)
        total += 2 * geometry.query_heads * min(layer.held(tokens), kept) * products
    return total


def _lookup(geometry: Geometry) -> int:
    return 0 if geometry.tied else geometry.vocabulary * geometry.hidden_size


def transfer_time(count: int, link: Hardware | str) -> float:
    """Predicted floor, in seconds, of moving `count` bytes over a link or reading them from a disk, at its full rate."""
    link = find(link) if isinstance(link, str) else link
    return _whole("count", count) / link.bandwidth
