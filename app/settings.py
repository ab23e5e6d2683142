"""One settings model for YAML arguments, `NANOSERVE_*` variables and the command line."""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_type_hints

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, create_model, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app.setting_errors import wrong_values
from engine.config import ALIASES, EngineConfig
from engine.errors import ConfigError
from engine.hub import PACKAGED_MODELS
from engine.unknown_settings import unknown_settings

ENV_PREFIX = "NANOSERVE_"

OTHER_VARIABLES = {"NANOSERVE_CACHE", "NANOSERVE_CPU_ISA"}
"""Variables with our prefix that are no settings: where files are kept, which CPU kernels are built."""


def _listed(given: Any) -> Any:
    """A list, as YAML has it, or text with commas between, as the environment has it."""
    return tuple(part.strip() for part in given.split(",") if part.strip()) if isinstance(given, str) else given


def _adapters(given: Any) -> Any:
    """A mapping, as YAML has it, or `name=folder` with commas between; folders absolute, as the replicas may run in
    another one."""
    if isinstance(given, str):
        pairs = [part.strip().partition("=") for part in given.split(",") if part.strip()]
        if not all(name and path for name, _, path in pairs):
            raise ValueError("adapters are given as name=folder, with commas between")
        given = {name.strip(): path.strip() for name, _, path in pairs}
        if len(given) < len(pairs):
            raise ValueError("an adapter's name comes twice")
    if not isinstance(given, Mapping) or not all(isinstance(p, str) and p and n for n, p in given.items()):
        raise ValueError("adapters are folders by name")
    return {name: os.path.abspath(os.path.expanduser(path)) for name, path in given.items()}


ApiKey = Annotated[SecretStr, Field(min_length=1)]


_OF_THE_DOOR = {
    "num_ingress_replicas", "stream_commit_s", "log_level", "log_encoding", "api_keys", "api_keys_file",
    "max_requests_per_key", "cors_allow_origins", "models",
}  # fmt: skip
"""Settings that are the same for all models."""

LIVE = ("api_keys_file", "max_queue_size", "max_requests_per_key", "max_resubmissions")
"""Settings that can change under a running application: in the `user_config` of the deployment `ingress`."""

_PATHS = ("api_keys_file", "chat_template")
"""Settings that name a file: made absolute, since the replicas may run in another folder."""


