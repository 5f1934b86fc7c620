"""Reads `quantization_config` of a model's config.json, and interprets `--quantization`.

Every field is honored, refused by name, or known to describe only how the checkpoint was made: an
ignored field could give a model that runs slightly wrong.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sgl_pipeline.errors import ConfigurationError, UnsupportedModelError
from sgl_pipeline.pp_runner.weights.schemes import (
    GPTQ_LEFT_OUT,
    Fp8Scheme,
    GptqLeftOut,
    Int4Scheme,
    Int8Scheme,
    Layout,
    Mxfp4Scheme,
    Names,
    Quantization,
    Scheme,
    gptq_pattern,
    is_inside,
    matches_target,
)

W8A8_INT8, W4A8_INT8, FP8 = "w8a8_int8", "w4a8_int8", "fp8"
_BLOCK = (128, 128)
# As small as kernels take them, because nothing but the nearest number is looked for.
_ROUNDED_GROUP_SIZE = 32
# Fields about the making of the checkpoint, which its tensors do not depend on.
_MAKING = {
    "compressed-tensors": """global_compression_ratio quantization_status version run_compressed
        observer observer_kwargs scale_dtype zp_dtype""",
    "fp8": "",
    "gptq": """damp_percent damp_auto_increment true_sequential static_groups model_name_or_path
        model_file_base_name meta dataset tokenizer batch_size block_name_to_quantize
        module_name_preceding_first_block modules_in_block_to_quantize model_seqlen pad_token_id
        use_cuda_fp16 exllama_config use_exllama disable_exllama cache_block_outputs backend
        max_input_length mse quantizer lm_head_low_gpu_mem_usage""",
    "mxfp4": "",
    "awq": """backend do_fuse fuse_max_seq_len modules_to_fuse exllama_config duo_scaling""",
}


@dataclass(slots=True)
class _Fields:
    """The fields of one object of the config, to be taken one after the other."""

    raw: Mapping[str, Any]
    place: str
    method: str
    taken: set[str] = field(default_factory=set)

    def take(self, name: str, default: Any = None) -> Any:
        """The value of `name`, which the caller honors."""
        self.taken.add(name)
        value = self.raw.get(name)
        return default if value is None else value

    def need(self, name: str, *wanted: Any, default: Any = None) -> Any:
        """The same, if it is one of `wanted`."""
        value = self.take(name, default)
        if not any(type(value) is type(one) and value == one for one in wanted):
            self.refuse(name, " or ".join(repr(one) for one in wanted))
        return value

    def refuse(self, name: str, supported: str) -> None:
        """Raises UnsupportedModelError."""
        raise UnsupportedModelError(
            f"config.json sets {self.place}{name} = {_shown(self.raw.get(name))} for the "
            f"quantization {self.method}; supported is {supported}"
        )

    def inside(self, name: str) -> "_Fields":
        """The fields of the object `name`."""
        value = self.take(name)
        if not isinstance(value, dict):
            self.refuse(name, "an object")
        return _Fields(value, f"{self.place}{name}.", self.method)

    def names(self, *fields: str) -> tuple[str, ...]:
        """The strings of the lists with these names."""
        values = [self.take(name, []) for name in fields]
        for name, value in zip(fields, values, strict=True):
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                self.refuse(name, "a list of names")
        return tuple(entry for value in values for entry in value)

    def finish(self) -> None:
        """Refuses fields that were not taken, unless they are empty or about the making."""
        for name, value in self.raw.items():
            if name not in self.taken and value and name not in _MAKING[self.method].split():
                self.refuse(name, "to leave it out")


def read_quantization(config: Any, head: str) -> Quantization | None:
    """The quantization of `config`, the value of `quantization_config`; None for None.

    Args:
        head: the module name of the output head, which most methods leave at 16 bits.

    Raises UnsupportedModelError naming method or field.
    """
    if not config:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else config
    read = _METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        raise UnsupportedModelError(
            f"config.json: quantization_config is of the method {_shown(method)}; known are "
            f"{', '.join(_METHODS)}"
        )
    assert isinstance(method, str)
    fields = _Fields(config, "quantization_config.", method)
    fields.take("quant_method")
    quantization = read(fields, head)
    fields.finish()
    return quantization


def choose_quantization(
    asked: str | None, found: Quantization | None, head: str, *, has_tied_head: bool = False
) -> Quantization | None:
    """The quantization by `--quantization asked` of a checkpoint that is quantized as `found`. For
    16 bits w8a8_int8 rounds layers and head, fp8 the layers alone, as upstream's Fp8Config does,
    w4a8_int8 the layers to 4 bits in groups of 32 inputs. It rounds rows that meet weights of 4
    bits to 8, and a head of 16 bits to 8.

    Args:
        head: the module name of the output head.
        has_tied_head: it is the embedding table, of 16 bits even if the config quantizes the head.

    Raises ConfigurationError if the two do not go together.
    """
    if asked is None:
        return found
    if asked == W4A8_INT8:
        return _with_rounded_rows(found, head, has_tied_head)
    if found is not None:
        is_int8 = all(isinstance(scheme, Int8Scheme) for _, scheme in found.groups)
        if asked == found.method or (asked == W8A8_INT8 and is_int8):
            return found
        raise ConfigurationError(
            f"--quantization {asked}: the checkpoint is quantized already, by {found.method}; "
            f"leave the flag out ({W4A8_INT8} is for checkpoints of 4 or 16 bits)"
        )
    made: dict[str, tuple[Scheme, tuple[str, ...]]] = {
        W8A8_INT8: (Int8Scheme(), ()),
        FP8: (Fp8Scheme((1, None)), (head,)),
    }
    if asked not in made:
        raise ConfigurationError(
            f"--quantization {asked}: the checkpoint has no quantization_config; of 16 bits only "
            f"{', '.join(made)} and {W4A8_INT8} can be made"
        )
    scheme, ignored = made[asked]
    everything = Names(("Linear",), matches_target)
    return Quantization(
        asked, Layout.SIXTEEN_BITS, ((everything, scheme),), Names(ignored, is_inside)
    )


def _with_rounded_rows(found: Quantization | None, head: str, has_tied_head: bool) -> Quantization:
    """Weights other than 4-bit ones and the head stay as they are in a quantized checkpoint."""
    if found is None:
        everything = Names(("Linear",), matches_target)
        scheme = Int4Scheme(_ROUNDED_GROUP_SIZE, is_symmetric=True, rounds_rows=True)
        nothing = Names((), is_inside)
        return Quantization(
            W4A8_INT8, Layout.SIXTEEN_BITS, ((everything, scheme),), nothing, rounded_head=head
        )
    if not any(isinstance(scheme, Int4Scheme) for _, scheme in found.groups):
        raise ConfigurationError(
            f"--quantization {W4A8_INT8} is for checkpoints of 4 or 16 bits, and this one is "
            f"quantized by {found.method}; leave the flag out"
        )
    groups = tuple(
        (names, replace(scheme, rounds_rows=True) if isinstance(scheme, Int4Scheme) else scheme)
        for names, scheme in found.groups
    )
    rounded_head = head if has_tied_head or found.scheme_of(head) is None else None
    return replace(found, method=W4A8_INT8, groups=groups, rounded_head=rounded_head)


def _compressed_tensors(fields: _Fields, head: str) -> Quantization:
    """The head counts as any other product: most checkpoints have it in `ignore`."""
    fields.need("transform_config", None, {})
    has_kv_scales = bool(fields.take("kv_cache_scheme"))
    if has_kv_scales:
        _check_kv_cache(fields.inside("kv_cache_scheme"))
    sparsity = fields.take("sparsity_config", {})
    if sparsity and sparsity.get("format") != "dense":
        fields.refuse("sparsity_config", "a dense checkpoint")
    ignored, format_name = fields.names("ignore"), fields.take("format")
    all_groups = fields.inside("config_groups")
    groups = []
    for name in all_groups.raw:
        group = all_groups.inside(name)
        targets = Names(group.names("targets"), matches_target)
        group.need("output_activations", None)
        own_format = group.take("format", format_name)
        groups.append((targets, _compressed_scheme(group, own_format)))
        group.finish()
    return Quantization(
        fields.method,
        Layout.COMPRESSED_TENSORS,
        tuple(groups),
        Names(ignored, matches_target),
        has_kv_scales,
    )


def _check_kv_cache(scheme: _Fields) -> None:
    """FP8 with a scale for a layer's keys and one for its values, measured beforehand."""
    for name, value in (("type", "float"), ("num_bits", 8), ("strategy", "tensor")):
        scheme.need(name, value)
    scheme.need("symmetric", True, default=True)
    scheme.need("dynamic", False, default=False)
    scheme.finish()


