"""The head of a generic model: the final norm, and all that transformers' code does after it, such
as softcaps and divisors of logits."""

from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from sgl_pipeline.pp_runner.layer_kernels.layer_backend import Linear
from sgl_pipeline.pp_runner.model.generic.layers import RowLinear
from sgl_pipeline.pp_runner.model.generic.part_filling import fill, refuse_meta
from sgl_pipeline.pp_runner.model.generic.skeleton import Skeleton
from sgl_pipeline.pp_runner.model.generic.tensor_reader import TensorReader
from sgl_pipeline.pp_runner.weights.layouts import round_matrix
from sgl_pipeline.pp_runner.weights.schemes import Layout


class _Decoded:
    """The output of a decoder that has run: `last_hidden_state` and nothing else."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.last_hidden_state = rows

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> torch.Tensor:
        assert index == 0
        return self.last_hidden_state


class _HasRun(nn.Module):
    """In the place of the decoder: norms the rows that it is given as embeddings."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self._norm = norm

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> _Decoded:
        return _Decoded(self._norm(inputs_embeds))


class DecoderHead:
    """Logits of rows of the residual stream, by the own code of `model`, whose decoder has run."""

    def __init__(self, model: PreTrainedModel, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] in fp32 of rows [N, H]; N may be 0."""
        if not len(rows):
            return rows.new_empty(0, self._vocab_size, dtype=torch.float32)
        logits: torch.Tensor = self._model(inputs_embeds=rows[None], use_cache=False).logits
        return logits[0].float()


def read_head(
    skeleton: Skeleton,
    norm: nn.Module,
    norm_name: str,
    reader: TensorReader,
    table: torch.Tensor | None,
) -> DecoderHead:
    """The head of `skeleton` with its weights; if it is tied and not in the file, its matrix is the
    embedding table, rounded as the model's other matrices are.

    Args:
        norm: the template of the final norm, which is `norm_name` in the decoder.
        table: the embedding table if the stage has it.
    """
    prefix = f"{skeleton.name}.{norm_name}."
    final_norm = fill(skeleton.copy_of(norm), prefix, reader)
    skeleton.remake_buffers(final_norm)
    refuse_meta(final_norm, prefix)
    model = skeleton.model_of_head(_HasRun(final_norm))
    head = skeleton.head
    linear = _head_linear(skeleton, head, reader, table)
    model.set_submodule(skeleton.head_name, RowLinear(linear, head.out_features))
    return DecoderHead(model, head.out_features)


def _head_linear(
    skeleton: Skeleton, head: nn.Linear, reader: TensorReader, table: torch.Tensor | None
) -> Linear:
    name = skeleton.head_name
    if not skeleton.has_tied_head or reader.has(f"{name}.weight"):
        return reader.linear(head, f"{name}.")
    embedding = f"{skeleton.embedding_name}.weight"
    is_kept = table is not None
    if table is None:
        table = reader.tensor(embedding, head.weight)
    quantization = reader.quantization
    scheme = quantization.scheme_of(name) if quantization is not None else None
    bias = reader.bias(head, name)
    if quantization is None or scheme is None:
        return reader.kernels.linear(table, bias)
    if quantization.layout_of(name) is not Layout.SIXTEEN_BITS:
        return reader.kernels.linear(table, bias)
    matrix = round_matrix(reader.source, f"{name}.weight", table, scheme)
    if not is_kept:
        del reader.source.loaded[reader.name_of(embedding)]
    return reader.kernels.linear(matrix, bias)
