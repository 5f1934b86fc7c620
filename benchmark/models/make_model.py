"""Writes random-weight Hugging Face checkpoints for measurements: config, weights, tokenizer.

    python -m benchmark.models.make_model 0.27b /some/directory

Run by hand or by the benchmarks. The same preset and seed give the same bytes on any machine; the
weights are written one after the other, so a model may be larger than memory. Never use such a
model to judge text.
"""

import json
import sys
import zlib
from math import prod
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmark.models.preset import HybridPreset, Preset, Shapes, SparsePreset
from benchmark.support.command import Command, Options
from sgl_pipeline.errors import ConfigurationError

PAD_TOKEN, BEGIN_TOKEN, END_TOKEN = SPECIAL_TOKENS = ("<|pad|>", "<|begin|>", "<|end|>")
END_ID = SPECIAL_TOKENS.index(END_TOKEN)
NUM_BYTES = 256
FIRST_FILLER = len(SPECIAL_TOKENS) + NUM_BYTES
WEIGHT_DEVIATION = 0.02
DTYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|begin|>' + message.role + ': ' + message.content + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|begin|>assistant: ' -}}{%- endif -%}"
)

PRESETS = {
    "0.27b": Preset(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
    ),
    # A quarter of it, for loads that a CPU without AVX-512 cannot carry with 0.27b.
    "0.07b": Preset(
        vocab_size=32_000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
    ),
    # A sixteenth of its layers: a CPU without AVX-512 makes steps of it in the time in which one
    # with AMX makes those of 0.27b.
    "0.03b": Preset(
        vocab_size=32_000,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    ),
    # The layers of 0.27b under the vocabulary of Qwen, whose head reads as many weights as 12 of
    # them.
    "0.52b-152k": Preset(
        vocab_size=152_064,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
    ),
    # A token meets 0.12 B of it: 4 of a layer's 32 experts.
    "0.34b-moe": SparsePreset(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=320,
    ),
    # The layers of 0.27b, three of four with the state of Qwen3.5-4B: 2.05 MiB a request.
    "0.45b-hybrid": HybridPreset(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
    ),
    # Sizes that nothing was tuned for.
    "odd": Preset(
        vocab_size=1_003,
        hidden_size=192,
        intermediate_size=416,
        num_hidden_layers=7,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
    ),
    # Those that start in a moment, for tests: as many layers as the demo model, and few.
    "tiny": Preset(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    ),
    "tiny-tied": Preset(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    ),
    "tiny-hybrid": HybridPreset(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
    "tiny-moe": SparsePreset(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
    ),
}


def make_model(preset: Preset, directory: Path, seed: int = 0, dtype: str = "bfloat16") -> None:
    """Writes the whole checkpoint into `directory`, which is created when it is not there.

    Raises FileExistsError when it holds anything: a server may be using the model in it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty; name a new directory")
    _write_json(directory / "config.json", preset.config(dtype))
    _write_json(directory / "generation_config.json", {"eos_token_id": END_ID, "do_sample": False})
    write_tokenizer(preset.vocab_size, directory)
    write_weights(preset.tensor_shapes(), directory / "model.safetensors", seed, dtype)


def write_weights(shapes: Shapes, path: Path, seed: int, dtype: str) -> None:
    """Writes random tensors in the safetensors format, holding one at a time.

    The format: the header's length in 8 bytes, little endian; a JSON header with dtype, shape and
    the byte range of each tensor; the tensors. Norm weights are 1, the others normal.
    """
    torch_dtype: torch.dtype = getattr(torch, dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + prod(shape) * torch_dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the tensors begin at a multiple of 8
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, shape in shapes.items():
            tensor = _random_tensor(name, shape, seed).to(torch_dtype)
            file.write(tensor.view(torch.uint8).numpy().data)


def _random_tensor(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """fp32; a function of name and seed alone."""
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(shape, generator=generator) * WEIGHT_DEVIATION


def write_tokenizer(vocab_size: int, directory: Path) -> None:
    """Writes a byte-level tokenizer in which every id below `vocab_size` decodes.

    Ids 0 to 2 are special, the next 256 the bytes. The rest stand for texts like `<259>`, which
    encode to that one id again: load generators send decoded random ids and count on their number.
    """
    if vocab_size < FIRST_FILLER:
        raise ValueError(f"a byte-level tokenizer needs {FIRST_FILLER} ids, not {vocab_size}")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fillers = [f"<{number}>" for number in range(FIRST_FILLER, vocab_size)]
    tokens = [*SPECIAL_TOKENS, *alphabet, *fillers]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in fillers])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": END_TOKEN,
            "pad_token": PAD_TOKEN,
            "unk_token": None,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 32_768,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, saves=False)
    command.add("preset", choices=PRESETS)
    command.add("directory", type=Path, help="new directory for the checkpoint")
    command.add("--seed", type=int, default=0)
    command.add("--dtype", choices=DTYPE_NAMES, default="bfloat16")
    return command.run(_write, argv)


def _write(options: Options) -> None:
    try:
        make_model(PRESETS[options.preset], options.directory, options.seed, options.dtype)
    except FileExistsError as error:
        raise ConfigurationError(str(error)) from error
    num_bytes = sum(path.stat().st_size for path in options.directory.iterdir())
    print(f"{options.directory}: {options.preset}, {num_bytes / 2**20:.0f} MiB")


if __name__ == "__main__":
    sys.exit(main())
