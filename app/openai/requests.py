"""Request bodies, from JSON text to the models that validate them."""

from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from app.openai.adapters import LoadAdapterRequest, UnloadAdapterRequest
from app.openai.chat_request import ChatRequest
from app.openai.completion_request import MAX_PROMPTS, CompletionRequest
from app.openai.errors import ApiError, from_validation_error
from app.openai.model import RequestModel
from app.openai.sampling import GenerationRequest
from app.openai.tokenization import DetokenizeRequest, TokenizeRequest
from app.openai.unsupported import CHAT, COMPLETIONS, refuse_unsupported

__all__ = ["MAX_PROMPTS", "ChatRequest", "CompletionRequest", "GenerationRequest", "parse_chat", "parse_completion"]

T = TypeVar("T", bound=RequestModel)


def parse_chat(body: bytes) -> ChatRequest:
    """Raises `ApiError` 400 that names the field, here and below."""
    return _validate(ChatRequest, _object(body), CHAT)


def parse_completion(body: bytes) -> CompletionRequest:
    return _validate(CompletionRequest, _object(body), COMPLETIONS)


def parse_tokenize(body: bytes) -> TokenizeRequest:
    return _validate(TokenizeRequest, _object(body), {})


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    return _validate(DetokenizeRequest, _object(body), {})


def parse_load_adapter(body: bytes) -> LoadAdapterRequest:
    return _validate(LoadAdapterRequest, _object(body), {})


def parse_unload_adapter(body: bytes) -> UnloadAdapterRequest:
    return _validate(UnloadAdapterRequest, _object(body), {})


def _object(body: bytes) -> dict[str, Any]:
    """JSON text to an object. Half of a surrogate pair, NaN and Infinity are no JSON, and refused here."""
    try:
        parsed = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(parsed, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    return parsed


def _validate(model: type[T], body: dict[str, Any], unsupported: dict[str, tuple[Any, ...]]) -> T:
    refuse_unsupported(body, unsupported)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise from_validation_error(error) from None
