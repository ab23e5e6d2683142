"""Settings from arguments, environment and defaults; and that importing the application is cheap."""

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from ray.serve.config import HTTPOptions

import app
from app.admission import Claim
from app.building import SHORT_WAYS, _resources, build_application
from app.engine_client import EngineLimits
from app.ingress import admission
from app.resources import gpus_to_ask_for
from app.settings import OTHER_VARIABLES, Settings, load_settings
from engine.config import DEFAULT_MODEL, EngineConfig
from engine.errors import ConfigError
from engine.hub import resolve_model
from tests import tiny_models

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def short_ways(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What a build sets for Ray, which is not set before and not left behind."""
    for name in SHORT_WAYS:
        monkeypatch.setenv(name, "")  # what was there is put back
        monkeypatch.delenv(name)
    return SHORT_WAYS


def test_defaults_are_the_engines_own() -> None:
    assert load_settings({}, {}).engine_config() == EngineConfig()


def test_arguments_over_environment_over_defaults() -> None:
    environ = {"NANOSERVE_MAX_MODEL_LEN": "512", "NANOSERVE_MAX_NUM_SEQS": "8", "HOME": "/"}
    config = load_settings({"max_model_len": "256"}, environ).engine_config()
    assert (config.max_model_len, config.max_num_seqs, config.block_size) == (256, 8, 0)


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOSERVE_STREAM_COMMIT_S", "2.5")
    assert load_settings({}).stream_commit_s == 2.5


def test_strings_of_a_command_line_become_their_types() -> None:
    settings = load_settings(
        {"max_model_len": "2048", "enforce_eager": "true", "gpu_memory_utilization": "0.5", "num_replicas": "2"}, {}
    )
    config = settings.engine_config()
    assert (config.max_model_len, config.enforce_eager, config.gpu_memory_utilization) == (2048, True, 0.5)
    assert settings.num_replicas == 2


def test_every_engine_setting_is_a_setting() -> None:
    assert {field.name for field in dataclasses.fields(EngineConfig)} <= set(Settings.model_fields)


@pytest.mark.parametrize(
    ("args", "environ", "named"),
    [
        ({"bogus": 1}, {}, "bogus"),
        ({}, {"NANOSERVE_BOGUS": "1"}, "NANOSERVE_BOGUS"),
        ({"max_model_len": "long"}, {}, "max_model_len"),
        ({}, {"NANOSERVE_MAX_MODEL_LEN": "long"}, "NANOSERVE_MAX_MODEL_LEN"),
        ({"max_model_len": 1}, {}, "max_model_len"),
        ({"max_num_seqs": 1.5}, {}, "max_num_seqs"),
        ({"dtype": "int3"}, {}, "dtype"),
        ({"num_replicas": 0}, {}, "num_replicas"),
        ({"stream_commit_s": "nan"}, {}, "stream_commit_s"),
        ({"log_level": "debug"}, {}, "log_level: input should be 'DEBUG', .* got 'debug'"),
        ({1: 2, "bogus": 3}, {}, "settings have names, got 1 in the place of one"),
        ({True: "auto"}, {}, "settings have names, got True"),
        ({"models": [{"model": "a", None: 1}]}, {}, r"models\[0\]: settings have names, got None"),
        ({"model": "a", "model_path": "b"}, {}, "model_path"),
        ({"model": ""}, {}, "model"),
        ({"lora_modules": "one"}, {}, "lora_modules: adapters are given as name=folder"),
        ({"lora_modules": {"one": 3}}, {}, "lora_modules: .*folders by name"),
        ({"lora_modules": "one=/a,one=/b"}, {}, "lora_modules: .*an adapter's name comes twice"),
        ({"lora_modules": {"mine": "/a"}, "served_model_name": "mine"}, {}, "'mine' is the name of a model"),
        ({"models": []}, {}, r"models: a list of .* at least one, .* not \[\]"),
        ({}, {"NANOSERVE_MODELS": "[]"}, "models: a list of .* at least one"),
        ({"models": [{"model": "a", "max_num_seqs": True}]}, {}, r"models\[0\]: max_num_seqs: must be a number"),
        ({"quantization": "int8", "dtype": "bfloat16"}, {}, "quantization int8 is for a CPU and float32"),
        ({"lora_modules": "a=/a", "compilation": "true"}, {}, "compilation and enable_lora"),
    ],
)
def test_a_bad_setting_is_named(args: dict[str, Any], environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_settings(args, environ)


NUMBERS = [
    name for name, field in Settings.model_fields.items() if re.search(r"\b(int|float)\b", repr(field.annotation))
]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [True, False, float("nan"), float("inf"), -1, "", "one", [1], {}])
def test_what_is_no_number_is_one_for_no_setting(name: str, value: Any) -> None:
    if name == "seed" and value == -1:
        return
    with pytest.raises(ConfigError, match=f"^{name}"):
        load_settings({name: value}, {})


def test_serve_run_tells_a_bad_setting_and_no_more() -> None:
    words = [sys.executable, "-m", "ray.serve.scripts", "run", "app:build", "max_model_len=long"]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode != 0
    (line,) = [line for line in run.stderr.splitlines() if "Running import path" not in line]
    assert re.match("nanoserve: max_model_len: .*got 'long'", line)


def test_of_a_bad_setting_in_a_yaml_file_serve_shows_the_message_below_a_short_traceback() -> None:
    """It builds the application in a task of its own, and puts `format_exc` of that into the application's status."""
    try:
        app.build({"max_num_seqs": -1})
    except ConfigError:
        shown = traceback.format_exc().strip().splitlines()
    assert shown[-1] == "engine.errors.ConfigError: max_num_seqs must be a whole number of at least 1, got -1"
    assert "config.py" not in "".join(shown)


def test_a_misspelt_setting_is_told_with_the_one_that_was_meant() -> None:
    told = r"^unknown setting max_num_seq \(did you mean max_num_seqs\?\)"
    with pytest.raises(ConfigError, match=rf"{told}$"):
        load_settings({"max_num_seq": 4}, {})
    with pytest.raises(ConfigError, match=r"^unknown setting NANOSERVE_MAX_NUM_SEQ \(.* NANOSERVE_MAX_NUM_SEQS\?\)$"):
        load_settings({}, {"NANOSERVE_MAX_NUM_SEQ": "4"})
    with pytest.raises(ConfigError, match=r"^unknown setting DTYPES \(did you mean dtype\?\)$"):
        load_settings({"DTYPES": "auto"}, {})
    with pytest.raises(ConfigError, match=r"^unknown setting bogus, max_num_seq .*; known are allow_runtime_lora"):
        load_settings({"max_num_seq": 4, "bogus": 1}, {})


def test_adapters_are_a_mapping_or_text_and_bring_what_they_need() -> None:
    expected = {"one": "/a/b", "two": str(Path("here").absolute())}
    for given in ({"one": "/a/b", "two": "here"}, "one=/a/b, two=here"):
        settings = load_settings({"lora_modules": given}, {})
        assert settings.lora_modules == expected
        assert settings.engine_config().enable_lora
    assert load_settings({}, {"NANOSERVE_LORA_MODULES": "one=/a/b,two=here"}).lora_modules == expected
    assert load_settings({"allow_runtime_lora_updating": "true"}, {}).engine_config().enable_lora
    assert not load_settings({}, {}).engine_config().enable_lora


def test_the_folder_of_an_adapter_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    settings = load_settings(
        {"model": str(tmp_path / "model"), "lora_modules": f"one={tmp_path}/no", "device": "cpu"}, {}
    )
    with pytest.raises(ConfigError, match=r"lora_modules: 'one' is to be in .*/no, which is no folder"):
        build_application(settings)


def test_variables_that_are_no_settings_are_let_be() -> None:
    load_settings({}, dict.fromkeys(OTHER_VARIABLES, "x") | {"NANOSERVE_MAX_MODEL_LEN": ""})


def test_model_path_is_another_name_of_model() -> None:
    assert load_settings({"model_path": "/m"}, {}).engine_config().model == "/m"
    assert load_settings({}, {"NANOSERVE_MODEL_PATH": "/m"}).engine_config().model == "/m"
    assert load_settings({"model": "/a"}, {"NANOSERVE_MODEL_PATH": "/m"}).engine_config().model == "/a"


def test_the_served_name_gives_no_folders_away() -> None:
    assert load_settings({"model": "/srv/models/tiny"}, {}).public_model_name == "tiny"
    assert load_settings({"model": "org/name"}, {}).public_model_name == "org/name"
    assert load_settings({"model": "/srv/tiny", "served_model_name": "mine"}, {}).public_model_name == "mine"


def test_a_path_means_the_same_in_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path / "tiny")
    monkeypatch.setenv("HOME", str(tmp_path))
    for model in (".", "./", "../tiny", "../tiny/", "~/tiny"):
        settings = load_settings({"model": model}, {})
        assert settings.engine_config().model == str(tmp_path / "tiny")
        assert settings.public_model_name == "tiny"
    assert load_settings({}, {"NANOSERVE_MODEL": "./no.gguf"}).engine_config().model == str(Path("no.gguf").absolute())
    for model in (DEFAULT_MODEL, "org/name"):
        assert load_settings({"model": model}, {}).engine_config().model == model


