"""A model of transformers without weights, on torch's meta device, and where its weights lie.

transformers' tables of conversions say which tensors of a checkpoint make which parameter; a stage
reads those of its own layers.
"""

import contextlib
import copy
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)
from transformers.initialization import no_init_weights
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging as transformers_logging

from sgl_pipeline.errors import UnsupportedModelError

# The last parts of the names under which layouts of quantized weights store a matrix.
_STORED_AS = re.compile(
    r"\.(weight_packed|weight_scale|weight_scale_inv|weight_zero_point|weight_shape|weight_g_idx"
    r"|qweight|qzeros|scales|g_idx)$"
)


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A model on the meta device. `decoder` is the part between token ids and hidden states, `name`
    its name in `model`; `layers` are templates, which never change."""

    model: PreTrainedModel
    decoder: nn.Module
    name: str
    layers: tuple[nn.Module, ...]
    has_tied_head: bool

    @property
    def text_config(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def embedding(self) -> nn.Embedding:
        embedding = _input_embeddings(self.decoder)
        assert isinstance(embedding, nn.Embedding)
        return embedding

    @property
    def head(self) -> nn.Linear:
        """The output head; its template, as long as none was read."""
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        return head

    @property
    def head_name(self) -> str:
        """The module name of the output head."""
        return self._name_of(self.head)

    @property
    def embedding_name(self) -> str:
        return self._name_of(self.embedding)

    def layer_prefix(self, layer: int) -> str:
        """The prefix of the names of the layer's parameters."""
        return f"{self.name}.layers.{layer}."

    def copy_of(self, template: nn.Module) -> nn.Module:
        """A copy of a part that shares the config."""
        shared = {
            id(one.config): one.config for one in template.modules() if hasattr(one, "config")
        }
        return copy.deepcopy(template, shared)

    def model_of_head(self, decoder: nn.Module) -> PreTrainedModel:
        """The model with `decoder` in the place of all that is between token ids and the head."""
        model = copy.copy(self.model)
        model.__dict__["_modules"] = dict(self.model._modules)
        model._modules[self.name.split(".")[0]] = decoder
        return model

    def remake_buffers(self, module: nn.Module) -> None:
        """Gives `module` and those inside it the buffers that no checkpoint holds, such as rotary
        frequencies, as transformers initializes them. Raises UnsupportedModelError for one that
        it leaves out."""
        for name, part in module.named_modules():
            missing = [
                key
                for key in part._non_persistent_buffers_set
                if (buffer := part._buffers.get(key)) is not None and buffer.is_meta
            ]
            if not missing:
                continue
            for key in missing:
                part._buffers[key] = torch.full_like(_buffer(part, key), _UNSET, device="cpu")
            for parameter in part.parameters(recurse=False):
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]
            self.model._init_weights(part)
            for key in missing:
                if bool((_buffer(part, key) == _UNSET).any()):
                    raise UnsupportedModelError(
                        f"transformers does not make the buffer {name}.{key} again, which no "
                        "checkpoint holds"
                    )

    def _name_of(self, wanted: nn.Module) -> str:
        return next(name for name, one in self.model.named_modules() if one is wanted)


def _input_embeddings(decoder: nn.Module) -> nn.Module | None:
    assert isinstance(decoder, PreTrainedModel)
    embedding: nn.Module | None = decoder.get_input_embeddings()
    return embedding


_UNSET = -977.0  # no frequency, scale or position


def _buffer(module: nn.Module, name: str) -> torch.Tensor:
    buffer = module._buffers[name]
    assert buffer is not None
    return buffer


def make_skeleton(path: str | Path, dtype: torch.dtype, attention: str) -> Skeleton:
    """The model of the directory `path`, whose attentions go to `attention_call` under the name
    `attention`.

    Raises ConfigurationError for a config that transformers cannot read, UnsupportedModelError for
    a model without a decoder of the usual parts.
    """
    config = _read_config(path)
    with torch.device("meta"), no_init_weights(), _quiet():
        model = _model_of(config, dtype, attention)
    model.tie_weights()
    model.eval().requires_grad_(False)
    _keep_in_fp32(model, dtype)
    decoder = model.get_decoder()
    if decoder is model:
        decoder = getattr(model, "model", model)
    name = next((name for name, one in model.named_modules() if one is decoder), "")
    layers = getattr(decoder, "layers", None)
    if not name or not isinstance(layers, nn.ModuleList) or not len(layers):
        raise UnsupportedModelError(
            f"{type(decoder).__name__} has no list `layers` of decoder layers inside "
            f"{type(model).__name__}, which could be cut into stages"
        )
    head, embedding = model.get_output_embeddings(), _input_embeddings(decoder)
    if type(head) is not nn.Linear or not isinstance(embedding, nn.Embedding):
        raise UnsupportedModelError(
            f"{type(model).__name__} has a {type(head).__name__} for a head and a "
            f"{type(embedding).__name__} for an embedding, not a Linear and an Embedding"
        )
    return Skeleton(model, decoder, name, tuple(layers), head.weight is embedding.weight)


