"""The tensors of a GGUF file under the names by which stages ask for them.

The names of llama.cpp are those of the `gguf` package's table. A tensor that no name leads to is
refused: what is left out would be missing in what the model computes.
"""

from collections.abc import Iterator

from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, TensorNameMap, get_tensor_name_map

from sgl_pipeline.errors import CheckpointError, UnsupportedModelError
from sgl_pipeline.gguf_index import GgufIndex, GgufTensor
from sgl_pipeline.managers.gguf.gguf_config import architecture_of
from sgl_pipeline.managers.gguf.gguf_file import ROPE_FACTORS, GgufFile, StoredTensor
from sgl_pipeline.pp_runner.model.families import MlpNames
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec

_EXPERT = ".{expert}"


def index_of(file: GgufFile, spec: DecoderSpec) -> GgufIndex:
    """The index of `file`, whose model is `spec`.

    Raises UnsupportedModelError for tensors that the model does not have, CheckpointError for
    experts of another number.
    """
    names = get_tensor_name_map(_arch(file.architecture), spec.num_layers)
    found: dict[str, GgufTensor] = {}
    used = {ROPE_FACTORS}
    for module, num_parts in _modules(spec):
        for suffix in (".weight", ".bias"):
            name = _name_in_file(names, module, suffix)
            if (stored := file.tensors.get(name)) is None:
                continue
            used.add(name)
            if num_parts and (len(stored.shape) != 3 or stored.shape[0] != num_parts):
                raise CheckpointError(
                    f"{file.path}: tensor {name} has shape {list(stored.shape)}, not one matrix "
                    f"for each of {num_parts} experts"
                )
            pairs = _paired_heads(file, spec, name)
            for part in range(num_parts or 1):
                whole = f"{module.format(expert=part)}{suffix}"
                found[whole] = _entry(stored, pairs, part, num_parts)
    if unknown := sorted(file.tensors.keys() - used):
        raise UnsupportedModelError(
            f"{file.path} holds {len(unknown)} tensors that {spec.architecture} does not "
            f"have here; the first is {unknown[0]}"
        )
    return GgufIndex(file.size, file.mtime_ns, found)


def _arch(name: str) -> MODEL_ARCH:
    return next(arch for arch, known in MODEL_ARCH_NAMES.items() if known == name)


def _name_in_file(names: TensorNameMap, module: str, suffix: str) -> str:
    known = names.get_name(module.replace(_EXPERT, ""))
    return f"{known}{suffix}" if known is not None else ""


def _modules(spec: DecoderSpec) -> Iterator[tuple[str, int]]:
    """All that may have a weight or bias; for one of experts, `{expert}` is in its name, and their
    number comes with it, else 0."""
    names = spec.names
    yield from ((name, 0) for name in (names.embedding, names.final_norm, names.head))
    for layer in range(spec.num_layers):
        prefix = names.layer.format(layer=layer)
        parts = [names.attention_norm, *names.qkv, names.query_norm, names.key_norm, names.output]
        parts.append(names.mlp_norm)
        experts = spec.layer_experts(layer)
        if experts is None:
            parts += _projections(names.mlp)
        else:
            parts += [names.router, names.shared_expert_gate, *_projections(names.shared_expert)]
            for name in _projections(names.expert):
                yield f"{prefix}.{name}", experts.num_experts
        yield from ((f"{prefix}.{name}", 0) for name in parts)


def _projections(mlp: MlpNames) -> list[str]:
    return [*mlp.gate_up, mlp.down]


def _paired_heads(file: GgufFile, spec: DecoderSpec, name: str) -> int:
    if not architecture_of(file).pairs_heads:
        return 0
    heads = {"attn_q": spec.num_query_heads, "attn_k": spec.num_kv_heads}
    return heads.get(name.split(".")[-2], 0)


def _entry(stored: StoredTensor, paired_heads: int, part: int, num_parts: int) -> GgufTensor:
    shape, num_bytes = stored.shape, stored.num_bytes
    if num_parts:
        shape, num_bytes = shape[1:], num_bytes // shape[0]
    offset = stored.offset + part * num_bytes
    return GgufTensor(int(stored.ggml_type), shape, offset, num_bytes, paired_heads)