def test_no_gpu_is_asked_for_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.resources._count_gpus", lambda: 0)
    assert (gpus_to_ask_for("auto"), gpus_to_ask_for("cpu")) == (0, 0)
    with pytest.raises(ConfigError, match="no GPU"):
        gpus_to_ask_for("cuda")
    monkeypatch.setattr("app.resources._count_gpus", lambda: 2)
    assert (gpus_to_ask_for("auto"), gpus_to_ask_for("cpu"), gpus_to_ask_for("cuda")) == (1, 0, 1)
    assert (gpus_to_ask_for("auto", 2), gpus_to_ask_for("cpu", 2), gpus_to_ask_for("auto", 1)) == (2, 0, 1)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 4, but there are 2 GPUs"):
        gpus_to_ask_for("auto", 4)


def test_shards_have_bundles_of_their_own_behind_the_replicas() -> None:
    assert _resources(1, 1, "PACK") == {"ray_actor_options": {"num_cpus": 0.5, "num_gpus": 1}}
    options = _resources(4, 4, "PACK")
    assert options["ray_actor_options"] == {"num_cpus": 0.1}
    assert options["placement_group_bundles"] == [{"CPU": 0.1}] + [{"CPU": 0.2, "GPU": 1}] * 4
    assert options["placement_group_strategy"] == "PACK"
    assert _resources(2, 0, "SPREAD")["placement_group_bundles"] == [{"CPU": 0.1}, {"CPU": 0.2}, {"CPU": 0.2}]