class AppSettings(BaseSettings):
    """Settings of the application, beside those of the engine, which `Settings` adds from `EngineConfig`.

    served_model_name: the model's name in the API; by default `model`, or the last part of its path.
    num_replicas: copies of the engine, where max_replicas is not given.
    max_replicas: as many copies as the load needs, up to this.
    min_replicas: and not fewer than this; 0 lets the last one go too.
    target_ttft_s: time to first token, in seconds, that the number of copies is chosen for.
    downscale_delay_s: seconds that fewer copies must have been enough before one goes.
    downscale_to_zero_delay_s: seconds without any request before the last one goes.
    shard_placement: where the shards of a replica may be, if tensor_parallel_size is above 1: all on one node
        (`STRICT_PACK`), on few nodes (`PACK`), or on as many as there are (`SPREAD`).
    num_ingress_replicas: processes that take HTTP requests in.
    max_queue_size: requests that may wait in an ingress before it answers 429.
    max_resubmissions: times in a row that a request whose replica was lost goes on at another without bringing more
        than one token, before it fails.
    graceful_shutdown_timeout_s: seconds that a replica which is to go may take to finish what it runs; the rest goes on
        elsewhere.
    stream_commit_s: seconds that a stream's HTTP status waits for the first token.
    log_level, log_encoding: of all deployments.
    chat_template: Jinja text, or the path of a file that has it, in place of the model's own.
    tool_call_parser: the form of tool calls in the output; `auto` goes by the chat template, `none` reads none.
    reasoning_parser: `auto` keeps the thoughts of a model whose template has `<think>` apart from its answers.
    api_keys: one of them must come with each request but `/health`; none: all are served.
    api_keys_file: a file with further ones, one a line, read where the ingress runs.
    max_requests_per_key: requests of one key at once, above which it is answered 429.
    lora_modules: LoRA adapters that are served beside the model from the start, folders by name.
    allow_runtime_lora_updating: clients may load and unload adapters; either of both sets enable_lora too.
    cors_allow_origins: web pages' origins whose scripts may call; `*` for all.
    models: several models behind one door, each by its own settings, over the others given here.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, allow_inf_nan=False
    )

    served_model_name: Annotated[str, Field(min_length=1)] | None = None
    num_replicas: Annotated[int, Field(ge=1)] = 1
    max_replicas: Annotated[int, Field(ge=1)] | None = None
    min_replicas: Annotated[int, Field(ge=0)] = 1
    target_ttft_s: Annotated[float, Field(gt=0)] = 2.0
    downscale_delay_s: Annotated[float, Field(ge=0)] = 60.0
    downscale_to_zero_delay_s: Annotated[float, Field(ge=0)] = 300.0
    shard_placement: Literal["STRICT_PACK", "PACK", "SPREAD"] = "STRICT_PACK"
    num_ingress_replicas: Annotated[int, Field(ge=1)] = 1
    max_queue_size: Annotated[int, Field(ge=0)] = 256
    max_resubmissions: Annotated[int, Field(ge=0)] = 3
    graceful_shutdown_timeout_s: Annotated[float, Field(ge=0)] = 20.0
    stream_commit_s: Annotated[float, Field(ge=0)] = 5.0
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    log_encoding: Literal["TEXT", "JSON"] = "TEXT"
    chat_template: Annotated[str, Field(min_length=1)] | None = None
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "pythonic", "none"] = "auto"
    reasoning_parser: Literal["auto", "none"] = "auto"
    api_keys: Annotated[tuple[ApiKey, ...], NoDecode, BeforeValidator(_listed)] = ()
    api_keys_file: Annotated[str, Field(min_length=1)] | None = None
    max_requests_per_key: Annotated[int, Field(ge=1)] = 256
    lora_modules: Annotated[dict[str, str], NoDecode, BeforeValidator(_adapters)] = Field(default_factory=dict)
    allow_runtime_lora_updating: bool = False
    cors_allow_origins: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_listed)] = ()
    models: tuple["AppSettings", ...] = ()

    @model_validator(mode="after")
    def _replicas_agree(self) -> Self:
        if self.max_replicas is not None and self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas is {self.min_replicas}, above max_replicas, which is {self.max_replicas}")
        return self

    def engine_config(self) -> EngineConfig:
        """Raises `ConfigError`."""
        given = {name: getattr(self, name) for name in _ENGINE_FIELDS}
        if self.lora_modules or self.allow_runtime_lora_updating:
            given["enable_lora"] = True
        return EngineConfig(**given)

    @property
    def public_model_name(self) -> str:
        model = self.engine_config().model
        return self.served_model_name or (Path(model).name if is_path(model) else model)

    @property
    def each(self) -> tuple["AppSettings", ...]:
        """The settings of each model."""
        return self.models or (self,)


_hints = get_type_hints(EngineConfig)
_ENGINE_FIELDS: dict[str, Any] = {
    field.name: (_hints[field.name], field.default) for field in dataclasses.fields(EngineConfig)
}

Settings: type[AppSettings] = create_model("Settings", __base__=AppSettings, __module__=__name__, **_ENGINE_FIELDS)


def _kinds(annotation: Any) -> set[Any]:
    """The types that an annotation allows."""
    args = get_args(annotation)
    return {annotation} if not args or isinstance(args[0], str) else set().union(*map(_kinds, args))


_NUMBERS = {
    name
    for name, field in Settings.model_fields.items()
    if (kinds := _kinds(field.annotation)) & {int, float} and bool not in kinds
}


def load_settings(args: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> AppSettings:
    """Arguments over environment over defaults. Raises `ConfigError` that names the setting that is wrong."""
    from_environment = _from_environment(environ)
    given = from_environment | _without_aliases(args)
    entries = _entries(given.pop("models")) if "models" in given else []
    models = tuple(_one_model(f"models[{i}]", given, entry) for i, entry in enumerate(entries))
    settings = _checked(given | {"models": models}, _shown(from_environment))
    _check_names(settings)
    return settings


def with_live(settings: AppSettings, changes: Mapping[str, Any]) -> AppSettings:
    """Those settings with `changes` in their place, for each model. Raises `ConfigError`."""
    if wrong := sorted(_by_name(changes).keys() - set(LIVE)):
        raise ConfigError(f"user_config: {', '.join(wrong)} cannot change while it runs; {', '.join(LIVE)} can")

    def changed(one: AppSettings, changes: Mapping[str, Any]) -> AppSettings:
        return _checked({name: getattr(one, name) for name in one.model_fields_set} | dict(changes), str)

    of_a_model = {name: value for name, value in changes.items() if name not in _OF_THE_DOOR}
    models = tuple(changed(model, of_a_model) for model in settings.models)
    return changed(settings, {**changes, "models": models})


def _check_names(settings: AppSettings) -> None:
    names = [model.public_model_name for model in settings.each]
    if len(set(names)) < len(names):
        raise ConfigError(f"models: two of them have one name, got {', '.join(names)}; give each a served_model_name")
    for model in settings.each:
        for name in model.lora_modules:
            if name in names:
                raise ConfigError(
                    f"lora_modules: {name!r} is the name of a model or of another adapter; choose another"
                )
            names.append(name)


def _entries(given: Any) -> list[dict[str, Any]]:
    """The models' own settings: a list, as YAML has it, or JSON, as the environment and the command line have it."""
    try:
        entries = json.loads(given) if isinstance(given, str) else list(given)
        if entries and all(isinstance(entry, dict) for entry in entries):
            return entries
    except (TypeError, ValueError):
        pass
    raise ConfigError(
        f"models: a list of the settings of each model, at least one, or that as JSON, not {given!r}; for one model "
        "leave it out and set model"
    )


