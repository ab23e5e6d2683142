"""What `LLM` returns, and how an output comes together from the engine's tokens; names and shapes as in vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.outputs import Finished, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.text.detokenizer import Detokenizer
from engine.text.token_text import TokenTexts
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.lora.adapter import Adapter


@dataclass(frozen=True, slots=True)
class Logprob:
    """logprob: natural logarithm, by the model itself. rank: 1 for the most likely. decoded_token: `TokenText.text`."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """What a request produced.

    token_ids: all of them, with the EOS or stop token that ended it, which has no text.
    finish_reason: "stop", "length", or "error" when a step of the engine failed (the log says how).
    stop_reason: the stop string or the id out of `stop_token_ids` that ended it; None for EOS.
    logprobs: for each of token_ids, the token itself and the most likely ones by id; None unless they were asked for.
    cumulative_logprob: the sum over token_ids; None where logprobs is.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its outputs, n of them in order.

    prompt: None when the prompt came as token ids. prompt_logprobs: for each prompt token, as `logprobs` of an output,
    and None for the first; None unless they were asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass(slots=True)
class Completion:
    """One sequence on its way: the tokens so far, and their text."""

    request_id: str
    index: int
    params: SamplingParams
    tokenizer: Tokenizer
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finished: Finished | None = None
    detokenizer: Detokenizer = field(init=False)

    def __post_init__(self) -> None:
        self.detokenizer = Detokenizer(
            self.tokenizer,
            skip_special_tokens=self.params.skip_special_tokens,
            stop=self.params.stop_strings,
            include_stop_str_in_output=self.params.include_stop_str_in_output,
            min_tokens=self.params.min_tokens,
        )

    def push(self, token_ids: list[int], logprobs: Sequence[TokenLogprobs], end: Finished | None) -> bool:
        """Take new tokens; true if a stop string ended the text."""
        self.token_ids += token_ids
        self.logprobs += logprobs
        stop_token_last = end is not None and end.stop_token_id is not None
        hidden = stop_token_last and not self.params.include_stop_str_in_output
        self.texts.append(self.detokenizer.push(token_ids[:-1] if hidden else token_ids))
        return self.detokenizer.stop_reason is not None

    def end(self, finished: Finished) -> None:
        self.texts.append(self.detokenizer.finish())
        self.finished = finished
        if self.detokenizer.stop_reason is not None:
            del self.token_ids[self.detokenizer.num_tokens :]
            del self.logprobs[self.detokenizer.num_tokens :]

    def output(self, token_texts: TokenTexts) -> CompletionOutput:
        finished = self.finished
        assert finished is not None
        reason: str = finished.reason.value
        stop_reason: int | str | None = self.detokenizer.stop_reason
        if stop_reason is not None:
            reason = "stop"
        elif finished.stop_token_id in self.params.stop_token_ids:
            stop_reason = finished.stop_token_id
        output = CompletionOutput(self.index, "".join(self.texts), self.token_ids, reason, stop_reason)
        if self.params.logprobs is not None:
            output.logprobs = [_by_id(entry, token_texts, i == 0) for i, entry in enumerate(self.logprobs)]
            output.cumulative_logprob = sum(entry.logprobs[0] for entry in self.logprobs)
        return output


@dataclass(slots=True)
class PromptJob:
    """A prompt on its way, with its n sequences. prompt: None when it came as token ids. adapter: of its request."""

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    completions: list[Completion]
    adapter: "Adapter | None" = None

    @property
    def finished(self) -> bool:
        return all(completion.finished is not None for completion in self.completions)

    def result(self, token_texts: TokenTexts) -> RequestOutput:
        first = self.completions[0]
        assert first.finished is not None
        prompt_logprobs = None
        if first.prompt_logprobs is not None:
            prompt_logprobs = [
                None if entry is None else _by_id(entry, token_texts, first=False) for entry in first.prompt_logprobs
            ]
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_ids,
            [completion.output(token_texts) for completion in self.completions],
            first.finished.num_cached_tokens,
            finished=True,
            prompt_logprobs=prompt_logprobs,
        )


def _by_id(entry: TokenLogprobs, token_texts: TokenTexts, first: bool) -> dict[int, Logprob]:
    """vLLM's form: the token itself first, then the most likely ones."""
    ranked = {
        token_id: (logprob, i)
        for i, (token_id, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True))
    }
    ranked[entry.token_ids[0]] = entry.logprobs[0], entry.rank
    return {i: Logprob(logprob, rank, token_texts.entry(i, first).text) for i, (logprob, rank) in ranked.items()}
