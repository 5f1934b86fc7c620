"""Rotary embeddings of transformers' decoders, held to what a server needs of them.

`dynamic` and `longrope` choose their frequencies by the longest sequence of a step, so that a
request's tokens would depend on others. A server has one choice for all lengths: that of
transformers for a sequence of its whole context, as for our own layers (`rope_config.py`).
"""

from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sgl_pipeline.errors import UnsupportedModelError
from sgl_pipeline.pp_runner.model.rope_config import ContextLengths

_LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
_HELD = "held"  # a type whose frequencies transformers leaves alone


def context_lengths(text_config: Any) -> ContextLengths:
    """The context lengths of a model, by transformers' config of it.

    Raises UnsupportedModelError where it does not say how long a context may be.
    """
    published = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(published, int) or published < 1:
        raise UnsupportedModelError(
            f"its config has max_position_embeddings {published!r}, and a server must know how "
            "long a context may be: write the number of tokens into config.json"
        )
    parameters = getattr(text_config, "rope_parameters", None) or {}
    kind = parameters.get("rope_type")
    if kind == "longrope":
        original = int(parameters.get("original_max_position_embeddings") or published)
        return ContextLengths(min(original, published), published)
    if kind == "dynamic":
        return ContextLengths(published, int(parameters["factor"] * published))
    return ContextLengths(published, published)


def hold_frequencies(decoder: nn.Module, context_length: int) -> None:
    """Gives the rotary embeddings of `decoder` that depend on lengths the frequencies of a sequence
    of `context_length` tokens, for good.

    Raises UnsupportedModelError for one that does not compute with them as transformers does.
    """
    for name, module in decoder.named_modules():
        kinds = getattr(module, "rope_type", None)
        of_layers = {*kinds.values()} if isinstance(kinds, dict) else set()
        if found := _LENGTH_DEPENDENT & of_layers:
            raise UnsupportedModelError(
                f"its rotary embedding {name} is of type {', '.join(sorted(found))} in some layers "
                "and of another type in others; these types depend on the length of a sequence, "
                "and are served where all layers have one"
            )
        if isinstance(kinds, str) and kinds in _LENGTH_DEPENDENT:
            _hold(name, module, kinds, context_length)


def return_fp32(decoder: nn.Module) -> None:
    """Has the rotary embeddings of `decoder` return cosines and sines in fp32, whatever the dtype
    of the stream: our own layers round after they rotate."""

    def widen(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (args[0].float(), *args[1:]), kwargs

    for module in decoder.modules():
        if hasattr(module, "rope_type"):
            module.register_forward_pre_hook(widen, with_kwargs=True)


def _hold(name: str, module: Any, kind: str, context_length: int) -> None:
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](
        module.config, torch.device("cpu"), seq_len=context_length
    )
    is_meta = module.inv_freq.is_meta
    # The first position makes the sequence as long as the context.
    positions = torch.tensor([[context_length - 1, 0, 1, context_length // 2]])
    rows = torch.zeros(1, positions.shape[1], 1)
    wanted = () if is_meta else module(rows, positions)
    module.rope_type = _HELD
    module.inv_freq, module.attention_scaling = frequencies, factor
    found = () if is_meta else module(rows, positions)
    if not all(torch.allclose(*pair, atol=1e-3) for pair in zip(found, wanted, strict=True)):
        raise UnsupportedModelError(
            f"its rotary embedding {name} of type {kind} computes something else for "
            f"{context_length} tokens than the frequencies of this type: it cannot be held to one "
            "length, and a request's tokens would depend on others"
        )
