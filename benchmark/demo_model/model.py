"""Small Qwen3-shaped network written for quick training on a CPU, with Hugging Face export.

`train.py` builds, trains and saves it; everybody else loads the exported directory with
transformers or SGLang.  It must stay mathematically equal to `Qwen3ForCausalLM`, since the
exported weights are only ever served by other implementations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the network; the defaults are those of the shipped demo model."""

    vocab_size: int = 320  # 6 specials and 256 bytes, up to a multiple of 64 for kernels
    hidden_size: int = 128
    layer_count: int = 16
    query_head_count: int = 4
    key_value_head_count: int = 2
    head_size: int = 64
    feed_forward_size: int = 320
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6
    max_position_count: int = 32_768

    def huggingface_config(self) -> dict[str, Any]:
        """Return the contents of `config.json` for the exported bfloat16 checkpoint."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layer_count,
            "num_attention_heads": self.query_head_count,
            "num_key_value_heads": self.key_value_head_count,
            "head_dim": self.head_size,
            "intermediate_size": self.feed_forward_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_epsilon,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rope_scaling": None,
            "max_position_embeddings": self.max_position_count,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": self.layer_count,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
        }


# Name of each stacked weight here, and the suffix it has inside a Hugging Face layer.
LAYER_WEIGHT_NAMES: dict[str, str] = {
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "attention_output": "self_attn.o_proj.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "attention_norm": "input_layernorm.weight",
    "feed_forward_norm": "post_attention_layernorm.weight",
}
MATRIX_NAMES: tuple[str, ...] = (
    "query", "key", "value", "attention_output", "gate", "up", "down",
)  # fmt: skip


class DemoModel(nn.Module):
    """Decoder whose per-layer weights are stacked on axis 0, one row per layer.

    Stacking lets the optimiser treat all layers of one kind as a single batched matrix product,
    which matters because at these sizes the cost of starting an operation is not negligible.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        layers, hidden = shape.layer_count, shape.hidden_size
        query_size = shape.query_head_count * shape.head_size
        key_size = shape.key_value_head_count * shape.head_size

        def matrix(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(layers, rows, columns) * (scale / columns**0.5))

        # Small output projections make every layer start close to the identity, so that a deep
        # and narrow stack trains from the first step.
        small = 0.5 / (2 * layers) ** 0.5
        self.query = matrix(query_size, hidden)
        self.key = matrix(key_size, hidden)
        self.value = matrix(key_size, hidden)
        self.attention_output = matrix(hidden, query_size, small)
        self.gate = matrix(shape.feed_forward_size, hidden)
        self.up = matrix(shape.feed_forward_size, hidden)
        self.down = matrix(hidden, shape.feed_forward_size, small)
        self.query_norm = nn.Parameter(torch.ones(layers, shape.head_size))
        self.key_norm = nn.Parameter(torch.ones(layers, shape.head_size))
        self.attention_norm = nn.Parameter(torch.ones(layers, hidden))
        self.feed_forward_norm = nn.Parameter(torch.ones(layers, hidden))
        self.final_norm = nn.Parameter(torch.ones(hidden))
        self.embedding = nn.Parameter(torch.randn(shape.vocab_size, hidden) * 0.05)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the final hidden states [batch, length, hidden] of `token_ids` [batch, length].

        Sequences start at position 0 and hold no padding on the left.
        """
        hidden = functional.embedding(token_ids, self.embedding)
        rotation = rotary_tables(token_ids.shape[1], self.shape, hidden.device)
        stacks = [getattr(self, name).unbind(0) for name in LAYER_WEIGHT_NAMES]
        for weights in zip(*stacks, strict=True):
            hidden = self._layer(
                hidden, dict(zip(LAYER_WEIGHT_NAMES, weights, strict=True)), rotation
            )
        return self._norm(hidden, self.final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return scores [..., vocabulary] of final hidden states [..., hidden]."""
        return functional.linear(hidden, self.embedding)

    def _norm(self, values: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(values, (values.shape[-1],), weight, self.shape.norm_epsilon)

    def _layer(
        self, hidden: Tensor, weights: dict[str, Tensor], rotation: tuple[Tensor, Tensor]
    ) -> Tensor:
        shape = self.shape
        batch, length, _ = hidden.shape
        normed = self._norm(hidden, weights["attention_norm"])

        def heads(name: str, count: int) -> Tensor:
            flat = functional.linear(normed, weights[name])
            return flat.view(batch, length, count, shape.head_size)

        query = self._norm(heads("query", shape.query_head_count), weights["query_norm"])
        key = self._norm(heads("key", shape.key_value_head_count), weights["key_norm"])
        value = heads("value", shape.key_value_head_count).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(
            rotate(query.transpose(1, 2), rotation),
            rotate(key.transpose(1, 2), rotation),
            value,
            is_causal=True,
            enable_gqa=True,
        )
        mixed = mixed.transpose(1, 2).reshape(batch, length, -1)
        hidden = hidden + functional.linear(mixed, weights["attention_output"])
        normed = self._norm(hidden, weights["feed_forward_norm"])
        gate = functional.silu(functional.linear(normed, weights["gate"]))
        inner = gate * functional.linear(normed, weights["up"])
        return hidden + functional.linear(inner, weights["down"])

    @torch.no_grad()
    def grown(self, layer_count: int) -> DemoModel:
        """Return a deeper model that computes exactly what this one does.

        Each layer is followed by copies of itself whose output projections are zero, so that the
        copies add nothing until they are trained.  `layer_count` is a multiple of the present one.
        """
        factor, rest = divmod(layer_count, self.shape.layer_count)
        if rest or factor < 1:
            raise ValueError(
                f"cannot grow {self.shape.layer_count} layers to {layer_count}: "
                "choose a multiple of the present number"
            )
        deeper = DemoModel(replace(self.shape, layer_count=layer_count))
        for name, weight in self.named_parameters():
            copies: Tensor = weight
            if name in LAYER_WEIGHT_NAMES:
                copies = weight.repeat_interleave(factor, dim=0)
            if name in ("attention_output", "down"):
                is_new = torch.arange(layer_count) % factor != 0
                copies = copies.masked_fill(is_new[:, None, None], 0.0)
            deeper.get_parameter(name).copy_(copies)
        return deeper

    def huggingface_state(self) -> dict[str, Tensor]:
        """Return detached weights under their Hugging Face names, in the training precision."""
        state = {
            "model.embed_tokens.weight": self.embedding.detach(),
            "model.norm.weight": self.final_norm.detach(),
        }
        for name, suffix in LAYER_WEIGHT_NAMES.items():
            for index, weight in enumerate(getattr(self, name).detach().unbind(0)):
                state[f"model.layers.{index}.{suffix}"] = weight
        return state


def rotary_tables(
    length: int, shape: ModelShape, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [length, head_size] of the rotary position encoding."""
    exponents = torch.arange(0, shape.head_size, 2, device=device).float() / shape.head_size
    angles = torch.arange(length, device=device).float()[:, None] / shape.rope_theta**exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(values: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary positions to `values` [batch, heads, length, head_size]."""
    cosines, sines = rotation
    first, second = values.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (values * cosines + turned * sines).to(values.dtype)