def _read_config(path: str | Path) -> Any:
    try:
        with _quiet():
            config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise UnsupportedModelError(f"transformers cannot read its config: {reason:.300}") from None
    for one in (config, config.get_text_config()):
        if hasattr(one, "quantization_config"):
            del one.quantization_config  # our layouts read the weights
        if getattr(one, "output_router_logits", False):
            one.output_router_logits = False
    return config


def _model_of(config: Any, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            try:
                model = auto.from_config(config, dtype=dtype, attn_implementation=attention)
            except (ValueError, TypeError, AttributeError, ImportError, KeyError) as error:
                reason = " ".join(str(error).split())
                raise UnsupportedModelError(
                    f"transformers cannot make a model of type {config.model_type}: {reason:.300}"
                ) from None
            assert isinstance(model, PreTrainedModel)
            return model
    raise UnsupportedModelError(
        f"transformers has no causal language model of type {config.model_type}"
    )


def _keep_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Keeps the parameters in fp32 that transformers' models list for it."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    pattern, _, _ = build_glob_alternation(list(plan))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if pattern.search(name):
            tensor.data = tensor.data.float()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings that transformers logs."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(before)


@dataclass(slots=True)
class Entry:
    """Tensors of a checkpoint that make one parameter, or several.

    Attributes:
        target: the parameter, the first of several.
        sources: the tensors, in the order in which they were numbered, and the patterns of
            `converter` that they match.
        converter: computes the parameters; None: the one tensor is the parameter.
    """

    target: str
    sources: list[tuple[str, str]]
    converter: WeightConverter | None

    def sources_of(self, pattern: str) -> list[str]:
        return [name for name, own in self.sources if own == pattern]


class KeyTable:
    """The parameters of `skeleton` by the tensors of a checkpoint that has `names`."""

    def __init__(self, skeleton: Skeleton, names: Iterable[str], *, is_quantized: bool) -> None:
        self._entries: dict[str, Entry] = {}
        self._of_target: dict[str, Entry] = {}
        self.unknown: list[str] = []
        model = skeleton.model
        known = model.state_dict()
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        plain = {_STORED_AS.sub(".weight", name) if is_quantized else name for name in names}
        for name in sorted(plain, key=dot_natural_key):
            target, pattern = rename_source_key(
                name, renamings, converters, model.base_model_prefix, known
            )
            if target not in known and name in known:
                target, pattern = name, None
            if target not in known:
                self.unknown.append(target)
                continue
            self._add(name, target, pattern, of_pattern)

    def _add(
        self, name: str, target: str, pattern: str | None, of_pattern: dict[str, WeightConverter]
    ) -> None:
        converter = None if pattern is None else of_pattern[pattern]
        entry = self._entries.setdefault(target, Entry(target, [], converter))
        entry.sources.append((name, pattern or name))
        targets = [target]
        if converter is not None:
            first = converter.target_patterns[0]
            targets += [target.replace(first, other) for other in converter.target_patterns[1:]]
        for one in targets:
            self._of_target[one] = entry

    def entry_of(self, target: str) -> Entry | None:
        """The entry that makes the parameter `target`; None if the checkpoint does not have it."""
        return self._of_target.get(target)

    def name_of(self, target: str) -> str:
        """The checkpoint's name of the tensor that is the parameter `target`; that name itself if
        no file has it."""
        entry = self._of_target.get(target)
        return entry.sources[0][0] if entry is not None else target

    def sources_of(self, target: str) -> list[str]:
        """The checkpoint's names of all tensors that make the parameter `target`."""
        entry = self._of_target.get(target)
        return [name for name, _ in entry.sources] if entry is not None else [target]

    def unknown_below(self, prefix: str) -> list[str]:
        """Names of tensors that belong below `prefix` but to no parameter there."""
        return [name for name in self.unknown if name.startswith(prefix)]
