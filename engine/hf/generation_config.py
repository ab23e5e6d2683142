"""Default sampling of a model, by the generation_config.json that its makers put beside it."""

from pathlib import Path
from typing import Any

from engine.errors import ConfigError, InvalidRequestError
from engine.model_config import is_gguf, read_json
from engine.sampling_params import SamplingParams

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What is taken of the file, as vLLM takes it; its output limit is not: a request without one has a rule."""


def default_sampling(path: Path, generation_config: str) -> dict[str, Any]:
    """Fields of `SamplingParams` that stand where a request does not set them.

    path: a folder or a `.gguf` file, which has no such defaults. generation_config: the setting; "auto" reads the
    file, "vllm" leaves it. Raises `ConfigError` that names the file and the value that cannot be.
    """
    file = path / "generation_config.json"
    if generation_config != "auto" or is_gguf(path) or not file.is_file():
        return {}
    given = read_json(file)
    found = {name: given[name] for name in FIELDS if given.get(name) is not None}
    try:
        SamplingParams(**found)
    except (InvalidRequestError, TypeError) as error:
        raise ConfigError(f"{file}: {error} Mend it, or set generation_config to vllm to leave it unread") from error
    return found
