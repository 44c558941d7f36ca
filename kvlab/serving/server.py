"""An OpenAI-compatible endpoint over an :class:`Engine`: completions and chat, streaming, on this machine only unless asked otherwise.

    kvlab serve --port 8000          # then any client: base_url http://127.0.0.1:8000/v1, with the key that it prints

tornado serves; one thread runs the model. A client that hangs up ends its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.iostream import StreamClosedError
from tornado.web import Application, HTTPError, RequestHandler

from kvlab.serving.engine import Engine
from kvlab.serving.request import FINISHED, Request, Sampling

LARGEST = 4 << 20  # bytes of a request's body


@dataclass
class _Open:
    """A request that somebody listens to; pieces of text come through ``queue``, None at the end, an exception where the engine failed."""

    request: Request
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[str | Exception | None] = field(default_factory=asyncio.Queue)
    said: int = 0

    def tell(self, piece: str | Exception | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self.loop.call_soon_threadsafe(self.queue.put_nowait, piece)


class Service:
    """One engine, one thread that runs it, and those who listen."""

    def __init__(self, engine: Engine, name: str | None = None) -> None:
        self.engine, self.name = engine, name or engine.lab.name
        self._turn = threading.Condition()
        self._open: dict[str, _Open] = {}
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="kvlab engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all requests and the thread."""
        with self._turn:
            self._ended = True
            self._turn.notify()
        self._thread.join()

    def ask(self, ids: Any, sampling: Sampling, salt: str | None, loop: asyncio.AbstractEventLoop) -> _Open:
        """Waits for the step that is being computed. Raises ``ValueError`` as :meth:`Engine.add`."""
        with self._turn:
            listener = _Open(self.engine.add(ids, sampling, salt=salt), loop)
            self._open[listener.request.id] = listener
            self._turn.notify()
        return listener

    def leave(self, listener: _Open) -> None:
        """Nobody listens any more."""
        with self._turn:
            if self._open.pop(listener.request.id, None) is not None and listener.request.status != FINISHED:
                self.engine.cancel(listener.request.id)

    def metrics(self) -> Any:
        with self._turn:
            return self.engine.metrics()

    def _run(self) -> None:
        while True:
            with self._turn:
                while not (self._ended or self.engine.busy):
                    self._turn.wait()
                if self._ended:
                    for listener in self._open.values():
                        listener.tell(RuntimeError("the server is shutting down"))
                    return
                try:
                    self.engine.step()
                except Exception as error:  # whoever waits must hear of it, and the next ones be served
                    self._fail(error)
                else:
                    self._tell()
            time.sleep(0)  # let those in who want to ask

    def _tell(self) -> None:
        for listener in list(self._open.values()):
            request = listener.request
            text = self.engine.text(request)
            safe = len(text) if request.status == FINISHED else len(text) - self.engine.undecided(request, text)
            if safe > listener.said:
                listener.tell(text[listener.said : safe])
                listener.said = safe
            if request.status == FINISHED:
                del self._open[request.id]
                listener.tell(None)

    def _fail(self, error: Exception) -> None:
        for name in list(self.engine.scheduler.requests):
            with contextlib.suppress(ValueError):
                self.engine.cancel(name)
        for listener in self._open.values():
            listener.tell(error)
        self._open.clear()


class _Handler(RequestHandler):
    def initialize(self, service: Service, key: str) -> None:
        self.service, self.key = service, key

    def prepare(self) -> None:
        given = self.request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if self.key and not hmac.compare_digest(given.encode(), self.key.encode()):
            raise HTTPError(401, log_message="the key is missing or wrong (Authorization: Bearer KEY)")

    def write_error(self, status_code: int, **options: Any) -> None:
        error = options.get("exc_info", (None, None, None))[1]
        message = error.log_message if isinstance(error, HTTPError) and error.log_message else f"the server failed: {error}"
        self.set_header("Content-Type", "application/json")
        self.finish(
            json.dumps(
                {
                    "error": {
                        "message": message,
                        "type": "invalid_request_error" if status_code < 500 else "server_error",
                        "code": status_code,
                    }
                }
            )
        )

    def log_exception(self, *_: Any) -> None:
        pass  # the client is told


class _Nowhere(_Handler):
    def prepare(self) -> None:
        super().prepare()
        raise HTTPError(
            404,
            log_message=f"{self.request.path} is not served here (allowed: /v1/models, /v1/completions, /v1/chat/completions, /metrics)",
        )