def _one_model(where: str, common: Mapping[str, Any], entry: Mapping[str, Any]) -> AppSettings:
    try:
        own = _without_aliases(entry)
        if wrong := sorted(own.keys() & _OF_THE_DOOR):
            raise ConfigError(f"{', '.join(wrong)} cannot be set for one model, only for all")
        return _checked({**common, **own}, str)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _checked(given: dict[str, Any], shown: Callable[[str], str]) -> AppSettings:
    """shown: a setting's name as the person wrote it."""
    if isinstance(given.get("model"), str):
        given["model"] = _absolute(given["model"])
    for name in _PATHS:
        if given.get(name) and isinstance(given[name], str) and "{" not in given[name]:
            given[name] = os.path.abspath(os.path.expanduser(given[name]))
    known = set(Settings.model_fields)
    if unknown := sorted(given.keys() - known):
        raise ConfigError(unknown_settings(unknown, known, shown))
    for name in _NUMBERS & given.keys():
        if isinstance(given[name], bool):  # pydantic would take them for 1 and 0
            raise ConfigError(f"{shown(name)}: must be a number, got {given[name]!r}")
    try:
        settings = Settings(**given)
    except ValidationError as error:
        raise ConfigError(wrong_values(error, shown)) from None
    settings.engine_config()
    return settings


def is_path(model: str) -> bool:
    """Whether `model` can only mean a file or folder: written as a path, or there."""
    return model.startswith(("/", "./", "../", "~")) or model.endswith(".gguf") or Path(model).exists()


def _absolute(model: str) -> str:
    """A path as the replicas will find it, which may run in another folder."""
    local = model not in PACKAGED_MODELS and model and is_path(model)
    return os.path.abspath(os.path.expanduser(model)) if local else model


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read here rather than by the settings model, which would pass over a variable whose name it does not know."""
    return _without_aliases(
        {
            name[len(ENV_PREFIX) :].lower(): value
            for name, value in environ.items()
            if name.startswith(ENV_PREFIX) and name not in OTHER_VARIABLES and value
        }
    )


def _by_name(given: Mapping[Any, Any]) -> dict[str, Any]:
    """A file's keys need not be text: YAML reads numbers, `on` and `null` as what they are."""
    if strange := [key for key in given if not isinstance(key, str)]:
        raise ConfigError(f"settings have names, got {', '.join(map(repr, strange))} in the place of one")
    return dict(given)


def _without_aliases(settings: Mapping[str, Any]) -> dict[str, Any]:
    plain = _by_name(settings)
    for alias, name in ALIASES.items():
        if alias in plain:
            if name in plain:
                raise ConfigError(f"{alias} and {name} are one setting: give one of them")
            plain[name] = plain.pop(alias)
    return plain


def _shown(from_environment: Mapping[str, Any]) -> Callable[[str], str]:
    return lambda name: f"{ENV_PREFIX}{name.upper()}" if name in from_environment else name
