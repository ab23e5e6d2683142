"""Answers about to be made: read as a whole or as a stream, once."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from app.off_loop import off_loop
from app.openai.responses import Body, Choice, Format, Part, Usage
from app.openai.token_entries import PromptScorer, TokenEntry
from app.service.choices import Assembler
from app.service.generation import Delta, Job, TextGenerator
from engine.outputs import FinishReason, TokenLogprobs

_ENTRY_SIZE = 4
"""What one token with its log probability costs to show, in the measure of `off_loop`."""


class Answer(Protocol):
    async def whole(self) -> Body: ...

    def chunks(self) -> AsyncGenerator[Body | bytes, None]:
        """What a stream brings; bytes are events that need no more forming."""


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """The outputs of jobs, which become the choices by their index.

    assemblers: one for each job.
    scorers: one for each job, where the answer is to have `prompt_logprobs`. echo_scorers: the same for an echo.
    best_of, n: of each `best_of` choices in a row the `n` likeliest are answered.
    """

    generator: TextGenerator
    jobs: Sequence[Job]
    form: Format
    assemblers: Sequence[Assembler]
    scorers: Sequence[PromptScorer] = ()
    echo_scorers: Sequence[PromptScorer] = ()
    n: int = 1
    best_of: int = 1

    async def whole(self) -> Body:
        choices = [Choice() for _ in self.jobs]
        likelihoods = [Likelihood() for _ in self.jobs] if self.best_of > self.n else None
        total = Usage()
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                choice = choices[delta.index]
                self.assemblers[delta.index].add(delta, choice)
                if likelihoods is not None:
                    likelihoods[delta.index].add(delta.entries)
                if self.scorers and delta.prompt_logprobs is not None:
                    choice.prompt_entries = await _scored(self.scorers[delta.index], delta.prompt_logprobs)
                total.add(delta.usage)
        if likelihoods is not None:
            choices = self._best(choices, likelihoods)
        entries = sum(len(choice.entries) + len(choice.prompt_entries or ()) for choice in choices)
        return await off_loop(self.form.whole, entries * _ENTRY_SIZE, choices, total)

    async def chunks(self) -> AsyncGenerator[Body | bytes, None]:
        form, total = self.form, Usage()
        opened: set[int] = set()
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                index = delta.index
                if index not in opened:
                    opened.add(index)
                    for chunk in form.opening(index):
                        yield chunk
                for part in self.assemblers[index].take(delta):
                    yield form.text_event(index, part.content) if part.is_plain else form.chunk(index, part)
                total.add(delta.usage)
        if form.include_usage:
            yield form.usage(total)

    def _deltas(self) -> AsyncGenerator[Delta, None]:
        """A generator around another costs each token something: only where there is something to add."""
        deltas = self.generator.run(self.jobs)
        return self._with_echo_scores(deltas) if self.echo_scorers else deltas

    async def _with_echo_scores(self, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        async with aclosing(deltas):
            async for delta in deltas:
                if delta.prompt_logprobs is not None:
                    delta.prompt_entries = await _scored(self.echo_scorers[delta.index], delta.prompt_logprobs)
                yield delta

    def _best(self, choices: list[Choice], likelihoods: "list[Likelihood]") -> list[Choice]:
        best: list[Choice] = []
        for start in range(0, len(choices), self.best_of):
            group = sorted(range(start, start + self.best_of), key=lambda i: -likelihoods[i].mean)
            best += [choices[i] for i in group[: self.n]]
        return best


async def _scored(scorer: PromptScorer, logprobs: Sequence[TokenLogprobs | None]) -> list[TokenEntry]:
    return await off_loop(scorer.entries, len(logprobs) * (1 + scorer.num_top) * _ENTRY_SIZE, logprobs)


@dataclass(slots=True)
class Likelihood:
    """The mean log probability of an output's tokens."""

    total: float = 0.0
    count: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def add(self, entries: Sequence[TokenEntry]) -> None:
        self.total += sum(entry.logprob or 0.0 for entry in entries)
        self.count += len(entries)


@dataclass(frozen=True, slots=True)
class PromptOnlyAnswer:
    """The answer to max_tokens 0 without scores: no token is made; the prompts come back if that was asked for."""

    form: Format
    texts: Sequence[str]
    prompt_tokens: int
    reason: str = FinishReason.LENGTH

    async def whole(self) -> Body:
        choices = [Choice(content=text, finish_reason=self.reason) for text in self.texts]
        return self.form.whole(choices, Usage(self.prompt_tokens))

    async def chunks(self) -> AsyncGenerator[Body | bytes, None]:
        for index, text in enumerate(self.texts):
            for chunk in self.form.opening(index):
                yield chunk
            if text:
                yield self.form.chunk(index, Part(text))
            yield self.form.chunk(index, Part(finish_reason=self.reason))
        if self.form.include_usage:
            yield self.form.usage(Usage(self.prompt_tokens))