def _compressed_scheme(group: _Fields, format_name: Any) -> Scheme:
    weights = group.inside("weights")
    weights.need("dynamic", False, default=False)
    kind = (weights.take("type", "int"), weights.take("num_bits", 8))
    if kind == ("int", 4):
        group.need("input_activations", None)
        scheme: Scheme = _packed_int4(weights)
        formats: tuple[str, ...] = ("pack-quantized",)
    elif kind == ("int", 8):
        weights.need("symmetric", True, default=True)
        weights.need("strategy", "channel")
        _check_rows(group.inside("input_activations"), kind, {"strategy": "token"})
        scheme, formats = Int8Scheme(), ("int-quantized", "naive-quantized")
    elif kind == ("float", 8):
        scheme, formats = _compressed_fp8(weights, group), ("float-quantized", "naive-quantized")
    else:
        weights.refuse("num_bits", "8 of type int or float, or 4 of type int")
    if format_name not in formats:
        raise UnsupportedModelError(
            f"config.json: quantization_config has the format {format_name!r} for weights of "
            f"{kind[1]} bits, type {kind[0]}; supported is {' or '.join(formats)}"
        )
    weights.finish()
    return scheme


def _packed_int4(weights: _Fields) -> Int4Scheme:
    strategy = weights.need("strategy", "group", "channel")
    order = weights.need("actorder", None, "group", "weight", "static", "dynamic")
    return Int4Scheme(
        _group_size(weights, "group_size") if strategy == "group" else None,
        is_symmetric=weights.need("symmetric", True, False, default=True),
        # "weight" and "static" order the inputs while quantizing, and store them as they were.
        has_order=order in ("group", "dynamic"),
    )


