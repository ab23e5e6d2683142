"""Errors that a caller can act on: each says what was given, what is allowed and what to do."""

from typing import Self


class ConfigError(ValueError):
    """A setting that cannot be: raised before anything starts."""


class InvalidRequestError(ValueError):
    """A request the engine refuses at the door; nothing of it has reached the step loop."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """The prompt leaves no room for a single output token."""

    def __init__(self, prompt_tokens: int, max_tokens_total: int, param: str = "prompt") -> None:
        super().__init__(
            f"The prompt has {prompt_tokens} tokens, but prompt and output together may have at most "
            f"{max_tokens_total}: shorten the prompt to {max_tokens_total - 1} tokens or fewer.",
            param=param,
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens_total = max_tokens_total

    def __reduce__(self) -> tuple[type[Self], tuple[int, int, str | None]]:
        return type(self), (self.prompt_tokens, self.max_tokens_total, self.param)


class EngineDeadError(RuntimeError):
    """The step thread has ended; the replica that holds it must be replaced."""


class RankLeftError(RuntimeError):
    """Another rank has left the group, or its process has ended: what this one waited for will not come. Where that is
    because its step failed, the ranks can meet again."""


class StepFailedError(RuntimeError):
    """A step failed in other processes, which have done with it and can go on. It says on which rank, and why."""
