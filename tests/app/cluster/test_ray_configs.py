"""Every file in ray_configs/ holds: against Serve's schema, our settings and the series there are; the CPU ones run."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema

import app
from app.metrics import render
from app.settings import load_settings
from tests import tiny_models
from tests.app.cluster.conftest import URL
from tests.live_server import REPOSITORY

CONFIGS = REPOSITORY / "ray_configs"
TIERS = sorted(CONFIGS.glob("*.yaml"))
ON_CPU = ("autoscaled.yaml", "edge.yaml", "laptop_cpu.yaml", "multi_model.yaml", "replicas.yaml", "single.yaml")


def kuberay() -> dict[str, Any]:
    return yaml.safe_load((CONFIGS / "kuberay" / "rayservice.yaml").read_text())


def check(config: dict[str, Any]) -> None:
    (application,) = ServeDeploySchema.model_validate(config).applications
    assert application.import_path == "app:build"
    settings = load_settings(application.args, environ={})
    assert {d.name for d in application.deployments} <= {"engine", "ingress"}
    for deployment in application.deployments:
        if deployment.name == "engine" and settings.max_replicas is not None:
            # Serve would take these over our policy, or refuse the two together.
            assert not {"num_replicas", "autoscaling_config"} & deployment.model_fields_set


@pytest.mark.parametrize("path", TIERS, ids=lambda path: path.name)
def test_a_tier_holds_against_serves_schema_and_our_settings(path: Path) -> None:
    check(yaml.safe_load(path.read_text()))


def test_every_tier_that_needs_no_gpu_is_started_below_or_in_test_production_or_in_sharding() -> None:
    assert {path.name for path in TIERS} - {"gpu_8gb.yaml", "production.yaml", "tensor_parallel.yaml"} == set(ON_CPU)


def test_the_rayservice_holds_and_its_image_is_the_one_that_is_built() -> None:
    service = kuberay()
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    check(yaml.safe_load(service["spec"]["serveConfigV2"]))
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    images = {container["image"] for group in groups for container in group["template"]["spec"]["containers"]}
    dockerfile = (CONFIGS / "kuberay" / "Dockerfile").read_text()
    assert images == {re.search(r"-t (\S+)", dockerfile)[1]}
    assert f"rayproject/ray:{cluster['rayVersion']}-" in dockerfile
    most = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"]["max_replicas"]
    assert sum(group["maxReplicas"] for group in cluster["workerGroupSpecs"]) >= most


def test_alerts_and_dashboard_name_series_that_there_are() -> None:
    text = render({"m": ([], [])})
    known = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
    alerts = yaml.safe_load((CONFIGS / "monitoring" / "alerts.yaml").read_text())
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    assert all({"alert", "expr", "labels", "annotations"} <= set(rule) for rule in rules)
    dashboard = json.loads((CONFIGS / "monitoring" / "grafana_dashboard.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [variable["query"] for variable in dashboard["templating"]["list"]]
    for expression in [*asked, *(rule["expr"] for rule in rules)]:
        names = set(re.findall(r"(?:vllm|nanoserve):\w+", expression))
        assert names <= known, expression
    assert len(asked) > 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_models.llama(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=8192))


@pytest.mark.parametrize("name", ON_CPU)
def test_a_tier_starts_and_answers(cluster: None, model: str, name: str) -> None:
    """With a small model in the place of its own; all else as it stands in the file."""
    args = yaml.safe_load((CONFIGS / name).read_text())["applications"][0]["args"]
    small = {"model": model}
    if "models" in args:
        names = [model.public_model_name for model in load_settings(args, environ={}).models]
        own = zip(args["models"], names, strict=True)
        small = {"models": [entry | small | {"served_model_name": name} for entry, name in own]}
    else:
        names = ["tiny"]
    serve.run(app.build(args | small), name="nanoserve", route_prefix="/")
    with httpx.Client(base_url=URL, timeout=60) as http:
        assert [card["id"] for card in http.get("/v1/models").json()["data"]] == names
        for served in names:
            body = {"model": served, "prompt": "hello", "max_tokens": 3, "ignore_eos": True}
            assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3
        assert http.get("/health").status_code == 200
    serve.delete("nanoserve")