def test_building_needs_neither_torch_nor_transformers_nor_a_cluster(tmp_path: Path) -> None:
    args = {"model": str(tiny_models.llama(tmp_path)), "max_model_len": 512}
    code = (
        "import sys, app; assert not {'ray', 'starlette', 'pydantic'} & set(sys.modules)\n"
        f"app.deployment; app.build({args}); assert not {{'torch', 'transformers'}} & set(sys.modules)\n"
        "import ray; assert not ray.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize(
    ("args", "environ", "told"),
    [
        ({"max_model_len": 1025}, {}, "max_model_len is 1025, but the model has positions for 1024 tokens"),
        ({}, {"NANOSERVE_CPU_ISA": "sse9"}, "NANOSERVE_CPU_ISA must be one of portable, .*got 'sse9'"),
    ],
)
def test_what_would_fail_each_replica_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: dict[str, Any], environ: dict[str, str], told: str
) -> None:
    for name, value in ({"RAY_ADDRESS": ""} | environ).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=told):
        app.build({"model": str(tiny_models.llama(tmp_path)), **args})


def test_of_a_packaged_model_that_is_here_the_positions_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "")
    resolve_model(DEFAULT_MODEL)
    with pytest.raises(ConfigError, match="positions for 8192"):
        app.build({"max_model_len": 100_000})
    monkeypatch.setenv("NANOSERVE_CACHE", str(tmp_path))
    app.build({"max_model_len": 100_000})


