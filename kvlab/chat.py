"""Chat: a conversation through one cache, turn by turn, that tells the cache who speaks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlab.cache import KVCache

if TYPE_CHECKING:
    from kvlab.lab import Generation, Lab, Progress

MARK = "\x02kvlab\x02"  # stands for a message's text while the template's own words around it are looked up


@dataclass
class Chat:
    """Made by ``lab.chat(strategy, system=...)``. ``messages``: all that was said, as transformers' chat templates take it.

    Each turn is only what is new: the template's words around the message, and the message. What earlier turns left in the cache stays as it is.
    """

    lab: Lab
    cache: KVCache
    messages: list[dict[str, str]] = field(default_factory=list)
    _unread: list[int] = field(default_factory=list, repr=False)  # the last answer's last token: said, but not read yet
    _stopped: bool = field(default=False, repr=False)  # that token was the end of the message
    _broken: bool = field(default=False, repr=False)

    def say(self, text: str, *, max_new_tokens: int = 128, progress: Progress | None = None) -> Generation:
        """Say ``text`` as the user, and have it answered (greedily, up to ``max_new_tokens`` tokens).

        Raises ``ValueError`` for an empty text, a conversation longer than the model's context, or more protected tokens than ``keep.Conversation``'s
        budget with the whole answer: then nothing was read, and the conversation is as before. ``RuntimeError`` after a run that was ended half-way.
        """
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"say: text={text!r} is empty (allowed: what a user says)")
        if self._broken:
            raise RuntimeError("this chat's last answer was ended half-way, so its cache holds a part of it: begin a new chat")
        cache = self.cache
        if self._unread and not cache.get_seq_length():
            raise RuntimeError("this chat's cache was reset, so what was said is gone from it: begin a new chat")
        before = (list(cache.spans), cache._spoken_for, list(cache.read), cache.get_seq_length())
        pieces = self._pieces(text)
        for role, tokens in pieces:
            cache.annotate(role, len(tokens))
        cache.annotate("assistant")
        ids = torch.tensor([[token for _, tokens in pieces for token in tokens]])
        try:
            if before[3]:  # the answer is protected, too: better known now than in the middle of it
                known = next(layer for layer in cache.layers if layer.is_initialized)
                cache.admit(before[3] + ids.shape[1] + max_new_tokens - 1, known)
            made = self.lab.generate(ids, cache=cache, max_new_tokens=max_new_tokens, progress=progress)
        except BaseException:
            if cache.get_seq_length() == before[3]:
                cache.spans, cache._spoken_for, cache.read = before[:3]
            else:
                self._broken = True
            raise
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": made.text}]
        self._stopped = made.tokens[-1] in self.lab._stops()
        self._unread = [made.tokens[-1]]
        return made

    def _pieces(self, text: str) -> list[tuple[str, list[int]]]:
        """What is new as (role, tokens): the end of the last answer, the system's words, the user's, and the head of the answer to come."""
        new = [*self.messages, {"role": "user", "content": text}]
        whole, bare = self._render(new, True), self._render(new, False)
        head = whole[len(bare) :] if whole.startswith(bare) else ""
        pieces: list[tuple[str, list[int]]] = []
        if any(message["role"] == "assistant" for message in self.messages):
            marked = [*self.messages[:-1], {"role": "assistant", "content": MARK}]
            closing = self._after(self._render(marked, False))
            rest = self._after(self._render([*marked, new[-1]], False))
            same = rest.startswith(closing)
            end = self._encode(closing if same else "")
            if self._stopped and end[:1] == self._unread:
                end = end[1:]  # the template's end of a message is the token the model ended with
            pieces.append(("assistant", self._unread + end))
            pieces.append(("user", self._encode(rest[len(closing) :] if same else rest)))
        else:
            first = bare[: self._user_begins(new)]
            if first:
                pieces.append(("system", self._encode(first)))
            pieces.append(("user", self._encode(bare[len(first) :])))
        if head:
            pieces.append(("assistant", self._encode(head)))
        return [(role, tokens) for role, tokens in pieces if tokens]

    def _user_begins(self, new: list[dict[str, str]]) -> int:
        """Where in the first turn's text the user's message begins: what a second user's message has before it, too, belongs to it."""
        marked = {"role": "user", "content": MARK}
        first = self._render([*new[:-1], marked], False).partition(MARK)[0]
        answered = [*new[:-1], {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, marked]
        second = self._render(answered, False).partition(MARK)[0]
        same = 0
        while same < min(len(first), len(second)) and first[-1 - same] == second[-1 - same]:
            same += 1
        return len(first) - same

    def _render(self, messages: list[dict[str, str]], answer: bool) -> str:
        try:
            return str(self.lab.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer))
        except Exception as error:  # a template is a program of the model's makers, and raises what it likes
            raise ValueError(f"{self.lab.name}: its chat template does not take these messages: {error}") from error

    @staticmethod
    def _after(text: str) -> str:
        _, mark, after = text.rpartition(MARK)
        if not mark:
            raise ValueError("this model's chat template changes what an assistant said; kvlab cannot go on with it turn by turn")
        return after

    def _encode(self, text: str) -> list[int]:
        return list(self.lab.tokenizer(text, add_special_tokens=False, verbose=False).input_ids) if text else []

    @property
    def ids(self) -> Tensor:
        """Every token the cache has read, int64 ``[1, n]``."""
        return torch.tensor([self.cache.read])

    def __repr__(self) -> str:
        return f"Chat({len(self.messages)} messages, {self.cache.get_seq_length()} tokens read, {self.cache.strategy})"
