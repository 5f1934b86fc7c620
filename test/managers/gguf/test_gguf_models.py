"""A GGUF file gives the logits that the same numbers give from safetensors."""

import json
from pathlib import Path

import pytest
import torch
from support.gguf_files import rounded_checkpoint, write_gguf
from support.stage_chain import StageChain, new_request
from support.tiny_models import VOCAB_SIZE, tiny_model

from sgl_pipeline.errors import CheckpointError, UnsupportedModelError
from sgl_pipeline.gguf_index import read_gguf_index
from sgl_pipeline.managers.gguf.gguf_directory import gguf_directory

FAMILIES = (
    *("llama", "llama-biases-linear-rope", "mixtral-sharded", "qwen2-tied"),
    *("qwen2-moe", "qwen3", "qwen3-tied-sharded", "qwen3-moe-tied"),
)
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1")
PROMPT = [number * 37 % VOCAB_SIZE for number in range(1, 40)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def logits_of(path: Path, load_format: str) -> torch.Tensor:
    """Those of a prompt's last token and of five drawn ones, at depth 2."""
    chain = StageChain(path, (2, 4), load_format=load_format)
    request = new_request(PROMPT)
    chain.generate(request, 6, chunk_length=17)
    return torch.stack(chain.logits[request])


@pytest.mark.parametrize(
    ("name", "kind"), [("llama", kind) for kind in TYPES] + [(name, "Q8_0") for name in FAMILIES]
)
def test_the_logits_are_those_of_the_same_numbers(name: str, kind: str, tmp_path: Path) -> None:
    source = tiny_model(name)
    directory = gguf_directory(write_gguf(source, tmp_path / "tiny.gguf", kind))
    same = rounded_checkpoint(source, tmp_path / "same", kind)
    assert torch.equal(logits_of(directory, "gguf"), logits_of(same, "safetensors"))


def test_a_stage_reads_its_own_layers_tensors_alone(tmp_path: Path) -> None:
    directory = gguf_directory(write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf"))
    chain = StageChain(directory, (2, 4), load_format="gguf")
    names = [{name.split(".layers.")[1][0] for name in stage.loaded if ".layers." in name}
             for stage in chain.stages]  # fmt: skip
    assert names == [set("01"), set("2345")]
    assert "model.embed_tokens.weight" in chain.stages[0].loaded
    assert {*chain.stages[0].loaded} | {*chain.stages[1].loaded} == {
        *read_gguf_index(directory).tensors
    }


def test_the_directory_is_made_once_for_a_file_and_anew_for_another_content(
    tmp_path: Path,
) -> None:
    path = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf")
    first = gguf_directory(path)
    config = (first / "config.json").stat()
    assert gguf_directory(path) == first
    assert (first / "config.json").stat() == config
    path.unlink()
    write_gguf(tiny_model("qwen3"), path)
    second = gguf_directory(path)
    assert second != first
    assert json.loads((second / "config.json").read_text())["model_type"] == "qwen3"
    # What serves the first content must not get the second's bytes.
    with pytest.raises(CheckpointError, match="has changed since"):
        StageChain(first, (6,), load_format="gguf")


def test_a_tensor_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    extra = {"blk.2.ffn_gate_inp.weight": torch.ones(4, 64).numpy()}
    path = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", tensors=extra)
    with pytest.raises(UnsupportedModelError, match=r"holds 1 tensors .* blk\.2\.ffn_gate_inp"):
        gguf_directory(path)
    assert not list((tmp_path / "cache").glob("sgl_pipeline/gguf/*"))
