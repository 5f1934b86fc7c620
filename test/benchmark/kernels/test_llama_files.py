"""Layers as GGUF files: as many weights as transformers' layers, by names that llama.cpp knows."""

from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind

from benchmark.kernels.llama_files import model_tensors, write_layers
from benchmark.kernels.published_models import PUBLISHED, PublishedLayers

ARCHITECTURES = {
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_local_experts": 4}
each_published = pytest.mark.parametrize("published", PUBLISHED, ids=lambda own: own.name)


@each_published
def test_the_names_are_those_of_the_architecture(published: PublishedLayers) -> None:
    config = published.full_config()
    architecture = ARCHITECTURES[config["model_type"]]
    known = {gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[architecture]}
    for name in model_tensors(config, published.layer_types):
        of_layer = name.replace("blk.0.", "blk.{bid}.").replace("blk.1.", "blk.{bid}.")
        assert of_layer.removesuffix(".weight").removesuffix(".bias") in known


@each_published
def test_a_layer_has_the_weights_of_transformers(published: PublishedLayers) -> None:
    names = published.full_config(published.others)
    tensors = model_tensors(names, names["layer_types"])
    del names["architectures"]
    config = getattr(transformers, published.transformers_config)(**names)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    for number, layer in enumerate(model.layers):
        own = [
            prod(shape) for name, (shape, _) in tensors.items() if name.startswith(f"blk.{number}.")
        ]
        assert sum(own) == sum(parameter.numel() for parameter in layer.parameters())


def written(published: PublishedLayers, path: Path) -> tuple[dict[str, Any], gguf.GGUFReader]:
    """A small model of the family in the file `path`, and what the package reads of it."""
    config = published.full_config(published.others) | SMALL
    write_layers(path, config, config["layer_types"])
    return config, gguf.GGUFReader(path)


@each_published
def test_tensors_are_read_as_they_were_meant(published: PublishedLayers, tmp_path: Path) -> None:
    config, reader = written(published, tmp_path / "small.gguf")
    meant = model_tensors(config, config["layer_types"])
    assert [tensor.name for tensor in reader.tensors] == [*meant]
    for tensor in reader.tensors:
        shape, kind = meant[tensor.name]
        assert tuple(reversed(tensor.shape.tolist())) == shape and tensor.tensor_type == kind
        numbers = gguf.dequantize(tensor.data, kind)
        assert numbers.shape == shape and np.isfinite(numbers).all() and numbers.any()
        is_matrix = len(shape) > 1 and not tensor.name.endswith((".bias", "conv1d.weight"))
        is_router = tensor.name.endswith("ffn_gate_inp.weight")
        assert (kind is Kind.F32) is (not is_matrix or is_router)
        assert (kind is Kind.MXFP4) is (len(shape) == 3)


def field(reader: gguf.GGUFReader, name: str) -> Any:
    found = reader.get_field(name)
    assert found is not None, name
    return found.contents()


def test_sizes_of_layers_with_states(tmp_path: Path) -> None:
    _, reader = written(PUBLISHED[0], tmp_path / "small.gguf")
    assert field(reader, "tokenizer.ggml.model") == "none"
    assert field(reader, "qwen35.vocab_size") == 64
    assert field(reader, "qwen35.attention.recurrent_layers") == [True, False]
    assert field(reader, "qwen35.ssm.inner_size") == 32 * 128
    assert field(reader, "qwen35.ssm.time_step_rank") == 32
    assert field(reader, "qwen35.ssm.group_count") == 16
    assert field(reader, "qwen35.rope.dimension_count") == 8
    assert field(reader, "qwen35.rope.dimension_sections") == [11, 11, 10, 0]


def test_sizes_of_layers_with_experts(tmp_path: Path) -> None:
    _, reader = written(PUBLISHED[-1], tmp_path / "small.gguf")
    assert field(reader, "gpt-oss.attention.sliding_window_pattern") == [True, False]
    assert field(reader, "gpt-oss.attention.sliding_window") == 128
    assert field(reader, "gpt-oss.expert_count") == 4
    assert field(reader, "gpt-oss.expert_used_count") == 4
    assert field(reader, "gpt-oss.expert_feed_forward_length") == 96
    assert field(reader, "gpt-oss.rope.scaling.type") == "yarn"
