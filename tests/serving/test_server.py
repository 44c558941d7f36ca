"""The endpoint: what clients get is what the engine says; whoever hangs up, sends nonsense or has no key disturbs nobody."""

import json
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("tornado")

import httpx

from kvlab import cli
from kvlab.lab import Lab
from kvlab.measure.endpoint import measure_endpoint, summary, watched
from kvlab.serving import Engine, Sampling
from kvlab.serving.server import serve
from tests.panels.conftest import Characters

TEXT = "The quick brown fox jumps over the lazy dog, again and again."


class Chatty(Characters):
    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        if messages[0]["role"] == "nobody":
            raise ValueError("no such role")
        return "".join(f"{one['role']}: {one['content']} " for one in messages)


@pytest.fixture(scope="module")
def lab(llama: Any) -> Lab:
    return Lab("tiny", llama, Chatty())  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def served(lab: Lab) -> Iterator[tuple[Engine, str, str]]:
    engine, said = Engine(lab, kv_memory="1 MB", block_size=8), queue.Queue[Any]()
    thread = threading.Thread(target=serve, args=(engine,), kwargs={"port": 0, "ready": lambda *what: said.put(what)})
    thread.start()
    address, key, stop = said.get(timeout=30)
    yield engine, address, key
    stop()
    thread.join(timeout=30)
    assert not thread.is_alive()


@pytest.fixture
def client(served: Any) -> Iterator[Any]:
    with httpx.Client(base_url=served[1], headers={"Authorization": f"Bearer {served[2]}"}, timeout=30) as made:
        yield made


def alone(lab: Lab, text: str, new: int, **more: Any) -> str:
    return Engine(lab, kv_memory="1 MB").generate([text], Sampling(max_new_tokens=new, **more))[0].text


def test_completions_and_chat(client: Any, lab: Lab) -> None:
    body = {"model": "tiny", "prompt": TEXT, "max_tokens": 12, "ignore_eos": True}
    made = client.post("/completions", json=body).json()
    want = alone(lab, TEXT, 12, ignore_eos=True)
    assert made["choices"][0]["text"] == want and made["choices"][0]["finish_reason"] == "length"
    assert made["usage"]["prompt_tokens"] == len(TEXT) and made["usage"]["completion_tokens"] == 12
    again = client.post("/completions", json=body | {"prompt": lab.tokenizer.encode(TEXT), "stop": want[5:7]}).json()
    assert again["choices"][0]["text"] == want[: want.find(want[5:7])] and again["choices"][0]["finish_reason"] == "stop"
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(TEXT) - 1) // 8 * 8 + (len(TEXT) - 1) % 8 * (
        len(TEXT) // 8 * 8 > len(TEXT) - 8
    )
    messages = [{"role": "user", "content": "Hello"}]
    said = client.post("/chat/completions", json={"messages": messages, "max_tokens": 6, "ignore_eos": True}).json()
    assert said["choices"][0]["message"]["content"] == alone(lab, "user: Hello ", 6, ignore_eos=True)
    assert client.get("/models").json()["data"][0]["id"] == "tiny"


