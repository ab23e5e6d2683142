"""Tool calls in the forms that models are trained on, and in those that a grammar holds them to."""

import re

from app.openai import json_stream
from app.openai.parsing import CallEnd, CallStart, MalformedError, Steps
from app.openai.python_calls import read_arguments
from app.openai.tool_parser import ToolParser


class HermesParser(ToolParser):
    """`<tool_call>{...}</tool_call>`, once for each call: Hermes, Qwen, SmolLM2."""

    def markers(self) -> tuple[str, ...]:
        return ("<tool_call>",)

    def calls(self) -> Steps:
        reader = self.reader
        yield from reader.take("<tool_call>")
        yield from reader.skip_space()
        yield from self.call_object()
        yield from reader.skip_space()
        yield from reader.take("</tool_call>")


class LlamaParser(ToolParser):
    """`{"name": ..., "parameters": {...}}`, several with `;` between, perhaps after `<|python_tag|>`: Llama 3."""

    special_marks = ("<|python_tag|>",)

    def markers(self) -> tuple[str, ...]:
        return ("<|python_tag|>", "{")

    def calls(self) -> Steps:
        reader = self.reader
        if (yield from reader.take("<|python_tag|>")):
            yield from reader.skip_space()
        yield from self.call_object(known_only=True)
        yield from reader.skip_space()
        yield from reader.take(";")


class MistralParser(ToolParser):
    """`[TOOL_CALLS] [{...}, {...}]`, or `[TOOL_CALLS]name{...}`, or `[TOOL_CALLS]name[ARGS]{...}`: Mistral."""

    special_marks = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def markers(self) -> tuple[str, ...]:
        return ("[TOOL_CALLS]",)

    def calls(self) -> Steps:
        reader = self.reader
        yield from reader.take("[TOOL_CALLS]")
        match (yield from reader.skip_space()):
            case "[":
                yield from self.call_array()
            case "{":
                yield from self.call_object()
            case _:
                yield from self._named_call()

    def _named_call(self) -> Steps:
        reader = self.reader
        name = yield from self.call_name()
        if (yield from reader.take("[CALL_ID]")):
            yield from self.call_name()
        yield from reader.take("[ARGS]")
        if (yield from reader.skip_space()) != "{":
            raise MalformedError
        self.emit(CallStart(name))
        yield from json_stream.value(reader, self._write)
        self.emit(CallEnd())


class PythonicParser(ToolParser):
    """`[f(a=1, b="x"), g()]`, perhaps between marks: Llama 3.2 and 4. A call is told when it is whole."""

    def markers(self) -> tuple[str, ...]:
        return ("<|python_start|>", "[")

    def calls(self) -> Steps:
        reader = self.reader
        if (yield from reader.take("<|python_start|>")):
            yield from reader.skip_space()
        yield from self._call_list()
        yield from reader.skip_space()
        yield from reader.take("<|python_end|>")

    def _call_list(self) -> Steps:
        reader = self.reader
        yield from self._expect("[")
        while True:
            yield from reader.skip_space()
            name = yield from self.call_name()
            if name not in self.tools:
                raise MalformedError
            arguments = yield from read_arguments(reader)
            self._tell(name, arguments)
            reader.keep = reader.position
            if (yield from reader.skip_space()) != ",":
                break
            reader.position += 1
        yield from self._expect("]")


class ConstrainedParser(ToolParser):
    """For output that a grammar holds to calls: what the limit cuts off of one is not text for the person who asked."""

    def content(self, text: str) -> None:
        pass


class ArrayParser(ConstrainedParser):
    """The whole output is a list of calls: what `tool_choice: "required"` constrains it to."""

    def markers(self) -> tuple[str, ...]:
        return ("[",)

    def calls(self) -> Steps:
        yield from self.call_array(known_only=True)


class ArgumentsParser(ConstrainedParser):
    """The whole output is the arguments of one function: what naming it in `tool_choice` constrains it to."""

    def markers(self) -> tuple[str, ...]:
        return ("{",)

    def calls(self) -> Steps:
        (name,) = self.tools
        self.emit(CallStart(name))
        yield from json_stream.value(self.reader, self._write)
        self.emit(CallEnd())


PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": LlamaParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}

_SIGNS: tuple[tuple[str, str], ...] = (
    (r"\[TOOL_CALLS\]", "mistral"),
    (r"<tool_call>", "hermes"),
    (r"<\|python_tag\|>|\"parameters\": dictionary of argument", "llama3_json"),
    (r"\[\s*func\w*\(", "pythonic"),
)


def detect_tool_parser(template: str | None) -> str:
    """The form that a chat template teaches; Hermes' if it says nothing of it."""
    return next((name for sign, name in _SIGNS if re.search(sign, template or "")), "hermes")
