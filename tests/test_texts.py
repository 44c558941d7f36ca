"""The texts that come with kvlab."""

import pytest

from kvlab.texts import prompts, reference_text


def test_the_reference_text_is_long_enough_for_the_protocol() -> None:
    assert reference_text().startswith("Special method names\n****")
    assert len(reference_text()) > 50_000


def test_the_prompts_are_filled_in() -> None:
    found = prompts()
    assert list(found) == ["reference", "story", "question"]  # the first is the default
    assert found["reference"] == reference_text()[:2230]
    assert "resurrection" in found["question"]  # the answer is in the text above the question
    assert found["question"].endswith("Answer: It is called object")
    assert not any("{{" in text or text != text.rstrip() for name, text in found.items() if name != "reference")


@pytest.mark.model
def test_the_default_prompt_has_about_512_tokens() -> None:
    from kvlab.models import load_model

    tokenizer = load_model()[1]
    counts = {name: len(tokenizer(text).input_ids) for name, text in prompts().items()}
    assert 480 <= counts["reference"] <= 512
    assert 200 <= counts["story"] <= 512
    assert 300 <= counts["question"] <= 512