class _Models(_Handler):
    def get(self) -> None:
        self.finish({"object": "list", "data": [{"id": self.service.name, "object": "model", "owned_by": "kvlab"}]})


class _Metrics(_Handler):
    """In Prometheus's format, by vLLM's names where there is one."""

    def get(self) -> None:
        found = self.service.metrics()
        rows = {
            "vllm:kv_cache_usage_perc": found.kv_usage, "vllm:num_requests_running": found.running, "vllm:num_requests_waiting": found.waiting,
            "vllm:num_preemptions_total": found.preemptions, "vllm:generation_tokens_total": found.tokens_made,
            "vllm:prefix_cache_queries_total": found.prompt_tokens, "vllm:prefix_cache_hits_total": found.cached_tokens,
            "kvlab:fragmentation": found.fragmentation, "kvlab:busy": found.busy, "kvlab:tokens_computed_total": found.tokens_computed,
        }  # fmt: skip
        self.set_header("Content-Type", "text/plain; version=0.0.4")
        self.finish("".join(f"{name} {value:.15g}\n" for name, value in rows.items()))


class _Completions(_Handler):
    chat = False
    listener: _Open | None = None

    async def post(self) -> None:
        body = self._body()
        sampling, prompt = _sampling(body), self._prompt(body)
        options = body.get("stream_options") or {}
        if not isinstance(options, dict):
            raise HTTPError(400, log_message=f"stream_options={options!r} must be an object")
        usage = bool(options.get("include_usage"))
        loop = asyncio.get_running_loop()
        try:
            salt = body.get("cache_salt")
            if salt is not None and not isinstance(salt, str):
                raise HTTPError(400, log_message=f"cache_salt={salt!r} must be a text")
            self.listener = await loop.run_in_executor(None, self.service.ask, prompt, sampling, salt, loop)
        except ValueError as error:
            raise HTTPError(400, log_message=str(error)) from error
        request = self.listener.request
        if body.get("stream"):
            await self._stream(request, usage)
            return
        text = "".join([piece async for piece in self._pieces()])
        self.finish(self._answer(request, self._choice(text, request)) | {"usage": _usage(request)})

    async def _pieces(self) -> AsyncIterator[str]:
        assert self.listener is not None
        while (piece := await self.listener.queue.get()) is not None:
            if isinstance(piece, Exception):
                raise HTTPError(500, log_message=f"the engine failed: {piece}")
            yield piece

    async def _stream(self, request: Request, usage: bool) -> None:
        self.set_header("Content-Type", "text/event-stream")
        self.set_header("Cache-Control", "no-cache")
        try:
            async for piece in self._pieces():
                await self._event(self._answer(request, self._choice(piece, None), stream=True))
            last = self._answer(request, self._choice("", request), stream=True)
            await self._event(last)
            if usage:
                await self._event(self._answer(request, None, stream=True) | {"usage": _usage(request)})
            self.write("data: [DONE]\n\n")
            await self.flush()
        except HTTPError as error:  # the head is out already
            await self._event({"error": {"message": error.log_message, "code": error.status_code}})
        except StreamClosedError:
            await self._gone()

    async def _event(self, data: dict[str, Any]) -> None:
        self.write(f"data: {json.dumps(data)}\n\n")
        await self.flush()

    def on_connection_close(self) -> None:
        if self.listener is not None:
            asyncio.get_running_loop().create_task(self._gone())

    async def _gone(self) -> None:
        if self.listener is not None:
            await asyncio.get_running_loop().run_in_executor(None, self.service.leave, self.listener)

    def _body(self) -> dict[str, Any]:
        try:
            body = json.loads(self.request.body)
        except ValueError as error:
            raise HTTPError(400, log_message=f"the body is no JSON: {error}") from error
        if not isinstance(body, dict):
            raise HTTPError(400, log_message="the body is no JSON object")
        model = body.get("model") or self.service.name
        if model != self.service.name:
            raise HTTPError(404, log_message=f"model {model!r} is not served here (allowed: {self.service.name})")
        if body.get("n") not in (None, 1):
            raise HTTPError(400, log_message=f"n={body['n']!r} is not served here (allowed: 1)")
        for name in ("echo", "logprobs"):
            if body.get(name):
                raise HTTPError(400, log_message=f"{name} is not served here")
        return body

    def _prompt(self, body: dict[str, Any]) -> Any:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(isinstance(one, int) for one in prompt)):
            raise HTTPError(400, log_message="prompt must be one text, or the ids of its tokens")
        return _text(prompt) if isinstance(prompt, str) else prompt

    def _answer(self, request: Request, choice: dict[str, Any] | None, stream: bool = False) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat and stream else "chat.completion" if self.chat else "text_completion"
        made = {"id": f"kvlab-{request.id}", "object": kind, "created": int(time.time()), "model": self.service.name}
        return made | {"choices": [] if choice is None else [choice]}

    def _choice(self, text: str, done: Request | None) -> dict[str, Any]:
        reason = None if done is None else {"stop": "stop", "length": "length"}.get(done.reason, done.reason)
        if not self.chat:
            return {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}
        said = {"role": "assistant", "content": text}
        streaming = self._headers.get("Content-Type") == "text/event-stream"
        return {"index": 0, "delta" if streaming else "message": said, "finish_reason": reason}