def test_streams(client: Any, lab: Lab) -> None:
    body = {"prompt": TEXT, "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    with client.stream("POST", "/completions", json=body) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == alone(lab, TEXT, 9, ignore_eos=True)
    assert [event["choices"][0]["finish_reason"] for event in events if event["choices"]][-1] == "length"
    assert events[-1]["usage"]["completion_tokens"] == 9


def test_it_is_measured_from_outside(served: Any) -> None:
    """`kvlab measure --endpoint` against the real thing: no failure, prompts sent before are found again, the KV metrics are there."""
    _, address, key = served
    prompts = [TEXT + str(number) * 40 for number in range(6)]
    order = [*prompts, *prompts]
    rows = measure_endpoint(address, model="tiny", prompts=order, concurrency=3, max_tokens=8, key=key, chat=False)
    assert all(row.ok for row in rows)
    made = summary(rows, order, 1.0, {})
    assert not made.failed and made.first_token > 0 and made.repeated is not None
    refused = measure_endpoint(address, model="tiny", prompts=prompts[:1], key="wrong", chat=False)
    assert not refused[0].ok and "401" in refused[0].why
    wrong = measure_endpoint(address, model="other", prompts=prompts[:1], key=key)
    assert not wrong[0].ok and "404" in wrong[0].why


def test_what_was_measured_from_outside_is_written_down(served: Any, tmp_path: Any) -> None:
    """`--out`: one line a run, failures with their reasons, added to what is there. (Stretches of the reference text are longer than this model's context.)"""
    _, address, key = served
    out, said = tmp_path / "rows.jsonl", []
    for _ in range(2):
        with pytest.raises(ValueError, match="none of 4 requests came through"):
            cli.served(address, "tiny", 2, 4, key, said.append, out)
    first, second = map(json.loads, out.read_text().splitlines())
    assert first["endpoint"] == second["endpoint"] == address and first["summary"]["requests"] == 4
    assert [row["ok"] for row in first["requests"]] == [False] * 4 and all("400" in row["why"] for row in first["requests"])
    assert len(said) == 2


def test_metrics_in_the_names_that_servers_use(served: Any, client: Any) -> None:
    text = client.get(served[1].removesuffix("/v1") + "/metrics").text
    found = {line.split()[0]: float(line.split()[1]) for line in text.splitlines()}
    assert 0 <= found["vllm:kv_cache_usage_perc"] <= 1 and found["vllm:num_requests_running"] == 0
    assert found["vllm:prefix_cache_hits_total"] <= found["vllm:prefix_cache_queries_total"]


@pytest.mark.parametrize(
    "path, body, status, said",
    [
        ("/completions", b"{", 400, "the body is no JSON"),
        ("/completions", b"[]", 400, "no JSON object"),
        ("/completions", b"{}", 400, "prompt must be one text"),
        ("/completions", b'{"prompt": ""}', 400, "the prompt is empty"),
        ("/completions", b'{"prompt": ["a", "b"]}', 400, "prompt must be one text"),
        ("/completions", b'{"prompt": [99999]}', 400, "99999 is no token of this model"),
        ("/completions", b'{"prompt": "a", "max_tokens": 100000}', 400, "more than the model's context"),
        ("/completions", b'{"prompt": "a", "max_tokens": "x"}', 400, "max_new_tokens='x'"),
        ("/completions", b'{"prompt": "a", "temperature": -1}', 400, "temperature=-1.0"),
        ("/completions", b'{"prompt": "a", "n": 2}', 400, "n=2"),
        ("/completions", b'{"prompt": "a", "model": "gpt-9"}', 404, "model 'gpt-9' is not served here"),
        ("/chat/completions", b'{"messages": []}', 400, "messages must be a list"),
        ("/chat/completions", b'{"messages": [{"role": "nobody", "content": "x"}]}', 400, "chat template refuses"),
        ("/nothing", b"{}", 404, ""),
    ],
)
def test_nonsense_is_answered_in_words(client: Any, path: str, body: bytes, status: int, said: str) -> None:
    answer = client.post(path, content=body)
    assert answer.status_code == status and said in answer.text


def test_without_the_key_nobody_comes_in(served: Any) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        answer = httpx.post(f"{served[1]}/completions", json={"prompt": "a"}, headers=headers)
        assert answer.status_code == 401 and "key is missing or wrong" in answer.json()["error"]["message"]
        assert httpx.get(f"{served[1]}/models", headers=headers).status_code == 401


def test_a_client_that_hangs_up_ends_its_request(served: Any, client: Any) -> None:
    engine = served[0]
    before = engine.metrics().finished
    body = {"prompt": "abc", "max_tokens": 400, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/completions", json=body) as answer:
        next(answer.iter_lines())
    for _ in range(200):
        if not engine.busy:
            break
        threading.Event().wait(0.05)
    assert not engine.busy and engine.metrics().finished == before + 1
    assert engine.metrics().tokens_made < 2000


def test_an_engine_that_fails_tells_those_who_wait_and_serves_the_next(
    served: Any, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = served[0]

    def broken(*_: Any) -> Any:
        raise RuntimeError("out of paper")

    monkeypatch.setattr(engine, "_run", broken)
    answer = client.post("/completions", json={"prompt": "abc", "max_tokens": 4})
    assert answer.status_code == 500 and "out of paper" in answer.text
    monkeypatch.undo()
    assert (
        client.post("/completions", json={"prompt": "abc", "max_tokens": 4, "ignore_eos": True}).json()["usage"][
            "completion_tokens"
        ]
        == 4
    )


@pytest.mark.nightly
@pytest.mark.model
def test_the_labs_own_model_in_a_process_of_its_own() -> None:
    """`kvlab serve` and `kvlab measure --endpoint`, as people start them; then the server is gone, and that is a row with a reason."""
    import re
    import subprocess
    import sys

    line = [sys.executable, "-c", "from kvlab.cli import main; main()", "serve", "--port", "0", "--kv-memory", "64 MB"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"blocks of 16 tokens at (\S+), key (\S+)", process.stdout.readline())
            assert found is not None
            address, key = found.groups()
            prompts = ["The secret pass key is 48213. " * 20 + str(number) for number in range(4)]
            order = [*prompts, *prompts]
            with watched(address) as seen:
                rows = measure_endpoint(address, model="smollm2-135m", prompts=order, concurrency=4, max_tokens=12, key=key)
            made = summary(rows, order, 1.0, seen.most)
            assert not made.failed and made.repeated is not None and made.fresh is not None and made.repeated < made.fresh
        finally:
            process.terminate()
    gone = measure_endpoint(address, model="smollm2-135m", prompts=prompts[:1], key=key)
    assert not gone[0].ok and gone[0].why
