"""Streaming against one long forward pass, two keys by what is hidden and asked, and what the studies write down."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import kvlab
from kvlab import Strategy, keep
from kvlab.lab import Lab
from kvlab.measure import studies
from kvlab.measure.stream import stream
from kvlab.measure.tasks import two_keys


def test_streaming_with_room_is_one_long_forward_pass(tiny_lab: Lab):
    ids = torch.randint(3, 97, (1, 130), generator=torch.Generator().manual_seed(0))
    made = stream(tiny_lab, Strategy(), ids, step=16, every=2)
    kvlab.detach(tiny_lab.model)
    with torch.no_grad():
        want = F.cross_entropy(tiny_lab.model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
    assert (made.loss - want).abs().max() < 1e-4
    assert made.smooth(43).allclose(want.view(3, 43).mean(1), atol=1e-4)
    assert [read for read, _ in made.points] == [32, 64, 96, 128, 130] and made.points[-1][1] > 2 * made.points[0][1]


def test_streaming_goes_on_past_the_context_in_the_same_bytes(tiny_lab: Lab):
    ids = torch.randint(3, 97, (1, 1500), generator=torch.Generator().manual_seed(0))
    assert tiny_lab.context == 512
    made = stream(tiny_lab, Strategy(keep=keep.Window(size=60, sinks=4, positions="cache")), ids, step=50)
    assert made.loss.isfinite().all() and len({size for _, size in made.points}) == 1
    again = stream(tiny_lab, Strategy(keep=keep.Window(size=60, sinks=4, positions="cache")), ids[:, :600], step=50)
    assert torch.equal(made.loss[:599], again.loss)
    for step, said in ((0, "step=0"), (513, "step=513 is out of range")):
        with pytest.raises(ValueError, match=said):
            stream(tiny_lab, Strategy(), ids, step=step)
    with pytest.raises(ValueError, match="window=0"):
        made.smooth(0)
    with pytest.raises(ValueError, match=r"has 1 token\(s\)"):
        stream(tiny_lab, Strategy(), ids[:, :1])


def test_an_endless_strategy_may_be_generated_with_past_the_context(tiny_lab: Lab):
    ids = torch.randint(3, 97, (1, 700), generator=torch.Generator().manual_seed(0))
    endless = Strategy(keep=keep.Window(size=60, sinks=4, positions="cache"), chunk=64)
    assert tiny_lab.generate(ids, endless, max_new_tokens=3).memory.seen == 702
    with pytest.raises(ValueError, match="more than the model's context"):
        tiny_lab.generate(ids, Strategy(keep=keep.Window(size=60, sinks=4), chunk=64), max_new_tokens=3)


def test_two_keys_are_hidden_and_asked_for(tiny_lab: Lab):
    """The text is read before anything is asked; then one question, then the other, in the same cache. A lab that remembers answers both."""
    read: list[str] = []

    class Remembers(Lab):
        def prefill(self, ids, cache, chunk=0, progress=None):
            read.append(self.tokenizer.decode(ids[0].tolist()))
            return super().prefill(ids, cache, chunk, progress)

        def generate(self, prompt, strategy=None, *, cache=None, max_new_tokens=40, **more):
            made = super().generate(prompt, strategy, cache=cache, max_new_tokens=max_new_tokens, **more)
            name = str(prompt).removeprefix("??The secret pass key for ").split()[-2]
            text = read[0] if not isinstance(prompt, torch.Tensor) else ""
            key = text.partition(f"key for {name} is ")[2][:5]
            return replace(made, text=f" {key}.")

    lab = Remembers("tiny", tiny_lab.model, tiny_lab.tokenizer)
    made = two_keys(lab, Strategy(keep=keep.HeavyHitter(budget=80)), tokens=300, texts=1, seed=3)
    assert made.first == (True,) and made.second == (True,) and made.found == made.asked == 2
    assert made.digits(0) == made.digits(1) == 1.0
    half = replace(made, said=((f" {made.keys[0][0][:3]}x", ""),))
    assert half.digits(0) == 0.6 and half.digits(1) == 0.0
    with pytest.raises(ValueError, match="question=2"):
        made.digits(2)
    assert read[0].count("The secret pass key for") == 2 and "Remember it." in read[0]
    assert made.memory.stored == 80 and made.memory.seen == len(read[0])  # before anything was asked
    for wrong, said in (
        (dict(tokens=100), "tokens=100"),
        (dict(tokens=300, texts=0), "texts=0"),
        (dict(tokens=300, texts=999), "texts=999"),
    ):
        with pytest.raises(ValueError, match=said):
            two_keys(tiny_lab, **wrong)


def test_a_study_writes_each_row_as_it_comes(tiny_lab: Lab, tmp_path, monkeypatch: pytest.MonkeyPatch):
    def broken(lab, say):
        yield {"name": "one", "kl": 0.5}
        yield {"name": "two", "kl": 0.25}
        raise RuntimeError("the power went")

    monkeypatch.setitem(studies.STUDIES, "compress", broken)
    out = tmp_path / "keep.jsonl"
    with pytest.raises(RuntimeError):
        studies.study("compress", tiny_lab, print, out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["name"] for row in rows] == ["one", "two"]
    assert all(
        row["study"] == "compress" and row["command"] == "kvlab study compress" and row["machine"]["torch"] for row in rows
    )
    monkeypatch.setattr(studies._data, "path", lambda name: out)
    with out.open("a") as file:
        file.write(json.dumps(rows[0] | {"kl": 0.125}) + "\n")
    assert [(row["name"], row["kl"]) for row in studies.recorded("compress")] == [
        ("two", 0.25),
        ("one", 0.125),
    ]  # the newest of each
    with pytest.raises(ValueError, match="nothing is recorded of the study 'recall'"):
        studies.recorded("recall")
    for call in (lambda: studies.study("nothing", tiny_lab, print), lambda: studies.recorded("nothing")):
        with pytest.raises(ValueError, match="study='nothing' is not one of compress, prefill, recall, stream"):
            call()


def test_every_way_of_the_table_can_be_built():
    for budget in (205, 0.2):
        ways = studies.evictors(budget)
        assert ways["full cache"] == Strategy() and len(set(ways.values())) == len(ways) >= 13
