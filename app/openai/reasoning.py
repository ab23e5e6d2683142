"""`<think>...</think>` in model output: what a model writes to itself, apart from its answer."""

from dataclasses import dataclass

from app.openai.parsing import Content, Reasoning, Steps, StreamParser, held_back


@dataclass(frozen=True, slots=True)
class Marks:
    """What stands before and after a thought. special: whether these are special tokens, which text leaves out."""

    open: str
    close: str
    special: bool = False

    def begun_by(self, prompt: str) -> bool:
        """Whether the template has begun a thought at the end of the prompt."""
        return prompt.rstrip().endswith(self.open)

    def left_open_in(self, text: str) -> bool:
        """Whether a thought is begun in `text` and not ended."""
        return text.rfind(self.open) > text.rfind(self.close)


THINK = Marks("<think>", "</think>")
"""DeepSeek-R1, Qwen3 and most others."""

MISTRAL_THINK = Marks("[THINK]", "[/THINK]", special=True)
"""Magistral, Ministral."""


class ThinkParser(StreamParser):
    """opened: whether the prompt ends with the opening mark, which is then not in the output.

    White space at the edges of the thought, and between it and the answer, goes with the marks.
    """

    def __init__(self, opened: bool, marks: Marks = THINK) -> None:
        self.marks = marks
        self._opened = opened
        super().__init__()

    def run(self) -> Steps:
        reader = self.reader
        if self._opened:
            yield from reader.skip_space()
            yield from reader.take(self.marks.open)  # some write it again
        else:
            reader.keep = 0
            yield from reader.skip_space()
            if not (yield from reader.take(self.marks.open)):
                reader.position, reader.keep = reader.keep, None
                yield from self._content()
                return
            reader.keep = None
        yield from self._reasoning()
        yield from reader.skip_space()
        yield from self._content()

    def _reasoning(self) -> Steps:
        """Up to the closing mark, or to the end."""
        reader, close = self.reader, self.marks.close
        yield from reader.skip_space()
        space = ""
        while True:
            rest = reader.rest
            at = rest.find(close)
            text = space + (rest[:at] if at >= 0 else rest[: len(rest) - held_back(rest, close)])
            reader.position += len(text) - len(space)
            shown = text.rstrip()
            space = text[len(shown) :]
            if shown:
                self.emit(Reasoning(shown))
            if at >= 0:
                reader.position += len(close)
                return
            if not (yield from reader.more()):
                if reader.rest:
                    self.emit(Reasoning(space + reader.rest))
                    reader.position += len(reader.rest)
                return

    def _content(self) -> Steps:
        reader = self.reader
        while (yield from reader.fill()):
            self.emit(Content(reader.rest))
            reader.position += len(reader.rest)


def thought_marks(template: str) -> Marks | None:
    """The marks of the thoughts of a chat template's model; None if it does not think aloud."""
    return next((marks for marks in (THINK, MISTRAL_THINK) if marks.close in template), None)
