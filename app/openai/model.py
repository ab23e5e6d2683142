"""What all request models have in common."""

from pydantic import BaseModel, ConfigDict


class RequestModel(BaseModel):
    """Strict about types, deaf to unknown fields, with numbers that are numbers."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)