@pytest.mark.parametrize("address", ["", "local"])
@pytest.mark.parametrize("model", ["/no/such/model", "./no.gguf", "no-such-alias"])
def test_a_model_that_is_nowhere_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, model: str, address: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=re.escape(model.removeprefix("./"))):
        app.build({"model": model})


def test_a_ray_that_starts_here_takes_short_ways_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, short_ways: dict[str, str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    first, *others = short_ways
    monkeypatch.setenv(first, "1")
    app.build({})
    assert {name: os.environ[name] for name in short_ways} == {first: "1"} | {name: short_ways[name] for name in others}
    code = (
        "from ray.serve._private.constants import *\n"
        "assert not RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD and not RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP\n"
        "assert RAY_SERVE_PROXY_USE_GRPC"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ | short_ways, check=True, timeout=60)


def test_a_cluster_elsewhere_keeps_its_ways(monkeypatch: pytest.MonkeyPatch, short_ways: dict[str, str]) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    app.build({})
    assert not set(short_ways) & set(os.environ)


@pytest.mark.parametrize("address", ["", "local"])
def test_a_second_server_on_the_same_port_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    from app import cli

    warnings: list[str] = []
    started: list[list[str]] = []
    built: list[list[str]] = []
    monkeypatch.setattr("app.building.logger.warning", warnings.append)
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr(cli, "_build", built.append)
    monkeypatch.setattr("os.execv", lambda path, arguments: started.append(arguments))
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        monkeypatch.setattr("app.building.HTTPOptions", lambda: HTTPOptions(port=port))
        app.build({})
        assert f"127.0.0.1:{port}" in warnings.pop()
        assert cli.main(["serve"]) == 2
        (told,) = capsys.readouterr().err.splitlines()
        assert f"127.0.0.1:{port}" in told
        assert "ray_configs/single.yaml, change http_options.port" in told
        assert not built
    app.build({})
    assert not warnings
    assert cli.main(["serve"]) == 0
    assert cli.main(["serve", "max_num_seqs=4", "model=/some/model"]) == 0
    assert [arguments[-2:] for arguments in started] == [
        ["run", "app:deployment"],
        ["max_num_seqs=4", "model=/some/model"],
    ]
    assert built == [[DEFAULT_MODEL], ["/some/model"]]


def test_make_serve_asks_the_command_which_checks_settings_before_it_builds() -> None:
    words = ["make", "--no-print-directory", "--dry-run", "serve", "ARGS=a=1 b=2"]
    *before, last = subprocess.check_output(words, cwd=ROOT, text=True).splitlines()
    assert last == ".venv/bin/nanoserve serve a=1 b=2"
    assert not [line for line in before if "nanoserve" in line]


def test_the_command_refuses_an_instruction_set_that_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from app.cli import main
    from kernels import cpu_ops

    monkeypatch.setattr(cpu_ops, "load", cpu_ops.load.__wrapped__)
    monkeypatch.setenv("NANOSERVE_CPU_ISA", "sse9")
    assert main(["build"]) == 2
    assert "sse9" in capsys.readouterr().err


def test_the_command_tells_once_that_there_is_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from app.cli import main
    from kernels import cpu_ops

    monkeypatch.setattr(cpu_ops, "load", cpu_ops.load.__wrapped__)
    monkeypatch.setattr("engine.hub.resolve_model", Path)
    monkeypatch.setenv("NANOSERVE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["build"]) == 0
    assert caplog.text.count("no-such-compiler") == 1


def test_the_command_refuses_bad_settings_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from app.cli import main

    assert main(["serve", "bogus=1"]) == 2
    assert main(["serve", "bogus"]) == 2
    assert all(line.startswith("nanoserve: ") for line in capsys.readouterr().err.splitlines())


def test_bounds_of_replicas_that_cross_are_an_error_that_names_both() -> None:
    assert load_settings({"max_replicas": 4, "min_replicas": 0}, environ={}).max_replicas == 4
    with pytest.raises(ConfigError, match="min_replicas is 5, above max_replicas, which is 4"):
        load_settings({"max_replicas": 4, "min_replicas": 5}, environ={})
    assert load_settings({"min_replicas": 5}, environ={}).max_replicas is None


async def test_serve_refuses_nothing_and_holds_nothing_back(tmp_path: Path) -> None:
    """It would answer in plain text; and what waited behind a replica would wait in no fair order."""
    args = {"model": str(tiny_models.llama(tmp_path / "model")), "max_num_seqs": 50, "num_ingress_replicas": 3}
    ingress = app.build(args)._bound_deployment
    config, engine = ingress._deployment_config, ingress.init_args[1]._bound_deployment._deployment_config
    assert (config.max_queued_requests, engine.max_queued_requests) == (-1, -1)
    assert config.max_ongoing_requests >= 10_000
    queue = admission(load_settings(args, {}), EngineLimits(128, 50, 16, 384, kv_tokens=10**6))
    assert queue.capacity == 63, "1.25 times what runs at once, and no more"
    for i in range(100):
        queue.reserve([Claim(1, f"tenant {i}")])
    assert 63 < queue.outstanding * 3 <= engine.max_ongoing_requests


def test_several_models_each_by_its_own_settings_over_those_of_all() -> None:
    models = [{"model": "smollm2-135m", "max_model_len": 512}, {"model_path": "org/b", "max_replicas": 2}]
    args = {"models": models, "max_model_len": 2048, "num_ingress_replicas": 2}
    environ = {"NANOSERVE_MAX_NUM_SEQS": "8"}
    settings = load_settings(args, environ)
    first, second = (model.engine_config() for model in settings.each)
    assert (first.max_model_len, second.max_model_len) == (512, 2048)
    assert first.max_num_seqs == second.max_num_seqs == 8
    assert [model.public_model_name for model in settings.each] == ["smollm2-135m", "org/b"]
    assert (settings.num_ingress_replicas, settings.each[1].max_replicas) == (2, 2)
    in_words = load_settings({"max_model_len": 2048}, environ | {"NANOSERVE_MODELS": json.dumps(models)})
    assert [model.engine_config() for model in in_words.each] == [first, second]
    assert load_settings({}, {}).each[0].engine_config() == EngineConfig()


@pytest.mark.parametrize(
    ("models", "told"),
    [
        ("a, b", "models: a list"),
        ([1], "models: a list"),
        ([{"model": "a"}, {"model": "a"}], "one name, got a, a"),
        ([{"model": "a"}, {"model": "b", "max_model_len": "long"}], r"models\[1\]: max_model_len"),
        ([{"model": "a", "bogus": 1}], r"models\[0\]: unknown setting bogus"),
        ([{"model": "a", "api_keys": "k"}], r"models\[0\]: api_keys cannot be set for one model"),
    ],
)
def test_a_bad_setting_of_one_of_several_models_is_named(models: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_settings({"models": models}, {})


def test_each_model_has_an_engine_deployment_of_its_own(tmp_path: Path) -> None:
    models = [
        {"model": str(tiny_models.llama(tmp_path / name)), "served_model_name": name, "num_replicas": i + 1}
        for i, name in enumerate(("a b", "a-b"))
    ]
    ingress = app.build({"models": models})._bound_deployment
    engines = [engine._bound_deployment for engine in ingress.init_args[1:]]
    assert [engine.name for engine in engines] == ["engine-a-b", "engine-a-b-1"]
    assert [engine.num_replicas for engine in engines] == [1, 2]