def _compressed_fp8(weights: _Fields, group: _Fields) -> Fp8Scheme:
    weights.need("symmetric", True, default=True)
    strategy = weights.need("strategy", "tensor", "channel", "block")
    wanted: dict[str, Any] = {"strategy": "token"}
    block: tuple[int | None, int | None] = (None if strategy == "tensor" else 1, None)
    if strategy == "block":
        weights.need("block_structure", list(_BLOCK))
        block, wanted = _BLOCK, {"strategy": "group", "group_size": _BLOCK[1]}
    _check_rows(group.inside("input_activations"), ("float", 8), wanted)
    return Fp8Scheme(block)


def _check_rows(rows: _Fields, kind: tuple[str, int], wanted: dict[str, Any]) -> None:
    """Rows are rounded when they come, each by itself: then no row's bits depend on the others."""
    for name, value in (("type", kind[0]), ("num_bits", kind[1]), ("dynamic", True)):
        rows.need(name, value)
    rows.need("symmetric", True, default=True)
    for name, value in wanted.items():
        rows.need(name, value)
    rows.finish()


def _fp8(fields: _Fields, head: str) -> Quantization:
    """transformers' FineGrainedFP8Config, AutoFP8, and the published checkpoints of DeepSeek and
    Qwen. As in upstream's Fp8Config the head is never quantized."""
    fields.need("activation_scheme", "dynamic")
    fields.need("fmt", "e4m3", default="e4m3")
    block = fields.need("weight_block_size", None, list(_BLOCK))
    scheme = Fp8Scheme(_BLOCK if block else (None, None))
    ignored = (*fields.names("ignored_layers", "modules_to_not_convert"), head)
    return _everything_but(ignored, scheme, Layout.FP8, fields)


