"""The spec of a model directory for transformers' code, by probes on the meta device."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from sgl_pipeline.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from sgl_pipeline.model_directory import read_json_object
from sgl_pipeline.pp_runner.model.generic.attention_call import PROBED
from sgl_pipeline.pp_runner.model.generic.probes import Trace, trace
from sgl_pipeline.pp_runner.model.generic.rotary_choice import context_lengths
from sgl_pipeline.pp_runner.model.generic.skeleton import KeyTable, Skeleton, make_skeleton
from sgl_pipeline.pp_runner.model.generic.spec import GenericSpec, quantization_of
from sgl_pipeline.pp_runner.model.model_spec import eos_token_ids
from sgl_pipeline.pp_runner.weights.checkpoint import tensor_files
from sgl_pipeline.pp_runner.weights.schemes import Quantization


def probe(path: str | Path, quantization: str | None = None) -> GenericSpec:
    """The spec of the model directory `path`.

    Args:
        quantization: as `--quantization`; None: as the checkpoint is.

    Raises ConfigurationError when there is no readable config or the quantization does not fit it,
    UnsupportedModelError naming what the probes saw, when the model cannot be served.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigurationError(f"--model-path {path}: no such directory")
    config = read_json_object(directory / "config.json")
    generation_path = directory / "generation_config.json"
    generation = read_json_object(generation_path) if generation_path.exists() else {}
    text = config.get("text_config") or {}
    dtype = _dtype(config, text)
    skeleton = make_skeleton(path, getattr(torch, dtype), PROBED)
    seen = trace(skeleton)
    raw = config.get("quantization_config") or text.get("quantization_config") or {}
    table = KeyTable(skeleton, _tensor_names(directory), is_quantized=bool(raw))
    head = table.name_of(f"{skeleton.head_name}.weight").removesuffix(".weight")
    found = quantization_of(raw, quantization, head, has_tied_head=skeleton.has_tied_head)
    if found is not None and found.has_kv_scales:
        raise UnsupportedModelError(
            "its checkpoint has scales for keys and values, which only our own layers apply"
        )
    lengths = context_lengths(skeleton.text_config)
    vocab_size, hidden_size = skeleton.embedding.weight.shape
    if skeleton.head.out_features != vocab_size:
        raise UnsupportedModelError(
            f"its head has a vocabulary of {skeleton.head.out_features} tokens, its embedding one "
            f"of {vocab_size}"
        )
    return GenericSpec(
        architecture=type(skeleton.model).__name__,
        model_type=skeleton.text_config.model_type,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        context_length=lengths.default,
        own_context_lengths=lengths,
        attentions=seen.attentions,
        tied_embeddings=skeleton.has_tied_head,
        dtype=dtype,
        eos_token_ids=eos_token_ids(config) | eos_token_ids(text) | eos_token_ids(generation),
        quantization=found,
        kinds=_kinds(skeleton, seen, table, found),
        expert_layers=seen.expert_layers,
        head=head,
        quantization_config=raw,
        asked_quantization=quantization,
        transformers_version=transformers.__version__,
    )


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    for fields in (config, text):
        for name in ("dtype", "torch_dtype"):
            if fields.get(name):
                return str(fields[name])
    return "float32"


def _tensor_names(directory: Path) -> Iterable[str]:
    """The tensors of the checkpoint; none if there is only a config, as for made-up weights."""
    try:
        return tensor_files(directory)
    except CheckpointError:
        return ()


def _kinds(
    skeleton: Skeleton, seen: Trace, table: KeyTable, quantization: Quantization | None
) -> tuple[int, ...]:
    """A number for each layer, equal for layers with the same attention, parameters and formats."""
    kinds: dict[object, int] = {}
    numbers = []
    for number, layer in enumerate(skeleton.layers):
        parts: list[object] = [seen.attentions[number]]
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            parts.append((name, tuple(tensor.shape)))
            if quantization is not None:
                sources = table.sources_of(f"{skeleton.layer_prefix(number)}{name}")
                parts += [quantization.scheme_of(one.removesuffix(".weight")) for one in sources]
        numbers.append(kinds.setdefault(tuple(parts), len(kinds)))
    return tuple(numbers)
