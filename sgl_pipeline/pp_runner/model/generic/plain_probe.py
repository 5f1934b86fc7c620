"""Recognizes the layers of transformers that compute what our own `DecoderLayer` computes.

Names only propose what a part may be. A small layer of the same code, with the model's heads and
random numbers in fp32, decides: it must give the rows that ours gives.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from sgl_pipeline.pp_runner.attention.attention_backend import LayerAttention, LayerwiseAttention
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import Rotation
from sgl_pipeline.pp_runner.layer_kernels.torch_kernels import TorchKernels
from sgl_pipeline.pp_runner.model.decoder import DecoderLayer
from sgl_pipeline.pp_runner.model.generic.attention_call import direct_attention
from sgl_pipeline.pp_runner.model.generic.layers import gated_mlp, norm_weight
from sgl_pipeline.pp_runner.model.generic.passing_layers import Given
from sgl_pipeline.pp_runner.model.generic.plain_layer import PlainForm, parts_of, rotation_of

# Far ones too: some layers scale their queries by how far a row is from the beginning.
TRIAL_POSITIONS = (3, 0, 1, 300_000, 64, 9_000, 131_071)
_HIDDEN, _INNER = 16, 24  # sizes of the trial's layer
_SCALES = (1e-2, 1.0, 100.0)
# Names of norms: before attention, of its output, before the MLP, of its output.
_NORMS = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
)
_QKV = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_HEAD_NORMS = ("q_norm", "k_norm")


def plain_forms(
    layers: Sequence[nn.Module],
    copy_of: Callable[[nn.Module], nn.Module],
    given: Sequence[Given],
    attentions: Sequence[LayerAttention],
) -> tuple[PlainForm, ...] | None:
    """The form of each of a decoder's layers; None unless all are plain and get the same rotation,
    as our own models do.

    Args:
        layers: templates on the meta device, of which `copy_of` makes copies.
        given: what the decoder gives to each for rows at `TRIAL_POSITIONS`.
        attentions: how each attends.
    """
    forms: list[PlainForm] = []
    first = rotation_of(given[0], interleaved=False)
    for layer, own, attention in zip(layers, given, attentions, strict=True):
        rotation = rotation_of(own, interleaved=False)
        if first is None or rotation is None or not _are_equal(first, rotation):
            return None
        form = _plain_form(layer, copy_of, own, attention)
        if form is None or form.interleaved != (forms or [form])[0].interleaved:
            return None
        forms.append(form)
    return tuple(forms)


def _plain_form(
    layer: nn.Module,
    copy_of: Callable[[nn.Module], nn.Module],
    given: Given,
    attention: LayerAttention,
) -> PlainForm | None:
    if attention.value_dim != attention.head_dim or attention.has_sinks:
        return None
    for names in itertools.product(_NORMS, _QKV, ((), _HEAD_NORMS)):
        if not _has_parts(layer, *names):
            continue
        trial = _small(copy_of(layer), *names, attention)
        if trial is None:
            continue
        for interleaved in (False, True):
            form = _form_of(trial, *names, interleaved)
            if form is not None and _computes(trial, form, given, attention):
                return form
    return None


def _has_parts(
    layer: nn.Module, norms: Sequence[str | None], qkv: Sequence[str], head_norms: Sequence[str]
) -> bool:
    """True if the names are those of modules of `layer`, none left out but in its MLP."""
    names = {name for name in norms if name}
    names |= {f"self_attn.{name}" for name in (*qkv, "o_proj", *head_norms)}
    found = {name.rpartition(".")[0] for name, _ in layer.named_parameters()}
    return names == {name for name in found if not name.startswith("mlp.")}


def _small(
    trial: nn.Module,
    norms: Sequence[str | None],
    qkv: Sequence[str],
    head_norms: Sequence[str],
    attention: LayerAttention,
) -> nn.Module | None:
    """`trial`, a copy on the meta device, with small random parts; None if any is left."""
    widths = [
        heads * attention.head_dim
        for heads in (attention.num_query_heads, *(attention.num_kv_heads,) * 2)
    ]
    outputs = widths if len(qkv) == 3 else [sum(widths)]
    generator = torch.Generator().manual_seed(0)
    for name, width in zip(qkv, outputs, strict=True):
        _set_linear(trial, f"self_attn.{name}", _HIDDEN, width, generator)
    _set_linear(trial, "self_attn.o_proj", widths[0], _HIDDEN, generator)
    for name in head_norms:
        _set_norm(trial.get_submodule(f"self_attn.{name}"), attention.head_dim, generator)
    for name in filter(None, norms):
        _set_norm(trial.get_submodule(name), _HIDDEN, generator)
    found = gated_mlp(trial.get_submodule("mlp"))
    if found is None:
        return None
    gate_up, down = found
    for name in gate_up:
        _set_linear(trial, f"mlp.{name}", _HIDDEN, 2 * _INNER // len(gate_up), generator)
    _set_linear(trial, f"mlp.{down}", _INNER, _HIDDEN, generator)
    tensors = (*trial.parameters(), *trial.buffers())
    return None if any(one.is_meta for one in tensors) else trial


def _set_linear(
    trial: nn.Module, name: str, inputs: int, outputs: int, generator: torch.Generator
) -> None:
    own = trial.get_submodule(name)
    assert type(own) is nn.Linear
    linear = nn.Linear(inputs, outputs, own.bias is not None).requires_grad_(False)
    for parameter in linear.parameters():
        parameter.normal_(0.0, 0.3, generator=generator)
    trial.set_submodule(name, linear)


def _set_norm(norm: nn.Module, size: int, generator: torch.Generator) -> None:
    weight = torch.empty(size).uniform_(0.5, 1.5, generator=generator)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    if isinstance(norm, nn.RMSNorm):
        norm.normalized_shape = (size,)


def _form_of(
    trial: nn.Module,
    norms: tuple[str, str | None, str, str | None],
    qkv: Sequence[str],
    head_norms: Sequence[str],
    interleaved: bool,
) -> PlainForm | None:
    """The form of these names; None if a norm is not ours, or those of heads differ."""
    heads = tuple(f"self_attn.{name}" for name in head_norms)
    epsilons = {}
    for name in (*filter(None, norms), *heads):
        norm = trial.get_submodule(name)
        found = norm_weight(norm)
        if found is None or not torch.equal(found[0], norm.get_parameter("weight")):
            return None
        epsilons[name] = found[1]
    mlp = gated_mlp(trial.get_submodule("mlp"))
    if mlp is None or len({epsilons[name] for name in heads}) > 1:
        return None
    return PlainForm(
        norms=norms,
        qkv=tuple(f"self_attn.{name}" for name in qkv),
        output="self_attn.o_proj",
        head_norms=heads,
        gate_up=tuple(f"mlp.{name}" for name in mlp[0]),
        down=f"mlp.{mlp[1]}",
        epsilons=epsilons,
        interleaved=interleaved,
    )


def _computes(trial: nn.Module, form: PlainForm, given: Given, attention: LayerAttention) -> bool:
    """True if `trial` gives the rows that our layer of the same parts gives."""
    rotation = rotation_of(given, interleaved=form.interleaved)
    assert rotation is not None
    parts = parts_of(
        form,
        trial,
        lambda name: trial.get_submodule(name).get_parameter("weight"),
        trial.get_parameter,
        TorchKernels(),
    )
    ours = DecoderLayer(0, parts, TorchKernels())
    direct_attention(trial, _attend_to_all)
    num_rows = len(TRIAL_POSITIONS)
    generator = torch.Generator().manual_seed(1)
    for scale in _SCALES:
        rows = torch.randn(num_rows, _HIDDEN, generator=generator) * scale
        memory = _TrialMemory(num_rows, attention)
        found = ours.forward(
            rows,
            rotation,
            torch.arange(num_rows),
            cast(KvPool, memory),
            cast(LayerwiseAttention, memory),
        )
        try:
            wanted = trial(rows[None].clone(), *given[0], **given[1])
        except Exception:  # its code wants sizes that a small layer does not have
            return False
        if not isinstance(wanted, torch.Tensor) or wanted.shape != (1, *found.shape):
            return False
        if not torch.allclose(found, wanted[0], rtol=1e-4, atol=1e-5 * float(found.abs().max())):
            return False
    return True


class _TrialMemory:
    """One page for all rows of a trial, and an attention to all of them."""

    def __init__(self, num_rows: int, attention: LayerAttention) -> None:
        shape = (1, num_rows, attention.num_kv_heads, attention.head_dim)
        self._pages = torch.zeros(shape), torch.zeros(shape)

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pages

    def of(self, layer: int) -> "_TrialMemory":
        return self

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert sinks is None, "such attention is not tried"
        query, key, value = (one.transpose(0, 1)[None] for one in (query, keys[0], values[0]))
        return _attend_to_all(query, key, value, None, {})[0]


def _attend_to_all(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    arguments: Mapping[str, Any],
) -> torch.Tensor:
    """The `Callee` of a trial: whatever it computes, both layers attend by it."""
    attended = nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    return attended.transpose(1, 2).contiguous()


def _are_equal(one: Rotation, other: Rotation) -> bool:
    return torch.equal(one.cosine, other.cosine) and torch.equal(one.sine, other.sine)
