"""Events of a stream: the short way to a text's event makes what the long one does."""

from typing import Any

import pytest

from app.openai.responses import CallDelta, ChatFormat, CompletionFormat, Format, Part, event

TEXTS = [" the", 'a "quoted" \\ text', "line\nbreaks\r\n\t\x00\x1f", "世界 🌶", "\u2028\x7f", "</script>", "text-", "{}"]


@pytest.mark.parametrize("options", [{}, {"include_usage": True}, {"token_ids": True}, {"logprobs": True}])
@pytest.mark.parametrize("kind", [ChatFormat, CompletionFormat])
def test_the_event_of_a_text_is_that_of_its_chunk(kind: type[Format], options: dict[str, Any]) -> None:
    form = kind(model='a "model"', **options)
    for index in (0, 3, 0):
        for text in TEXTS:
            assert form.text_event(index, text) == event(form.chunk(index, Part(text)))


def test_only_a_text_on_its_own_is_plain() -> None:
    assert Part("a").is_plain
    for part in (Part(), Part("a", reasoning="b"), Part("a", call=CallDelta(0, "")), Part("a", token_ids=[1]),
                 Part("a", finish_reason="stop"), Part(reasoning="b")):  # fmt: skip
        assert not part.is_plain