class _Chat(_Completions):
    chat = True

    def _prompt(self, body: dict[str, Any]) -> Any:
        messages = body.get("messages")
        if (
            not isinstance(messages, list)
            or not messages
            or not all(isinstance(one, dict) and isinstance(one.get("content"), str) for one in messages)
        ):
            raise HTTPError(400, log_message="messages must be a list of objects with role and content, both text")
        try:
            tokenizer = self.service.engine.lab.tokenizer
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids  # the template writes them itself
        except Exception as error:  # the template is the model's, and may refuse as it likes
            raise HTTPError(400, log_message=f"the model's chat template refuses these messages: {error}") from error


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise HTTPError(400, log_message=f"the text is no Unicode: {error.reason}") from error
    return text


def _sampling(body: dict[str, Any]) -> Sampling:
    stop = body.get("stop") or ()
    given = {
        name: body[name]
        for name in ("max_tokens", "max_completion_tokens", "temperature", "top_p", "seed")
        if body.get(name) is not None
    }
    if not isinstance(stop, str | list | tuple):
        raise HTTPError(400, log_message=f"stop={stop!r} must be a text or a list of texts")
    try:
        return Sampling(
            max_new_tokens=given.get("max_completion_tokens", given.get("max_tokens", 64)),
            temperature=float(given.get("temperature", 0.0)),
            top_p=float(given.get("top_p", 1.0)),
            seed=int(given.get("seed", 0)),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            ignore_eos=bool(body.get("ignore_eos")),
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise HTTPError(400, log_message=str(error)) from error


def _usage(request: Request) -> dict[str, Any]:
    prompt, made = len(request.prompt), len(request.output)
    return {
        "prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made, "prompt_tokens_details": {"cached_tokens": request.cached},
    }  # fmt: skip


def application(service: Service, key: str) -> Application:
    """The endpoint's routes. ``key``: what a client must send; "" lets everybody in."""
    given = {"service": service, "key": key}
    elsewhere: dict[str, Any] = {"default_handler_class": _Nowhere, "default_handler_args": given}
    return Application(
        [
            ("/v1/models", _Models, given),
            ("/v1/completions", _Completions, given),
            ("/v1/chat/completions", _Chat, given),
            ("/metrics", _Metrics, given),
        ],
        **elsewhere,
    )


def serve(
    engine: Engine, *, host: str = "127.0.0.1", port: int = 8000, key: str | None = None, name: str | None = None,
    ready: Callable[[str, str, Callable[[], object]], None] | None = None,
) -> None:  # fmt: skip
    """Serve until interrupted. ``key`` None: a new one. ``ready(address, key, stop)`` is called once it listens; ``stop()`` ends it, from any thread.

    Raises ``OSError`` for a port that is taken.
    """
    chosen = secrets.token_urlsafe(24) if key is None else key
    service = Service(engine, name)

    async def run() -> None:
        over, loop = asyncio.Event(), asyncio.get_running_loop()
        server = HTTPServer(application(service, chosen), max_body_size=LARGEST)
        server.listen(port, host)
        bound = next(iter(server._sockets.values())).getsockname()[1]
        if ready is not None:
            ready(f"http://{host}:{bound}/v1", chosen, lambda: loop.call_soon_threadsafe(over.set))
        await over.wait()
        server.stop()
        await server.close_all_connections()

    try:
        asyncio.run(run())
    finally:
        service.close()
