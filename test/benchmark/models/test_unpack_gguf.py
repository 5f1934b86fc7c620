"""A checkpoint that became a GGUF file becomes the same checkpoint again."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmark.models.make_gguf import write_gguf
from benchmark.models.make_model import PRESETS, make_model
from benchmark.models.unpack_gguf import unpack_gguf
from sgl_pipeline.managers.command_line import model_files

PRESET = PRESETS["tiny"]


def test_tensors_and_sizes_are_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # The presets' tokens are no products of merges: a GGUF file cannot say how they are encoded.
    monkeypatch.setattr(model_files, "require_tokenizer", lambda directory: None)
    source, target = tmp_path / "tiny", tmp_path / "again"
    make_model(PRESET, source)
    write_gguf(source, tmp_path / "tiny.gguf")
    unpack_gguf(tmp_path / "tiny.gguf", target)
    before, after = (load_file(path / "model.safetensors") for path in (source, target))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    assert config["num_hidden_layers"] == PRESET.num_hidden_layers
    assert not (target / "model.gguf").exists()
