"""Conversations: what the cache is told, what it reads, and what Conversation keeps, each from its statement."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvlab import KVCache, Strategy, keep
from kvlab.cache import forward
from kvlab.errors import Cancelled
from kvlab.keep.base import ROLES
from kvlab.lab import Lab
from tests import zoo
from tests.panels.conftest import Characters


class Talker(Characters):
    """A template like most: a head for each message, an end, and a system of its own where none is given."""

    chat_template = "yes"

    def __call__(self, text: str, **settings: Any) -> SimpleNamespace:
        found = super().__call__(text).input_ids
        return SimpleNamespace(input_ids=found if settings.get("return_tensors") else found[0].tolist())

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": "be good"}, *messages]
        return "".join(f"<{m['role'][0]}>{m['content']}<e>" for m in messages) + "<a>" * add_generation_prompt


@pytest.fixture
def lab(llama: Any) -> Lab:
    return Lab("tiny", llama, Talker())


def roles(cache: KVCache, text: str) -> dict[str, str]:
    """role -> the text that is said to be by it."""
    of, _ = cache.spoken(len(text))
    return {role: "".join(c for c, r in zip(text, of.tolist(), strict=True) if ROLES[r] == role) for role in ROLES}


def test_only_what_is_new_is_read_and_told(lab):
    chat = lab.chat(system="quiet")
    first = chat.say("one?", max_new_tokens=5)
    second = chat.say("two?", max_new_tokens=3)
    said = lab.tokenizer.decode(chat.cache.read)
    whole = lab.tokenizer.apply_chat_template(chat.messages, tokenize=False, add_generation_prompt=False)
    assert whole.startswith(said) and len(whole) - len(said) == len("<e>") + 1  # the last answer's last letter is not read yet
    assert said == f"<s>quiet<e><u>one?<e><a>{first.text}<e><u>two?<e><a>{second.text[:-1]}"
    by = roles(chat.cache, said)
    assert by["user"].count("?<e>") == 2 and by["system"].startswith("<s>quiet") and first.text in by["assistant"]
    assert chat.messages[0] == {"role": "system", "content": "quiet"} and len(chat.messages) == 5
    _, turns = chat.cache.spoken(len(said))
    assert turns.unique().tolist() == [0, 1, 2] and int(turns[said.index("two")]) == 2


def test_the_templates_own_system_is_the_systems(lab):
    chat = lab.chat()
    chat.say("hi", max_new_tokens=2)
    said = lab.tokenizer.decode(chat.cache.read)
    assert said.startswith("<s>be good<e><u>hi<e><a>")
    assert roles(chat.cache, said)["system"].startswith("<s>be goo")


def test_turns_through_a_chat_equal_one_long_prompt(lab):
    """The full cache after three turns gives the logits of the same tokens read at once."""
    chat = lab.chat()
    for text in ("one", "two", "three"):
        chat.say(text, max_new_tokens=4)
    again = KVCache(lab.model)
    want = forward(lab.model, torch.tensor([[*chat.cache.read, 40]]), again)[:, -1]
    got = forward(lab.model, torch.tensor([[40]]), chat.cache)[:, -1]
    assert (got - want).abs().max() < 1e-4


def spoken(strategy: Strategy, messages: list[tuple[str, int]]) -> tuple[KVCache, torch.Tensor]:
    model = zoo.model("llama")
    cache = KVCache(model, strategy)
    for role, tokens in messages:
        cache.annotate(role, tokens)
    return cache, torch.randint(3, 97, (1, sum(n for _, n in messages)), generator=torch.Generator().manual_seed(0))


TALK = [("system", 4), ("user", 3), ("assistant", 10), ("user", 3), ("assistant", 10), ("user", 3), ("assistant", 6)]


@pytest.mark.parametrize("step", [39, 1, 5])
def test_old_answers_go_first_and_whole(step):
    """39 tokens; 22 are protected: system 0-3, users 4-6, 17-19, 30-32, the newest turn's answer 33-38, which makes 19. A budget of 31 leaves 12 to
    old answers: all 10 of the second (20-29) and 2 of the first (7-16)."""
    cache, ids = spoken(Strategy(keep=keep.Conversation(budget=31, inner=keep.KeyDiff(recent=0, sinks=0))), TALK)
    for start in range(0, 39, step):
        forward(cache.model, ids[:, start : start + step], cache)
    for layer in cache.layers:
        for held in layer.dense()[2][0].tolist():
            old = [c for c in held if 7 <= c <= 16]
            assert len(held) == 31 and len(old) == 2
            assert {*range(7), *range(17, 39)} <= set(held)


def test_which_part_of_a_turn_stays_is_the_evidences_word():
    cache, ids = spoken(Strategy(keep=keep.Conversation(budget=31, inner=keep.KeyNorm(recent=0, sinks=0))), TALK)
    full = KVCache(cache.model)
    for each in (cache, full):
        forward(cache.model, ids, each)
    for layer, exact in zip(cache.layers, full.layers, strict=True):
        lengths = exact.dense()[0][0].norm(dim=-1)
        for head, held in enumerate(layer.dense()[2][0].tolist()):
            short = sorted(range(7, 17), key=lambda c: float(lengths[head, c]))[:2]
            assert [c for c in held if 7 <= c <= 16] == sorted(short)


def test_a_protected_part_larger_than_the_budget_is_said_and_nothing_is_read():
    """After 33 tokens: system 4, users 9, nothing of the newest turn but its question: 13. After 39, with its answer, 19."""
    cache, ids = spoken(Strategy(keep=keep.Conversation(budget=18, inner=keep.KeyNorm(recent=0, sinks=0))), TALK)
    with pytest.raises(ValueError, match="has room for 18 tokens, but 19 are protected"):
        forward(cache.model, ids, cache)
    assert cache.get_seq_length() == 0 and not any(layer.is_initialized and len(layer.store) for layer in cache.layers)
    forward(cache.model, ids[:, :33], cache)
    before = [layer.dense()[2] for layer in cache.layers]
    with pytest.raises(ValueError, match="allowed here: 19 or more"):
        forward(cache.model, ids[:, 33:], cache)
    assert cache.get_seq_length() == 33 and all(
        torch.equal(a, layer.dense()[2]) for a, layer in zip(before, cache.layers, strict=True)
    )


def test_chat_says_it_before_anything_is_read(lab):
    chat = lab.chat(Strategy(keep=keep.Conversation(budget=40)))
    chat.say("one", max_new_tokens=3)
    before = (chat.cache.get_seq_length(), list(chat.cache.spans), list(chat.messages), list(chat.cache.read))
    with pytest.raises(ValueError, match=r"budget=40 has room for 40 tokens, but \d+ are protected .* allowed here: \d+ or more"):
        chat.say("two", max_new_tokens=100)
    assert before == (chat.cache.get_seq_length(), list(chat.cache.spans), list(chat.messages), list(chat.cache.read))
    chat.say("two", max_new_tokens=2)
    assert len(chat.messages) == 4


def test_an_answer_ended_half_way_ends_the_chat(lab):
    chat = lab.chat()
    chat.say("one", max_new_tokens=3)

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "continuing":
            raise Cancelled("enough")

    with pytest.raises(Cancelled):
        chat.say("two", max_new_tokens=9, progress=stop)
    with pytest.raises(RuntimeError, match="ended half-way"):
        chat.say("three")


def test_wrong_use_is_named(lab, llama):
    with pytest.raises(ValueError, match="text='  ' is empty"):
        lab.chat().say("  ")
    with pytest.raises(ValueError, match="has no chat template"):
        Lab("bare", llama, Characters()).chat()
    used = KVCache(llama)
    forward(llama, torch.tensor([[5, 6]]), used)
    with pytest.raises(ValueError, match="has already read 2 tokens"):
        lab.chat(cache=used)
    with pytest.raises(ValueError, match="role='robot' is not one of system, user, assistant, tool"):
        used.annotate("robot", 3)
    with pytest.raises(ValueError, match="tokens=0 is out of range"):
        used.annotate("user", 0)
    with pytest.raises(ValueError, match="inner=Window has no evidence"):
        keep.Conversation(inner=keep.Window())
    small = KVCache(llama, Strategy(keep=keep.Conversation(budget=68)))
    forward(llama, torch.full((1, 60), 7), small)  # all of it fits: nobody needs to know who speaks
    with pytest.raises(ValueError, match="was not told who speaks"):
        forward(llama, torch.full((1, 9), 7), small)
    assert small.get_seq_length() == 60
    both = KVCache(llama, Strategy(keep=keep.Conversation(budget=68)))
    both.annotate("system")
    with pytest.raises(ValueError, match="the batch has 2 rows"):
        forward(llama, torch.full((2, 80), 7), both)