def _gptq(fields: _Fields, head: str) -> Quantization:
    fields.need("bits", 4)
    fields.need("pack_dtype", "int32", default="int32")
    fields.need("format", "gptq", "gptq_v2", default="gptq")
    version = fields.need(
        "checkpoint_format", "gptq", "gptq_v2", default=fields.take("format", "gptq")
    )
    has_order = fields.need("desc_act", True, False, default=False)
    scheme = Int4Scheme(
        _group_size(fields, "group_size"),
        is_symmetric=fields.need("sym", True, False, default=True),
        has_order=has_order,
    )
    ignored = () if fields.need("lm_head", True, False, default=False) else (head,)
    layout = Layout.GPTQ if version == "gptq" else Layout.GPTQ_V2
    quantization = _everything_but(ignored, scheme, layout, fields)
    return replace(quantization, ignored=GptqLeftOut(ignored, _dynamic_patterns(fields)))


def _dynamic_patterns(fields: _Fields) -> tuple[str, ...]:
    """Patterns of GPTQModel's `dynamic`, in order: they leave matrices out or change nothing."""
    changes = fields.take("dynamic", {})
    if not isinstance(changes, dict) or not all(map(_is_understood, changes.items())):
        fields.refuse("dynamic", "an object of patterns that leave matrices out, as '-:.*attn.*'")
    return tuple(changes)


def _is_understood(change: tuple[str, Any]) -> bool:
    entry, own = change
    try:
        gptq_pattern(entry)
    except re.error:
        return False
    return entry.startswith(GPTQ_LEFT_OUT) or not own


def _awq(fields: _Fields, head: str) -> Quantization:
    """AutoAWQ writes `w_bit` and `q_group_size` into its own file, `bits` and `group_size` here."""
    fields.need("bits", 4)
    fields.need("zero_point", True)
    version = fields.take("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        fields.refuse("version", "'gemm'")
    scheme = Int4Scheme(_group_size(fields, "group_size"), is_symmetric=False)
    ignored = (*fields.names("modules_to_not_convert"), head)
    return _everything_but(ignored, scheme, Layout.AWQ, fields)


def _mxfp4(fields: _Fields, head: str) -> Quantization:
    """gpt-oss's: of experts alone, as transformers' Mxfp4Config, whatever else the list of what is
    not converted leaves out."""
    fields.names("modules_to_not_convert")
    experts = Names(("mlp.experts",), is_inside)
    return Quantization(
        fields.method, Layout.MXFP4, ((experts, Mxfp4Scheme()),), Names((), is_inside)
    )


def _everything_but(
    ignored: tuple[str, ...], scheme: Scheme, layout: Layout, fields: _Fields
) -> Quantization:
    everything = Names(("Linear",), matches_target)
    return Quantization(fields.method, layout, ((everything, scheme),), Names(ignored, is_inside))


def _group_size(fields: _Fields, name: str) -> int | None:
    """Inputs that share a scale; None, which configs write as -1, for all of them."""
    size = fields.take(name)
    if size == -1:
        return None
    if isinstance(size, bool) or not isinstance(size, int) or size < 32 or size % 32:
        fields.refuse(name, "-1 or a multiple of 32")
    assert isinstance(size, int)
    return size


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


_METHODS: dict[str, Callable[[_Fields, str], Quantization]] = {
    "compressed-tensors": _compressed_tensors,
    FP8: _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
}
