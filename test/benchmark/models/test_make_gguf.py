"""GGUF files hold the checkpoint's tensors, sizes and tokens, read by the format's own reader."""

from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

from benchmark.models import make_gguf
from benchmark.models.make_gguf import write_gguf
from benchmark.models.make_model import END_ID, PRESETS, make_model
from sgl_pipeline.errors import ConfigurationError

PRESET = PRESETS["tiny"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gguf") / "tiny"
    make_model(PRESET, directory)
    return directory


@pytest.fixture(scope="module")
def reader(checkpoint: Path) -> gguf.GGUFReader:
    path = checkpoint.with_name("tiny.gguf")
    write_gguf(checkpoint, path)
    return gguf.GGUFReader(path)


# Names as llama.cpp's `llama-arch.cpp` has them.
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.layers.3.self_attn.q_proj.weight": "blk.3.attn_q.weight",
    "model.layers.3.self_attn.k_norm.weight": "blk.3.attn_k_norm.weight",
    "model.layers.15.mlp.down_proj.weight": "blk.15.ffn_down.weight",
    "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def test_every_tensor_is_there_bit_for_bit(checkpoint: Path, reader: gguf.GGUFReader) -> None:
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == len(PRESET.tensor_shapes())
    weights = load_file(checkpoint / "model.safetensors")
    for name, of_file in NAMES.items():
        content = torch.from_numpy(tensors[of_file].data.copy())
        if weights[name].dim() == 1:
            assert tensors[of_file].tensor_type == gguf.GGMLQuantizationType.F32
            assert torch.equal(content, weights[name].float())
        else:
            assert tensors[of_file].tensor_type == gguf.GGMLQuantizationType.BF16
            assert torch.equal(content.view(torch.bfloat16), weights[name])


def test_the_sizes_are_those_of_the_model(reader: gguf.GGUFReader) -> None:
    sizes = {
        "block_count": PRESET.num_hidden_layers,
        "embedding_length": PRESET.hidden_size,
        "feed_forward_length": PRESET.intermediate_size,
        "attention.head_count": PRESET.num_attention_heads,
        "attention.head_count_kv": PRESET.num_key_value_heads,
        "attention.key_length": PRESET.head_dim,
        "attention.value_length": PRESET.head_dim,
        "rope.freq_base": 10_000.0,
    }
    read = {name: reader.get_field(f"qwen3.{name}").contents() for name in sizes}
    assert read == pytest.approx(sizes)
    assert reader.get_field("qwen3.attention.layer_norm_rms_epsilon").contents() == pytest.approx(
        1e-6
    )


def test_ids_mean_the_same_texts(reader: gguf.GGUFReader) -> None:
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    assert len(tokens) == PRESET.vocab_size
    assert (tokens[END_ID], tokens[259], tokens[-1]) == ("<|end|>", "<259>", "<511>")
    assert reader.get_field("tokenizer.ggml.eos_token_id").contents() == END_ID


def test_another_family_is_refused(tmp_path: Path) -> None:
    make_model(PRESETS["tiny-moe"], tmp_path / "moe")
    with pytest.raises(ConfigurationError, match="no dense Qwen3 model"):
        write_gguf(tmp_path / "moe", tmp_path / "moe.gguf")


def test_a_gguf_file_is_handed_to_llama_cpp_as_it_is(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "llama-quantize"
    program.write_text('#!/bin/sh\necho "$@" > "$3"\n')
    program.chmod(0o755)
    monkeypatch.setattr(make_gguf, "llama_program", lambda directory, name: program)
    published = tmp_path / "published"
    published.mkdir()
    source = published / "model.Q4_1.gguf"
    write_gguf(checkpoint, source)
    target = tmp_path / "published-bf16.gguf"
    make_gguf.make_gguf(published, target, "bf16")
    assert target.read_text() == f"--allow-requantize {source} {target}.partial BF16\n"
    assert list(published.iterdir()) == [source]


def test_a_directory_without_a_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_gguf.main([str(tmp_path), str(tmp_path / "target"), "--type", "bf16"]) == 1
    assert "holds no config.json, nor is it a GGUF file" in capsys.readouterr().err


def test_a_rounding_that_fails_leaves_no_model(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_gguf, "llama_program", lambda directory, name: "false")
    with pytest.raises(ConfigurationError, match="could not be rounded"):
        make_gguf.make_gguf(checkpoint, tmp_path / "tiny-q8_0.gguf", "q8_0")
    assert list(tmp_path.iterdir()) == []
