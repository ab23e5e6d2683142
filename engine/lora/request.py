"""Which adapter a request wants, in vLLM's words, and what is wrong with one that cannot be had."""

from dataclasses import dataclass

from engine.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter by name and folder.

    lora_int_id: vLLM's, where it must be unique; here the files say which adapter it is, and nothing reads it.
    digest: of the files, as `Adapter.digest`, where they must be the ones that somebody has seen; None takes any.

    Raises `InvalidRequestError`.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    digest: str | None = None

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise InvalidRequestError(f"{name} must be a text of at least one character, got {value!r}.", name)
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise InvalidRequestError(
                f"lora_int_id must be a whole number of at least 1, got {self.lora_int_id!r}.", "lora_int_id"
            )


class AdapterError(InvalidRequestError):
    """An adapter that cannot be read, or that this model or engine has no place for; says which and why.

    is_missing: there is no such folder, or none with an adapter in it.
    """

    def __init__(self, message: str, is_missing: bool = False) -> None:
        super().__init__(message, "lora_path")
        self.is_missing = is_missing

    def __reduce__(self) -> tuple[type["AdapterError"], tuple[str, bool]]:
        return type(self), (str(self), self.is_missing)
