"""Writes a trained demo model as a Hugging Face model directory.

`train.py` calls it at the end of a run, and it may be run alone on a checkpoint that is still
being trained.  It must never write anything that `transformers.AutoModelForCausalLM` cannot load
offline.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmark.demo_model.model import DemoModel, ModelShape
from benchmark.demo_model.tokenizer import save_tokenizer


def export_model(model: DemoModel, directory: Path) -> None:
    """Write bfloat16 weights, configuration and tokenizer of `model` into `directory`."""
    save_tokenizer(directory)
    weights = {
        name: weight.to(torch.bfloat16).contiguous()
        for name, weight in model.huggingface_state().items()
    }
    weights_path = directory / "model.safetensors"
    save_file(weights, str(weights_path), metadata={"format": "pt"})
    # The library makes the file private, which would hide it from other users once installed.
    weights_path.chmod(0o644)
    _write_json(directory / "config.json", model.shape.huggingface_config())
    generation = {"do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    _write_json(directory / "generation_config.json", generation)


def _write_json(path: Path, contents: dict[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Export the last checkpoint of a run."""
    parser = argparse.ArgumentParser(description="Export the last checkpoint of a training run.")
    parser.add_argument("--checkpoint", type=Path, default=Path("build/demo_model/checkpoint.pt"))
    parser.add_argument("--output", type=Path, default=Path("build/demo_model/export"))
    options = parser.parse_args()
    if not options.checkpoint.exists():
        raise SystemExit(f"no checkpoint at {options.checkpoint}; set --checkpoint or train first")
    saved = torch.load(options.checkpoint, weights_only=True)
    model = DemoModel(ModelShape(layer_count=saved["progress"]["layer_count"]))
    model.load_state_dict(saved["model"])
    # A run stopped early may still be shallow; growing it keeps what it computes.
    export_model(model.grown(ModelShape().layer_count), options.output)
    print(f"exported to {options.output}")


if __name__ == "__main__":
    main()
