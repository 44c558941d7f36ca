"""Lab: a model with its tokenizer, and the few things people do with it: encode, prefill, generate."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from kvlab import attention
from kvlab.cache import KVCache, forward
from kvlab.chat import Chat
from kvlab.errors import UnsupportedModel
from kvlab.geometry import Geometry
from kvlab.memory import Memory
from kvlab.models import SMOLLM2, load_model
from kvlab.replay import Prompts
from kvlab.strategy import Strategy

#: Called as ``(stage, done, total)`` between steps; an exception raised in it ends the work there (see ``errors.Cancelled``).
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Generation:
    """What one run said, held and took. Times in seconds; ``token_times`` has one entry for each token after the first."""

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    strategy: Strategy
    memory: Memory
    growth: tuple[tuple[int, Memory], ...]  # (tokens seen, bytes) after the prompt's pieces and after every few tokens
    first_token_time: float
    token_times: tuple[float, ...]
    cold: bool  # the first run of this process on this model: it pays for memory and libraries waking up


@dataclass
class Lab:
    """A language model on the bench. Made by :func:`load`."""

    name: str
    model: Any
    tokenizer: Any
    _warm: bool = field(default=False, repr=False)
    _prompts: Prompts | None = field(default=None, repr=False)
    _replays: bool = field(default=False, repr=False)

    def __repr__(self) -> str:
        dtype = str(self.model.dtype).removeprefix("torch.")
        return f"Lab({self.name!r}, {len(self.geometry.layers)} layers, {dtype} on {self.device})"

    @property
    def geometry(self) -> Geometry:
        return Geometry.from_config(self.model.config)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def context(self) -> int:
        """The longest sequence the model was made for, in tokens."""
        return int(getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", 1 << 30))

    def encode(self, text: str) -> Tensor:
        """Token ids, int64 ``[1, n]``. Raises ``ValueError`` for an empty text or one longer than the model's context."""
        if not isinstance(text, str) or not text:
            raise ValueError(f"prompt={text!r} is empty (allowed: 1 to {self.context} tokens of text)")
        ids = self.encode_long(text)
        if ids.shape[1] > self.context:
            raise ValueError(
                f"the prompt has {ids.shape[1]} tokens, more than the model's context (allowed: 1 to {self.context} tokens)"
            )
        return ids

    def encode_long(self, text: str) -> Tensor:
        """As :meth:`encode`, for a text that may be longer than the model's context (to be read piece by piece)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            raise ValueError(
                f"prompt has half a character at {error.start}, {half!r} (allowed: text that can be written as UTF-8)"
            ) from error
        return self.tokenizer(text, return_tensors="pt", verbose=False).input_ids.to(self.device)  # type: ignore[no-any-return]

    def prefill(self, ids: Tensor, cache: Cache, chunk: int = 0, progress: Progress | None = None) -> Tensor:
        """Feed ``ids`` ``[1, n]``, in pieces of ``chunk`` tokens where that is not 0 -> logits of the last token ``[1, 1, vocabulary]``."""
        if chunk < 0:
            raise ValueError(f"chunk={chunk} is out of range (allowed: 0 for one piece, or a number of tokens)")
        n = ids.shape[1]
        size, logits = chunk or n, None
        if self._replays and self._prompts is not None and size >= n and self._prompts.serves(cache):
            return self._prompts.prefill(self.model, ids, cache)  # type: ignore[arg-type]
        for start in range(0, n, size):
            if progress:
                progress("reading the prompt", start, n)
            logits = forward(self.model, ids[:, start : start + size], cache, last=True)
        assert logits is not None
        return logits

    @contextlib.contextmanager
    def replaying(self, on: bool = True) -> Iterator[None]:
        """Within, a prompt that is read in one piece by one cache after another passes the model once (see ``kvlab.replay``); for comparing what caches keep,
        not for timing them. ``on=False``: it passes the model each time, whatever goes on around."""
        before, self._replays = self._replays, on
        self._prompts = self._prompts or Prompts()
        try:
            yield
        finally:
            self._replays = before

    def generate(
        self,
        prompt: str | Tensor,
        strategy: Strategy | None = None,
        *,
        max_new_tokens: int = 40,
        cache: KVCache | None = None,
        progress: Progress | None = None,
        every: int = 8,
    ) -> Generation:
        """Continue ``prompt`` greedily through a cache.

        Args:
            prompt: text, or ids ``[1, n]``. With a used ``cache``, only what is new.
            strategy: for a new cache; leave out when ``cache`` is given.
            max_new_tokens: at least 1; the end-of-sequence token ends it earlier.
            cache: a cache to go on with (many turns).
            progress: called between steps.
            every: tokens between two points of ``growth``.

        Raises:
            ValueError: an empty prompt, one that does not fit the context, the old prompt again with a used cache, or logits that are NaN.
        """
        if cache is not None and strategy is not None and strategy != cache.strategy:
            raise ValueError("generate: the cache has a strategy of its own; give one of the two")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens} is out of range (allowed: 1 to {self.context})")
        if not isinstance(prompt, str | Tensor):
            raise ValueError(f"prompt={prompt!r} is neither text nor a tensor of ids [1, n]")
        ids = self.encode(prompt) if isinstance(prompt, str) else prompt.to(self.device)
        if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] == 0:
            raise ValueError(f"prompt ids have the shape {tuple(ids.shape)} (allowed: [1, n] with n of 1 or more)")
        cache = KVCache(self.model, strategy) if cache is None else cache
        self._check_room(ids, cache, max_new_tokens)
        cold, self._warm = not self._warm, True
        read = list(cache.read)
        cache.read.extend(ids[0].tolist())

        start = time.perf_counter()
        growth: list[tuple[int, Memory]] = []
        chunk = cache.strategy.chunk or ids.shape[1]
        for begin in range(0, ids.shape[1], chunk):
            try:
                logits = self.prefill(ids[:, begin : begin + chunk], cache, progress=progress)
            except BaseException:
                if not begin:
                    cache.read = read
                raise
            growth.append((cache.get_seq_length(), cache.memory()))
        tokens = [_next(logits)]
        first = time.perf_counter() - start
        stops, times = self._stops(), []
        while len(tokens) < max_new_tokens and tokens[-1] not in stops:
            if progress:
                progress("continuing", len(tokens), max_new_tokens)
            start = time.perf_counter()
            logits = forward(self.model, torch.tensor([[tokens[-1]]], device=self.device), cache, last=True)
            cache.read.append(tokens[-1])
            tokens.append(_next(logits))
            times.append(time.perf_counter() - start)
            if len(times) % every == 0:
                growth.append((cache.get_seq_length(), cache.memory()))
        memory = cache.memory()
        if growth[-1][0] != memory.seen:
            growth.append((memory.seen, memory))
        text = self.tokenizer.decode([t for t in tokens if t not in stops])
        return Generation(text, tuple(tokens), ids.shape[1], cache.strategy, memory, tuple(growth), first, tuple(times), cold)

    def chat(self, strategy: Strategy | None = None, *, system: str | None = None, cache: KVCache | None = None) -> Chat:
        """Begin a conversation, to be led by ``chat.say(text)``, one turn at a time through one cache that is told who speaks.

        Args:
            strategy: for a new cache; leave out when ``cache`` is given.
            system: what the system says first; None leaves it to the model's chat template.
            cache: a new cache to use.

        Raises ``ValueError``: a model without a chat template, or a cache that was used before.
        """
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError(f"{self.name} has no chat template (allowed: models made to chat, such as smollm2-135m)")
        if cache is not None and strategy is not None and strategy != cache.strategy:
            raise ValueError("chat: the cache has a strategy of its own; give one of the two")
        if cache is not None and cache.get_seq_length():
            raise ValueError(f"chat: the cache has already read {cache.get_seq_length()} tokens (allowed: a new one)")
        said = [] if system is None else [{"role": "system", "content": system}]
        return Chat(self, KVCache(self.model, strategy) if cache is None else cache, said)

    def _check_room(self, ids: Tensor, cache: KVCache, new: int) -> None:
        seen, old = cache.get_seq_length(), cache.read
        if seen and old and ids.shape[1] >= min(len(old), 2) and ids[0].tolist()[: len(old)] == old[: ids.shape[1]]:
            raise ValueError(
                f"the prompt's {ids.shape[1]} tokens are already in this cache ({seen} tokens); pass only what is new, or reset() the cache"
            )
        total = seen + ids.shape[1] + new
        endless = cache.strategy.keep.endless and max(cache.strategy.chunk or ids.shape[1], 1) <= self.context
        if total > self.context and not endless:
            raise ValueError(
                f"prompt and continuation need {total} tokens, more than the model's context (allowed: up to {self.context} tokens)"
            )

    def _stops(self) -> set[int]:
        stop = getattr(self.model.generation_config, "eos_token_id", None) if hasattr(self.model, "generation_config") else None
        stop = self.tokenizer.eos_token_id if stop is None else stop
        return set(stop) if isinstance(stop, list | tuple) else {stop}


def _next(logits: Tensor) -> int:
    """The most likely next token of ``[1, n, vocabulary]``. A NaN wins every argmax, so it cannot pass for a token."""
    row = logits[0, -1]
    best = int(row.argmax())
    if not bool(row[best].isfinite()):
        raise ValueError(
            f"the model's output is not finite ({float(row[best])}) in {logits.dtype}: try bfloat16 or float32, or check the weights"
        )
    return best


def load(
    name: str | os.PathLike[str] = SMOLLM2,
    *,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> Lab:
    """Load a model and its tokenizer, and look whether kvlab can serve it.

    Args:
        name: ``"smollm2-135m"``, a local folder in transformers' layout, or a hub id.
        dtype, device, progress: see :func:`kvlab.models.load_model`.

    Raises:
        ValueError: a wrong argument.
        ModelUnavailable: the files cannot be had. DamagedModel: they are broken.
        UnsupportedModel: not a model kvlab can serve; three tokens are run through it to see.
    """
    model, tokenizer = load_model(name, dtype, device, progress)
    probe(model)
    return Lab(str(name), model, tokenizer)


def probe(model: Any) -> None:
    """Run three tokens through a kvlab cache and through transformers' own, in two steps, and compare.

    Raises ``UnsupportedModel``, saying what was seen, if the model uses its cache in a way kvlab does not know, or if the logits differ by more than
    the model's number format explains.
    """
    ids = torch.tensor([[1, 2, 1]], device=next(model.parameters()).device)
    attention.detach(model)

    def run(cache: Any) -> Tensor:
        return torch.cat([forward(model, ids[:, :2], cache), forward(model, ids[:, 2:], cache)], 1).float()

    name = type(model).__name__
    cache = KVCache(model)
    attention.detach(model)
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")  # the one that leaves nothing out: older versions' SDPA knows no soft cap
    try:
        own = run(DynamicCache(config=model.config))
    finally:
        model.set_attn_implementation(before)
    attention.attach(model)
    try:
        got = run(cache)
    except UnsupportedModel:
        raise
    except Exception as error:  # whatever its attention did with a handle that is no tensor
        raise UnsupportedModel(
            f"{name} uses its keys and values in a way kvlab does not know ({type(error).__name__}: {error}). Use transformers' own DynamicCache for it; "
            "kvlab.geometry still knows its sizes."
        ) from error
    if cache.get_seq_length() != ids.shape[1]:
        raise UnsupportedModel(
            f"{name} was given three tokens and its cache saw {cache.get_seq_length()}: the model does not use the cache it is given. Use transformers' own way."
        )
    gap, scale = float((got - own).abs().max()), float(own.abs().max())
    allowed = max(1.0, scale) * {torch.float16: 0.02, torch.bfloat16: 0.1}.get(next(model.parameters()).dtype, 1e-3)
    if not gap <= allowed:
        raise UnsupportedModel(
            f"{name} gives other logits through kvlab's cache than through transformers' (largest difference {gap:.2g} on three tokens, allowed "
            f"{allowed:.2g}): its attention does something kvlab does not see. Use DynamicCache for it."
        )
