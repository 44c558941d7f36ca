"""A served model measured from outside: a real server on this machine that streams a tiny model's tokens, and one that does everything wrong."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("httpx")

from kvlab.lab import Lab
from kvlab.measure.endpoint import Request, kv_metrics, measure_endpoint, summary, watched
from tests.panels.conftest import Characters

METRICS = '# HELP x\nvllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:prefix_cache_hits_total{engine="0"} 12\nvllm:num_requests_running 1\n'


@pytest.fixture(scope="module")
def lab(llama) -> Lab:
    return Lab("tiny", llama, Characters())


@pytest.fixture(scope="module")
def served(lab) -> Iterator[str]:
    """The tiny model behind OpenAI's API; the prompt says what shall go wrong."""
    lock, running, most = threading.Lock(), [0], [0]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(METRICS.encode())

        def event(self, data: object) -> None:
            with contextlib.suppress(OSError):  # the client has given up
                self.wfile.write(f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode())
                self.wfile.flush()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            chat = self.path.endswith("/chat/completions")
            prompt = body["messages"][0]["content"] if chat else body["prompt"]
            if prompt == "refuse":
                self.send_response(503)
                self.end_headers()
                self.wfile.write(b"no room")
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            try:
                if prompt == "silent":
                    time.sleep(2)
                if prompt == "garbage":
                    self.event("{not json")
                with lock:
                    made = lab.generate(prompt, max_new_tokens=body["max_tokens"])
                for number, token in enumerate(made.tokens):
                    time.sleep(0.02)
                    piece = lab.tokenizer.decode([token])
                    self.event({"choices": [{"delta": {"content": piece}} if chat else {"text": piece}]})
                    if prompt == "break" and number == 1:
                        return
                self.event({"choices": [], "usage": {"completion_tokens": len(made.tokens)}})
                self.event("[DONE]")
            finally:
                with lock:
                    running[0] -= 1

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


@pytest.mark.parametrize("chat", [True, False])
def test_what_comes_is_what_the_model_says(lab, served, chat):
    prompts = ["a first prompt", "another one", "a first prompt"]
    start = time.perf_counter()
    rows = measure_endpoint(served, model="tiny", prompts=prompts, max_tokens=5, concurrency=2, chat=chat)
    took = time.perf_counter() - start
    for row, prompt in zip(rows, prompts, strict=True):
        assert row.ok and row.text == lab.generate(prompt, max_new_tokens=5).text and row.tokens == 5
        assert 0.02 <= row.first_token <= row.seconds and len(row.between) == 4 and min(row.between) > 0.01
    made = summary(rows, prompts, took, kv_metrics(served))
    assert made.requests == 3 and not made.failed and made.throughput == pytest.approx(15 / took)
    assert made.repeated == rows[2].first_token and made.fresh == pytest.approx((rows[0].first_token + rows[1].first_token) / 2)
    assert made.metrics == {"vllm:kv_cache_usage_perc": 0.25, "vllm:prefix_cache_hits_total": 12.0}
    assert "15.0 tokens" in str(summary(rows, prompts, 1.0)) and "prefix_cache_hits" in str(made)


def test_every_fault_is_a_row_with_a_reason(served):
    prompts = ["refuse", "break", "garbage", "silent", "fine"]
    rows = measure_endpoint(served, model="tiny", prompts=prompts, max_tokens=4, concurrency=5, timeout=1.0)
    assert [row.ok for row in rows] == [False, False, False, False, True]
    assert "status 503: no room" in rows[0].why and "without [DONE]" in rows[1].why and rows[1].tokens == 2
    assert "JSONDecodeError" in rows[2].why and "ReadTimeout" in rows[3].why
    made = summary(rows, prompts, 1.0)
    assert sum(made.failed.values()) == 4 and made.throughput == 4.0 and "4 failed" in str(made)


def test_nobody_there():
    (row,) = measure_endpoint("http://127.0.0.1:9/v1", model="x", prompts=["a"], timeout=2.0)
    assert not row.ok and "ConnectError" in row.why
    assert summary([row], ["a"], 1.0).first_token is None and kv_metrics("http://127.0.0.1:9/v1") == {}


def test_metrics_while_it_runs(served):
    with watched(served, every=0.02) as seen:
        time.sleep(0.1)
    assert seen.most["vllm:kv_cache_usage_perc"] == 0.25


def test_percentiles_by_hand():
    rows = [Request(i, True, first_token=float(i), between=(0.5,), tokens=2) for i in range(1, 21)]
    made = summary(rows, [str(i) for i in range(21)], 10.0)
    assert made.first_token == 10.5 and made.first_token_p95 == 20.0 and made.throughput == 4.0 and made.repeated is None


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(url="localhost"), "url='localhost' is no address"),
        (dict(prompts=[]), "prompts is empty"),
        (dict(max_tokens=0), "max_tokens=0"),
        (dict(concurrency=0), "concurrency=0"),
        (dict(timeout=0), "timeout=0 must be above 0"),
    ],
)
def test_what_cannot_be(given, message):
    asked = dict(url="http://localhost:1/v1", model="x", prompts=["a"]) | given
    with pytest.raises(ValueError, match=message):
        measure_endpoint(asked.pop("url"), **asked)


def test_from_the_command_line(served, monkeypatch):
    from typer.testing import CliRunner

    from kvlab import cli, texts

    monkeypatch.setattr(texts, "long_text", lambda: "some words of a text " * 3)
    done = CliRunner().invoke(cli.app(), ["measure", "--endpoint", served, "--model", "tiny", "--requests", "1"])
    assert done.exit_code == 0, done.output
    assert (
        "1 requests, 0 failed" in done.output and "tokens a second" in done.output and "kv_cache_usage_perc 0.25" in done.output
    )
    failed = CliRunner().invoke(cli.app(), ["measure", "--endpoint", "nowhere"])
    assert failed.exit_code == 1 and "is no address" in str(failed.exception)
