"""Time and memory of loading a checkpoint: `python -m benchmarks.loading`.

Writes a random Llama of about 1 GB in safetensors, then in fresh processes, in turn: safetensors' own `load_file` with
every number read once, and this engine's loader (into parameters, then packed for the CPU). The file is in the page
cache for both. Memory is private memory (RssAnon): mapped pages of the file are the system's cache and can be dropped.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

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
    weights = {name: target.normal_(0.0, 0.02).clone() for name, target in model.targets().items()}
    save_file(weights, folder / "model.safetensors")
    return sum(weight.nbytes for weight in weights.values())


def private_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def load_plain(folder: Path) -> float:
    """Seconds."""
    from safetensors.torch import load_file

    begin = time.perf_counter()
    weights = load_file(folder / "model.safetensors")
    for weight in weights.values():
        weight.clone()
    return time.perf_counter() - begin


def load_ours(folder: Path) -> float:
    """Seconds, of what the engine does of a checkpoint in float32 on a CPU."""
    from engine.loader import load_weights
    from engine.model_config import load_model_config
    from engine.models.decoder import Decoder
    from kernels.attention import select_backend

    config = load_model_config(folder)
    backend = select_backend("cpu", torch.float32, config.head_dim)
    begin = time.perf_counter()
    model = Decoder(config, backend, max_positions=4096, dtype=torch.float32, device=torch.device("cpu"))
    load_weights(model.targets(), folder, config)
    model.pack()
    return time.perf_counter() - begin


def child(how: str, folder: Path) -> None:
    load = {"plain": load_plain, "ours": load_ours}[how]
    before, peak, done = private_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, private_bytes())
            time.sleep(POLL_S)

    watcher = threading.Thread(target=watch)
    watcher.start()
    seconds = load(folder)
    done.set()
    watcher.join()
    print(json.dumps({"seconds": seconds, "peak": peak - before, "after": private_bytes() - before}))


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
            served = stored * 4 // getattr(torch, dtype).itemsize
            results: dict[str, list[dict[str, float]]] = {"plain": [], "ours": []}
            for _ in range(args.rounds):
                for how, found in results.items():
                    command = [sys.executable, "-m", "benchmarks.loading", "--child", how, name]
                    found.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
            row = {
                "stored_in": dtype,
                "stored_mb": round(stored / 1e6),
                "served_in": "float32",
                "served_mb": round(served / 1e6),
                "load_file_s": round(min(r["seconds"] for r in results["plain"]), 2),
                "engine_s": round(min(r["seconds"] for r in results["ours"]), 2),
                "peak_mb": round(max(r["peak"] for r in results["ours"]) / 1e6),
                "peak_over_served": round(max(r["peak"] for r in results["ours"]) / served, 3),
                "kept_mb": round(min(r["after"] for r in results["ours"]) / 1e6),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
