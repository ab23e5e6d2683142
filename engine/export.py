"""Writes any model that can be read here as a folder in Hugging Face layout: `python -m engine.export MODEL OUT`."""

import argparse
import json
import shutil
from pathlib import Path

from engine.errors import ConfigError
from engine.hub import resolve_model
from engine.loader import iter_weights
from engine.model_config import is_gguf, load_model_config
from engine.text.tokenizer import load_tokenizer


def export_hf_folder(path: Path, out_dir: Path) -> None:
    """Write a folder or a `.gguf` file as config.json, generation_config.json, model.safetensors and a tokenizer.

    Weights keep their values: a GGUF's are dequantised to float32, a folder's keep their type. The weights of a GGUF
    file are held in memory at once. Raises `ConfigError` when `out_dir` is not empty or the model cannot be read.
    """
    from safetensors.torch import save_file

    load_model_config(path)  # refuses what is not supported before anything is written
    if out_dir.exists() and any(out_dir.iterdir()):
        raise ConfigError(f"{out_dir} is not empty: give a new folder")
    tokenizer = load_tokenizer(path)
    out_dir.mkdir(parents=True, exist_ok=True)
    if is_gguf(path):
        _write_gguf_config(path, out_dir)
    else:
        for name in ("config.json", "generation_config.json"):
            if (path / name).is_file():
                shutil.copyfile(path / name, out_dir / name)
    tokenizer.hf.save_pretrained(out_dir)
    # Last, so that a folder with weights is a whole one.
    save_file(dict(iter_weights(path)), out_dir / "model.safetensors", metadata={"format": "pt"})


def _write_gguf_config(path: Path, out_dir: Path) -> None:
    from engine.gguf.config import hf_config

    config = hf_config(path) | {"dtype": "float32"}
    generation = {key: value for key, value in config.items() if key.endswith("_token_id")}
    for name, values in (("config.json", config), ("generation_config.json", generation)):
        (out_dir / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.export", description=__doc__)
    parser.add_argument("model", help="an alias, a folder, a .gguf file or a Hub repository")
    parser.add_argument("out_dir", type=Path, help="the folder to write; it must be new or empty")
    arguments = parser.parse_args()
    try:
        export_hf_folder(resolve_model(arguments.model), arguments.out_dir)
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
