"""Reads rotary embeddings from a config in Hugging Face's words, in the new spelling and the old.

transformers 5 writes `rope_parameters`, which may hold one set for each kind of layer; before, `rope_theta` stood alone
and `rope_scaling` beside it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError
from engine.model_config import RopeConfig
from engine.models.families import Family
from kernels.rotary_kinds import REQUIRED

if TYPE_CHECKING:
    from engine.hf.config import ConfigReader

_ALIASES = {"su": "longrope"}
_LAYER_KINDS = ("full_attention", "sliding_attention")
_MOST = 1e30
_NUMBER = "a number above 0"
_LISTS = ("short_factor", "long_factor")


def rope_configs(read: ConfigReader, family: Family, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """-> of layers that see all, of layers that see a window. Raises `ConfigError` that names the key."""
    key = "rope_parameters" if read.config.get("rope_parameters") is not None else "rope_scaling"
    given = read.config.get(key) or {}
    if not isinstance(given, dict):
        raise read.error(key, "must be an object")
    by_layer = {kind: given[kind] for kind in _LAYER_KINDS if isinstance(given.get(kind), dict)}
    if by_layer and not family.layer_rope:
        raise read.error(key, "rotary embeddings that differ between kinds of layer are not supported here")
    if not by_layer:
        full = _rope(read, family, key, given, read.get("rope_theta", 10000.0), head_dim)
        if not family.layer_rope:
            return full, full
    else:
        full = _rope(read, family, key, by_layer.get("full_attention", {}), read.get("rope_theta", 10000.0), head_dim)
    local_theta = read.get("rope_local_base_freq", read.get("rope_theta", 10000.0))
    return full, _rope(read, family, key, by_layer.get("sliding_attention", {}), local_theta, head_dim)


def _rope(
    read: ConfigReader, family: Family, key: str, given: Mapping[str, Any], theta: Any, head_dim: int
) -> RopeConfig:
    theta = given.get("rope_theta", theta)
    if not _is_number(theta):
        raise ConfigError(f"{read.source}: rope_theta is {reprlib.repr(theta)}, but must be {_NUMBER}")
    kind = given.get("rope_type", given.get("type", "default"))
    kind = _ALIASES.get(kind, kind) if isinstance(kind, str) else ""
    if kind not in REQUIRED:
        raise read.error(key, f"only the rope types {', '.join(REQUIRED)} are supported")
    share = given.get("partial_rotary_factor", read.get("partial_rotary_factor", 1.0))
    if share != 1 and not family.partial_rotary:
        raise read.error(key, "rotary embeddings over a part of the head are not supported here")
    if not isinstance(share, int | float) or not 0 < share <= 1 or int(head_dim * share) % 2:
        raise read.error(key, "partial_rotary_factor must leave an even number of dimensions of a head")
    if kind == "default":
        return RopeConfig(float(theta), partial_rotary_factor=float(share))
    parameters = dict(given) | _lengths(read, given, kind)
    for name in REQUIRED[kind]:
        _check(read, key, kind, name, parameters.get(name))
    return RopeConfig(float(theta), kind, parameters, float(share))


def _lengths(read: ConfigReader, given: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Parameters that may stand elsewhere in the config, or follow from its lengths."""
    longest = read.count("max_position_embeddings")
    if kind == "dynamic":
        return {"max_position_embeddings": longest}
    if kind not in ("yarn", "longrope", "llama3"):
        return {}
    trained = read.get("original_max_position_embeddings", given.get("original_max_position_embeddings", longest))
    found = {"original_max_position_embeddings": trained}
    if given.get("factor") is None and kind != "llama3" and isinstance(trained, int) and trained > 0:
        found["factor"] = longest / trained
    return found


def _check(read: ConfigReader, key: str, kind: str, name: str, value: Any) -> None:
    if name in _LISTS:
        if not isinstance(value, list) or not all(map(_is_number, value)):
            raise read.error(key, f"must have {name}, a list of numbers above 0, for the rope type {kind}")
    elif not _is_number(value):
        raise read.error(key, f"must have {name}, {_NUMBER}, for the rope type {kind}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _MOST
