"""Writes layers of a published model with random weights as the GGUF file that llama.cpp reads.

Called by `llama_layers.py`. Names are those of llama.cpp's `llama-arch.cpp`, and types those that
its converter gives a published checkpoint: matrices in bf16, gpt-oss's experts in MXFP4, the rest
in fp32. There is no tokenizer. Must never hold more than one tensor in memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from sgl_pipeline.pp_runner.made_up_weights import PATTERN_LENGTH

Shape = tuple[int, ...]  # outputs first
Tensors = dict[str, tuple[Shape, Kind]]

_ROPE_SECTIONS = 4
_MXFP4_SCALE = 120  # of all groups, as in `layers_under_test.py`


def write_layers(path: Path, config: dict[str, Any], layer_types: Sequence[str]) -> None:
    """Writes a model of `layer_types`, whose sizes are those of `config`, into the file `path`."""
    architecture = _ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture.name)
    _add_sizes(writer, config, len(layer_types))
    architecture.add_sizes(writer, config, layer_types)
    tensors = model_tensors(config, layer_types)
    for name, (shape, kind) in tensors.items():
        stored = gguf.quant_shape_to_byte_shape(shape, kind)
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), prod(stored), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, (shape, kind) in tensors.items():
        writer.write_tensor_data(_random_tensor(name, shape, kind))
    writer.close()


def model_tensors(config: dict[str, Any], layer_types: Sequence[str]) -> Tensors:
    """Shapes and types by name, in the order of the file."""
    hidden, architecture = config["hidden_size"], _ARCHITECTURES[config["model_type"]]
    table = (config["vocab_size"], hidden)
    tensors = _of(Kind.BF16, {"token_embd.weight": table, "output.weight": table})
    tensors |= _of(Kind.F32, {"output_norm.weight": (hidden,)})
    for layer, layer_type in enumerate(layer_types):
        own = architecture.layer_tensors(config, layer_type)
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in own.items()}
    return tensors


def _of(kind: Kind, shapes: dict[str, Shape]) -> Tensors:
    return {name: (shape, kind) for name, shape in shapes.items()}


def _attention_matrices(config: dict[str, Any], widths_of_query: int) -> dict[str, Shape]:
    hidden, dim = config["hidden_size"], config["head_dim"]
    query, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return {
        "attn_q.weight": (widths_of_query * query, hidden),
        "attn_k.weight": (keys, hidden),
        "attn_v.weight": (keys, hidden),
        "attn_output.weight": (hidden, query),
    }


def _layer_norms(config: dict[str, Any]) -> dict[str, Shape]:
    hidden = (config["hidden_size"],)
    return {"attn_norm.weight": hidden, "post_attention_norm.weight": hidden}


def _qwen3_5_tensors(config: dict[str, Any], layer_type: str) -> Tensors:
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    matrices: dict[str, Shape] = {
        "ffn_gate.weight": (inner, hidden),
        "ffn_up.weight": (inner, hidden),
        "ffn_down.weight": (hidden, inner),
    }
    rest = _layer_norms(config)
    if layer_type == "full_attention":
        matrices |= _attention_matrices(config, widths_of_query=2)  # and a gate
        rest |= {"attn_q_norm.weight": (dim,), "attn_k_norm.weight": (dim,)}
    else:
        heads, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
        values = heads * value_dim
        channels = values + 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
        matrices |= {
            "attn_qkv.weight": (channels, hidden),
            "attn_gate.weight": (values, hidden),
            "ssm_alpha.weight": (heads, hidden),
            "ssm_beta.weight": (heads, hidden),
            "ssm_out.weight": (hidden, values),
        }
        rest |= {
            "ssm_conv1d.weight": (channels, config["linear_conv_kernel_dim"]),
            "ssm_dt.bias": (heads,),
            "ssm_a": (heads,),
            "ssm_norm.weight": (value_dim,),
        }
    return _of(Kind.BF16, matrices) | _of(Kind.F32, rest)


def _gpt_oss_tensors(config: dict[str, Any], layer_type: str) -> Tensors:
    """The same for both kinds of layers."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    count, heads = config["num_local_experts"], config["num_attention_heads"]
    matrices = _attention_matrices(config, widths_of_query=1)
    experts: dict[str, Shape] = {
        "ffn_gate_exps.weight": (count, inner, hidden),
        "ffn_up_exps.weight": (count, inner, hidden),
        "ffn_down_exps.weight": (count, hidden, inner),
    }
    router: dict[str, Shape] = {"ffn_gate_inp.weight": (count, hidden)}
    biases = {
        name.replace("weight", "bias"): shape[:-1]
        for name, shape in {**matrices, **experts, **router}.items()
    }
    rest = _layer_norms(config) | router | biases | {"attn_sinks.weight": (heads,)}
    return _of(Kind.BF16, matrices) | _of(Kind.MXFP4, experts) | _of(Kind.F32, rest)


def _random_tensor(name: str, shape: Shape, kind: Kind) -> np.ndarray[Any, Any]:
    """The bytes of the tensor `name`: repeated random numbers, but for norms and decays, which keep
    rows and states finite."""
    stored = gguf.quant_shape_to_byte_shape(shape, kind)
    if kind is Kind.MXFP4:
        block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
        codes = torch.randint(0, 256, (PATTERN_LENGTH,), dtype=torch.uint8).numpy()
        blocks = np.resize(codes, (prod(stored) // block_bytes, block_bytes))
        blocks[:, 0] = _MXFP4_SCALE
        return blocks.reshape(stored)
    if name.endswith("norm.weight"):
        numbers = torch.ones(shape)
    elif name.endswith("ssm_a"):
        numbers = torch.full(shape, -1.0)
    else:
        numbers = torch.randn(PATTERN_LENGTH) * 0.02
    if kind is Kind.BF16:
        numbers = numbers.bfloat16().view(torch.int16)
    return np.resize(numbers.numpy(), shape).view(np.uint8)


def _add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any], num_layers: int) -> None:
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(num_layers)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _add_qwen3_5_sizes(
    writer: gguf.GGUFWriter, config: dict[str, Any], layer_types: Sequence[str]
) -> None:
    rope, heads = config["rope_parameters"], config["linear_num_value_heads"]
    sections = rope["mrope_section"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([*sections, *[0] * (_ROPE_SECTIONS - len(sections))])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_inner_size(heads * config["linear_value_head_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    # The package's writer has no method for it.
    name = f"{writer.arch}.attention.recurrent_layers"
    writer.add_array(name, [one == "linear_attention" for one in layer_types])


def _add_gpt_oss_sizes(
    writer: gguf.GGUFWriter, config: dict[str, Any], layer_types: Sequence[str]
) -> None:
    rope = config["rope_scaling"]
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([one == "sliding_attention" for one in layer_types])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


@dataclass(frozen=True)
class _Architecture:
    """By llama.cpp's `name`: a layer's tensors, and fields of the header that others have not."""

    name: str
    layer_tensors: Callable[[dict[str, Any], str], Tensors]
    add_sizes: Callable[[gguf.GGUFWriter, dict[str, Any], Sequence[str]], None]


_ARCHITECTURES = {
    "qwen3_5_text": _Architecture("qwen35", _qwen3_5_tensors, _add_qwen3_5_sizes),
    "gpt_oss": _Architecture("gpt-oss", _gpt_oss_tensors, _add_gpt_oss_sizes),
}
