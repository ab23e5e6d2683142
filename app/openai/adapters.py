"""The bodies of /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from typing import Annotated

from pydantic import Field

from app.openai.model import RequestModel


class LoadAdapterRequest(RequestModel):
    """lora_path: a folder where the engine runs. load_inplace: in the place of an adapter of that name.

    model: whose adapter it is, where the server has several.
    """

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False
    model: str | None = None


class UnloadAdapterRequest(RequestModel):
    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_int_id: int | None = None
