"""Layers of transformers that compute what ours compute become ours, and no others do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.generic_families import VOCAB_SIZE, generated, generic_model
from support.stage_chain import StageChain, new_request
from support.tiny_models import tiny_model
from transformers.models.llama import modeling_llama

from sgl_pipeline.pp_runner.layer_kernels.torch_kernels import TorchKernels
from sgl_pipeline.pp_runner.model.generic.probe import probe
from sgl_pipeline.pp_runner.stage_model_choice import load_stage_model

PROMPT = [11 * place % VOCAB_SIZE for place in range(17)]
Forward = Callable[..., Any]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def is_plain(path: Path) -> bool:
    model = load_stage_model(
        probe(path),
        path,
        layers=(),
        is_first=False,
        is_last=False,
        dtype=torch.float32,
        device=torch.device("cpu"),
        kernels=TorchKernels(),
    )
    return model.plain_steps is not None


PLAIN = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3-vl",
    "phi3",
    "phi4-mini",
    "mistral",
    "ministral",
    "seed-oss",
)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_layers_are_recognized(name: str) -> None:
    """With biases, norms of heads, joined projections, partial rotation and windows."""
    assert is_plain(generic_model(name))


def test_pairs_of_neighbors_and_norms_of_outputs_are_recognized() -> None:
    assert is_plain(tiny_model("glm4"))


@pytest.mark.parametrize(
    "name",
    [
        "ministral3",  # scales queries by their position
        "smollm3",  # does not rotate in each second layer
        "granite",  # scales what it adds to the stream
        "gemma",  # adds one to weights of norms
        "olmo2",  # norms outputs alone
        "olmoe",  # has experts, and norms all heads at once
    ],
)
def test_other_layers_are_not(name: str) -> None:
    assert not is_plain(generic_model(name))


def _residual_of_the_normed(layer: Any, rows: torch.Tensor, forward: Forward) -> torch.Tensor:
    return forward(rows) + 0.01 * layer.input_layernorm(rows)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer, rows, forward: rows + 1.01 * (forward(rows) - rows),
        lambda layer, rows, forward: forward(rows).clamp(-50.0, 50.0),
        lambda layer, rows, forward: forward(rows) + 0.01 * rows.flip(1),
        lambda layer, rows, forward: forward(rows) * (1.0 + 0.01 * layer.self_attn.layer_idx),
        _residual_of_the_normed,
    ],
    ids=["scaled", "clamped", "mixed rows", "one layer alone", "another residual"],
)
def test_a_layer_that_computes_something_else_is_seen(
    change: Callable[[Any, torch.Tensor, Forward], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names are those of a plain one."""
    forward = modeling_llama.LlamaDecoderLayer.forward

    def changed(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return change(self, hidden_states, lambda rows: forward(self, rows, *args, **kwargs))

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", changed)
    assert not is_plain(generic_model("llama"))


def test_queries_that_are_scaled_far_from_the_beginning_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rotate = modeling_llama.apply_rotary_pos_emb
    attend = modeling_llama.LlamaAttention.forward

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        far = (kwargs["position_ids"][0, :, None] > 100_000).float()

        def scaled(query: torch.Tensor, key: torch.Tensor, *others: Any) -> Any:
            query, key = rotate(query, key, *others)
            return query * (1.0 + 0.5 * far), key

        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", scaled)
        return attend(self, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", changed)
    assert not is_plain(generic_model("llama"))


def test_a_model_with_one_other_layer_is_transformers_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And its tokens are still those of `generate`."""
    forward = modeling_llama.LlamaMLP.forward

    def changed(self: Any, rows: torch.Tensor) -> torch.Tensor:
        return forward(self, rows) * 1.25

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", changed)
    path = generic_model("llama")
    chain = StageChain(path, (1, 3), spec=probe(path))
    assert all(stage.plain_steps is None for stage in chain.stages)
    assert chain.generate(new_request(PROMPT), 6, 5) == generated(path, PROMPT, 6)


@pytest.mark.compiler
@pytest.mark.parametrize("name", ["llama", "qwen3", "glm4"])
def test_the_bits_are_those_of_our_own_layers(name: str) -> None:
    """In bf16, too, where transformers rounds angles."""
    path, rows = tiny_model(name), []
    for spec in (probe(path), None):
        chain = StageChain(
            path, (2, 4), spec=spec, dtype=torch.bfloat16, attention="cpu", kernels="cpu"
        )
        request = new_request(PROMPT)
        chain.generate(request, 4, 7)
        rows.append(torch.stack(chain.logits[request]))
    assert torch.equal(*rows)
