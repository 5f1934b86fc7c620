"""Writes a checkpoint of `make_model`, or another GGUF file, as the GGUF file that llama.cpp reads.

    python -m benchmark.models.make_gguf build/models/0.27b build/models/0.27b-q8_0.gguf --type q8_0
    python -m benchmark.models.make_gguf build/models/smollm2 build/models/smollm2-bf16.gguf \
        --type bf16

Run by hand, once for each type; types of 8 and 4 bits are rounded by llama.cpp's own
`llama-quantize`, embedding and head with the rest. So is a GGUF file, whose numbers may have been
rounded before. Texts of `make_model`'s tokenizer are no products of merges, as GGUF wants them:
such a file decodes ids, and must be asked with ids.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

from benchmark.models.make_model import SPECIAL_TOKENS
from benchmark.peers.install_llama_cpp import llama_program
from benchmark.support.command import Command, Options
from benchmark.support.paths import LLAMA_CPP_DIRECTORY
from sgl_pipeline.args import require
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.model_directory import find_gguf_file, weight_format

SIXTEEN_BITS = "bf16"
TYPES = (SIXTEEN_BITS, "q8_0", "q4_0", "q4_k_m")
# The reader wants a merge; two bytes that no token joins.
_NO_MERGE = "! !"


def write_gguf(source: Path, target: Path) -> None:
    """Writes the bf16 checkpoint in `source`, of Qwen3's dense shape, into the file `target`.

    Matrices stay bf16; norms become fp32, as llama.cpp wants them. One tensor file is in memory.

    Raises ConfigurationError for a model of another family.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    require(config["model_type"] == "qwen3", f"{source} holds no dense Qwen3 model")
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.QWEN3])
    _add_sizes(writer, config)
    _add_tokens(writer, source, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for path in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            of_file = names.get_name(name, try_suffixes=(".weight",))
            if of_file is None:
                raise ConfigurationError(f"{path}: GGUF knows no tensor {name} of a dense Qwen3")
            _add_tensor(writer, of_file, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _add_tokens(writer: gguf.GGUFWriter, source: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [
        gguf.TokenType.CONTROL if token in SPECIAL_TOKENS else gguf.TokenType.NORMAL
        for token in tokens
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([_NO_MERGE])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() == 1:
        writer.add_tensor(name, tensor.float().numpy())
        return
    require(tensor.dtype == torch.bfloat16, f"{name} is {tensor.dtype}, not bf16")
    content = tensor.contiguous().view(torch.uint8).numpy()
    writer.add_tensor(name, content, raw_dtype=gguf.GGMLQuantizationType.BF16)


def make_gguf(source: Path, target: Path, type_name: str) -> None:
    """Writes `source` into the file `target` with weights of that one of `TYPES`.

    Raises ConfigurationError where llama.cpp is needed and missing, or fails.
    """
    # An interrupted write must not look like a model.
    partial = target.with_name(f"{target.name}.partial")
    if is_gguf(source):
        _round(find_gguf_file(source), partial, type_name)
    elif type_name == SIXTEEN_BITS:
        write_gguf(source, partial)
    else:
        whole = target.with_name(f"{target.name}.{SIXTEEN_BITS}")
        try:
            write_gguf(source, whole)
            _round(whole, partial, type_name)
        finally:
            whole.unlink(missing_ok=True)
    partial.rename(target)


def is_gguf(source: Path) -> bool:
    """True if `source` is a GGUF file, or a directory with such files alone."""
    return weight_format("auto", source) == "gguf"


def _round(source: Path, target: Path, type_name: str) -> None:
    program = llama_program(LLAMA_CPP_DIRECTORY, "llama-quantize")
    command: list[str | Path] = [program, "--allow-requantize", source, target, type_name.upper()]
    if subprocess.run(command).returncode != 0:
        raise ConfigurationError(f"{source} could not be rounded; llama-quantize says why")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, saves=False)
    command.add("source", type=Path, help="directory of a bf16 checkpoint, or a GGUF file")
    command.add("target", type=Path, help="file to write, which must not exist")
    command.add("--type", choices=TYPES, required=True, help="of the weights")
    return command.run(_write, argv)


def _write(options: Options) -> None:
    require(not options.target.exists(), f"{options.target} exists already")
    is_model = (options.source / "config.json").exists() or is_gguf(options.source)
    require(is_model, f"{options.source} holds no config.json, nor is it a GGUF file")
    make_gguf(options.source, options.target, options.type)
    print(f"{options.target}: {options.target.stat().st_size / 2**20:.0f} MiB")


if __name__ == "__main__":
    sys.exit(main())
