"""Time and memory of loading a checkpoint: `python -m benchmarks.loading`.

Writes a random Llama of about 1 GB in safetensors, then in fresh processes, in turn: safetensors' own `load_file` with
every tensor copied out of the mapped file, and this engine's loader for a CPU, exact and in int8. The file is in the
page cache for all. Memory is private memory (RssAnon): mapped pages of the file are the system's cache and can be
dropped. Served bytes count a byte a weight in int8, not its scales.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from engine.layers.linear import Quantization

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
LAYERS = {"float32": 8, "bfloat16": 18}
VOCAB = 16384
POLL_S = 0.002


def write_checkpoint(folder: Path, dtype: str) -> int:
    """Returns the bytes of its weights."""
    from safetensors.torch import save_file

    from engine.model_config import load_model_config
    from engine.models.decoder import Decoder
    from kernels.attention.torch_backend import TorchBackend

    config = CONFIG | {"num_hidden_layers": LAYERS[dtype], "vocab_size": VOCAB, "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config))
    model = Decoder(
        load_model_config(folder),
        TorchBackend(),
        max_positions=16,
        dtype=getattr(torch, dtype),
        device=torch.device("cpu"),
    )
    shapes = {name: target.shape for name, target in model.targets().items()}
    weights = {name: (torch.randn(shape) * 0.02).to(getattr(torch, dtype)) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    return sum(weight.nbytes for weight in weights.values())


def private_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def load_plain(folder: Path) -> object:
    from safetensors.torch import load_file

    return [weight.clone() for weight in load_file(folder / "model.safetensors").values()]


def load_ours(folder: Path, quantization: Quantization | None) -> object:
    """What the engine does of a checkpoint on a CPU."""
    from engine.loader import load_weights
    from engine.model_config import load_model_config
    from engine.models.decoder import Decoder
    from kernels.attention import select_backend

    config = load_model_config(folder)
    backend = select_backend("cpu", torch.float32, config.head_dim)
    device = torch.device("cpu")
    model = Decoder(config, backend, max_positions=4096, dtype=torch.float32, device=device, quantization=quantization)
    load_weights(model.targets(), folder, config)
    return model


LOADERS: dict[str, Callable[[Path], object]] = {
    "load_file": load_plain,
    "float32": partial(load_ours, quantization=None),
    "int8": partial(load_ours, quantization="int8"),
}


def child(how: str, folder: Path) -> None:
    from kernels import cpu_ops

    cpu_ops.load()
    before, peak, done = private_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, private_bytes())
            time.sleep(POLL_S)

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.perf_counter()
    model = LOADERS[how](folder)
    seconds = time.perf_counter() - begin
    done.set()
    watcher.join()
    print(json.dumps({"seconds": seconds, "peak": peak - before, "kept": private_bytes() - before}))
    del model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=2, metavar=("HOW", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], Path(args.child[1]))
        return
    for dtype in LAYERS:
        with tempfile.TemporaryDirectory() as name:
            stored = write_checkpoint(Path(name), dtype)
            served = {"load_file": stored, "float32": stored * 4 // getattr(torch, dtype).itemsize}
            served["int8"] = served["float32"] // 4
            results: dict[str, list[dict[str, float]]] = {how: [] for how in LOADERS}
            for _ in range(args.rounds):
                for how, found in results.items():
                    command = [sys.executable, "-m", "benchmarks.loading", "--child", how, name]
                    found.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
            for how, found in results.items():
                row = {
                    "stored_in": dtype,
                    "stored_mb": round(stored / 1e6),
                    "loaded_as": how,
                    "seconds": round(min(r["seconds"] for r in found), 2),
                    "served_mb": round(served[how] / 1e6),
                    "peak_mb": round(max(r["peak"] for r in found) / 1e6),
                    "peak_over_served": round(max(r["peak"] for r in found) / served[how], 3),
                    "kept_mb": round(min(r["kept"] for r in found) / 1e6),
                }
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
