"""A served model, seen from outside: any server that speaks OpenAI's chat or completions API, streaming, at a chosen concurrency.

rows = measure_endpoint("http://localhost:8000/v1", model="llama", prompts=["…"], concurrency=4)
print(summary(rows))
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Request:
    """One request. ``first_token``: seconds from sending to the first piece of text; ``between``: seconds between later pieces (a server may send several
    tokens in one). ``tokens``: as the server counted them, else pieces. ``why``: what went wrong; then what came until then stands here all the same.
    """

    prompt: int
    ok: bool
    first_token: float | None = None
    between: tuple[float, ...] = ()
    tokens: int = 0
    seconds: float = 0.0
    text: str = ""
    why: str = ""


@dataclass(frozen=True)
class Summary:
    """Times in seconds, medians and 95th percentiles over the requests that came through; ``throughput``: their tokens a second of the whole run.

    ``repeated``: the median first token of prompts that had been sent before, against ``fresh``, of those that had not: what a prefix cache saves.
    ``metrics``: what the server publishes about its KV cache, by its own names.
    """

    requests: int
    failed: dict[str, int]
    first_token: float | None
    first_token_p95: float | None
    between: float | None
    between_p95: float | None
    throughput: float
    fresh: float | None
    repeated: float | None
    metrics: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        def ms(value: float | None) -> str:
            return "-" if value is None else f"{1e3 * value:.0f} ms"

        lines = [
            f"{self.requests} requests, {sum(self.failed.values())} failed",
            f"first token {ms(self.first_token)} (95%: {ms(self.first_token_p95)}), between tokens {ms(self.between)} (95%: {ms(self.between_p95)})",
            f"{self.throughput:.1f} tokens a second",
        ]
        if self.repeated is not None:
            lines.append(f"first token of prompts sent before {ms(self.repeated)}, of new ones {ms(self.fresh)}")
        lines += [f"failed {count} times: {why}" for why, count in self.failed.items()]
        lines += [f"{name} {value:g}" for name, value in self.metrics.items()]
        return "\n".join(lines)


def measure_endpoint(
    url: str,
    *,
    model: str,
    prompts: Sequence[str],
    max_tokens: int = 64,
    concurrency: int = 1,
    timeout: float = 60.0,
    chat: bool = True,
    key: str = "",
) -> list[Request]:
    """Send every prompt, in order, at most ``concurrency`` at once -> a row each, in the order of the prompts. What fails is a row with its reason.

    Args:
        url: up to and with ``/v1``. model: its name there. key: sent as a bearer token.
        max_tokens: of each answer (temperature 0).
        timeout: seconds without a byte after which a request has failed.
        chat: ``/chat/completions``, else ``/completions``.

    Raises ``ValueError`` for a URL that is none, no prompts, or numbers out of range; ``ModuleNotFoundError`` without httpx.
    """
    import httpx

    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise ValueError(f"url={url!r} is no address (allowed: http://host:port/v1)")
    if not prompts:
        raise ValueError("prompts is empty (allowed: one or more texts)")
    for name, value in (("max_tokens", max_tokens), ("concurrency", concurrency)):
        if value < 1:
            raise ValueError(f"{name}={value} is out of range (allowed: 1 or more)")
    if timeout <= 0:
        raise ValueError(f"timeout={timeout} must be above 0 seconds")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with (
        httpx.Client(base_url=url.rstrip("/"), timeout=timeout, headers=headers) as client,
        ThreadPoolExecutor(concurrency) as pool,
    ):
        jobs = [pool.submit(_send, client, model, prompt, number, max_tokens, chat) for number, prompt in enumerate(prompts)]
        return [job.result() for job in jobs]


def _send(client: Any, model: str, prompt: str, number: int, max_tokens: int, chat: bool) -> Request:
    import httpx

    body: dict[str, Any] = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    start, arrivals, said, counted, ended = time.perf_counter(), list[float](), list[str](), 0, False
    why = ""
    try:
        with client.stream("POST", "/chat/completions" if chat else "/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise _Refused(f"status {response.status_code}: {response.text[:200]}")
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    ended = True
                    break
                event = json.loads(data)
                counted = (event.get("usage") or {}).get("completion_tokens") or counted
                for choice in event.get("choices", []):
                    piece = (choice.get("delta") or {}).get("content") if chat else choice.get("text")
                    if piece:
                        arrivals.append(time.perf_counter())
                        said.append(piece)
        if not ended:
            why = "the stream ended without [DONE]"
        elif not arrivals:
            why = "no text came"
    except (httpx.HTTPError, _Refused, ValueError) as error:
        why = f"{type(error).__name__.removeprefix('_')}: {error}"
    took = time.perf_counter() - start
    between = tuple(b - a for a, b in itertools.pairwise(arrivals))
    return Request(
        number, not why, arrivals[0] - start if arrivals else None, between, counted or len(arrivals), took, "".join(said), why
    )


class _Refused(Exception):
    pass


def summary(rows: Sequence[Request], prompts: Sequence[str], seconds: float, metrics: dict[str, float] | None = None) -> Summary:
    """The numbers over ``rows``; ``seconds``: what the whole run took. ``prompts``: as they were sent, to see which had been sent before."""
    came = [row for row in rows if row.ok]
    firsts, between = [row.first_token for row in came if row.first_token is not None], [x for row in came for x in row.between]
    failed: dict[str, int] = {}
    for row in rows:
        if not row.ok:
            why = re.sub(r"request '[^']*'", "a request", row.why)  # its name is the server's affair
            failed[why] = failed.get(why, 0) + 1
    seen: set[str] = set()
    known = [prompt in seen or bool(seen.add(prompt)) for prompt in prompts]  # type: ignore[func-returns-value]
    again = [row.first_token for row in came if known[row.prompt] and row.first_token is not None]
    fresh = [row.first_token for row in came if not known[row.prompt] and row.first_token is not None]
    return Summary(
        len(rows), failed, _middle(firsts), _high(firsts), _middle(between), _high(between), sum(row.tokens for row in came) / seconds if seconds else 0.0,
        _middle(fresh), _middle(again), metrics or {},
    )  # fmt: skip


def _middle(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _high(values: Sequence[float]) -> float | None:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))] if values else None


def kv_metrics(url: str, timeout: float = 5.0, key: str = "") -> dict[str, float]:
    """What the server publishes at ``/metrics`` about its KV cache and prefixes (vLLM's names); empty where it publishes nothing."""
    import httpx

    parts = urlsplit(url)
    found: dict[str, float] = {}
    try:
        answer = httpx.get(
            f"{parts.scheme}://{parts.netloc}/metrics", timeout=timeout, headers={"Authorization": f"Bearer {key}"} if key else {}
        )
    except httpx.HTTPError:
        return found
    if answer.status_code != 200:
        return found
    for line in answer.text.splitlines():
        name, _, value = line.rpartition(" ")
        plain = name.partition("{")[0]
        if not line.startswith("#") and any(word in plain for word in ("kv_cache", "prefix_cache", "cache_usage")):
            with contextlib.suppress(ValueError):
                found[plain] = found.get(plain, 0.0) + float(value)
    return found


def watched(url: str, every: float = 0.5, key: str = "") -> Watched:
    """``with watched(url) as seen:`` — the highest value of each KV metric while requests run, read every ``every`` seconds."""
    return Watched(url, every, key)


class Watched:
    def __init__(self, url: str, every: float, key: str = "") -> None:
        self.key = key
        self.url, self.every, self.most, self._end = url, every, dict[str, float](), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while True:
            for name, value in kv_metrics(self.url, key=self.key).items():
                self.most[name] = max(value, self.most.get(name, value))
            if self._end.wait(self.every):
                return

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._end.set()
        self._thread.join()
