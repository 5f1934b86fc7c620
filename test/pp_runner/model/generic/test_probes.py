"""A model that transformers' code would compute wrongly in stages is refused, with the reason."""

import json
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.generic_families import MODEL_SIZES, WINDOWED, generic_model
from torch import nn
from transformers import AutoConfig, Gemma2Model, LlamaModel, Qwen3Model
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen3 import modeling_qwen3

from sgl_pipeline.errors import ConfigurationError, UnsupportedModelError
from sgl_pipeline.pp_runner.layer_kernels.torch_kernels import TorchKernels
from sgl_pipeline.pp_runner.model.generic import layers
from sgl_pipeline.pp_runner.model.generic.probe import probe
from sgl_pipeline.pp_runner.model.generic.rotary_choice import context_lengths
from sgl_pipeline.pp_runner.model.generic.spec import GenericSpec
from sgl_pipeline.pp_runner.stage_model_choice import load_stage_model

CPU = torch.device("cpu")
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
MLA = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_group": 2,
    "topk_group": 1,
}
REFUSED: dict[str, tuple[str, Mapping[str, Any], str]] = {
    "Qwen3.5": ("qwen3_5_text", {}, "layers of full_attention, linear_attention"),
    "MiniMax-Text": ("minimax", EXPERTS, "layers of full_attention, linear_attention"),
    "Mamba": ("mamba", {}, "4 of its 4 layers do not attend exactly once"),
    "RecurrentGemma": ("recurrent_gemma", {}, "3 of its 4 layers do not attend exactly once"),
    "Llama 4": (
        "llama4_text",
        {**EXPERTS, "attention_chunk_size": 16, "intermediate_size_mlp": 64},
        "mask is not a function of two positions",
    ),
    "nanochat": ("nanochat", {}, "'norm'] before them, instead of one norm after them"),
    "Gemma 3n": (
        "gemma3n_text",
        {"num_kv_shared_layers": 0, "layer_types": WINDOWED},
        "not one residual stream",
    ),
    "DeepSeek-V4": ("deepseek_v4", {}, "not one residual stream"),
    "DeepSeek-V3.2": ("deepseek_v32", {**EXPERTS, **MLA}, "does not run without weights"),
    "Gemma 4 E4B": (
        "gemma4_text",
        {"layer_types": WINDOWED, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 0},
        "layer 2 attends to keys and values of another one",
    ),
    "Gemma 4 with embeddings of layers": (
        "gemma4_text",
        {"layer_types": WINDOWED, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8},
        "weights in embed_tokens_per_layer",
    ),
    "OPT": ("opt", {}, "weights in embed_positions"),
    "GPT-2": ("gpt2", {}, "no list `layers`"),
}


def write_config(directory: Path, model_type: str, changes: Mapping[str, Any]) -> Path:
    sizes = {key: value for key, value in {**MODEL_SIZES, **changes}.items() if value is not None}
    AutoConfig.for_model(model_type, **sizes).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_be_served_is_refused(name: str, tmp_path: Path) -> None:
    model_type, changes, words = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=words.replace("[", r"\[")):
        probe(write_config(tmp_path, model_type, changes))


def test_a_window_that_only_the_mask_shows_is_the_windows_of_the_layers(tmp_path: Path) -> None:
    """Qwen2-MoE gives its attention no window."""
    changes = {**EXPERTS, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 4}
    spec = probe(write_config(tmp_path, "qwen2_moe", changes))
    windows = [attention.window for attention in spec.attentions]
    assert windows == [9 if layer % 2 == 0 else None for layer in range(4)]


@pytest.mark.parametrize("dropped", ["once", "all"])
def test_a_layer_that_attends_otherwise_is_seen(
    dropped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = modeling_qwen3.Qwen3Attention.forward

    def forward(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if dropped == "all" and self.layer_idx == 2:
            return hidden_states, None
        result = attend(self, hidden_states, *args, **kwargs)
        return attend(self, hidden_states, *args, **kwargs) if self.layer_idx == 2 else result

    monkeypatch.setattr(modeling_qwen3.Qwen3Attention, "forward", forward)
    times = "0" if dropped == "all" else "2"
    with pytest.raises(UnsupportedModelError, match=rf"1 of its 4 layers .*layer 2: {times} times"):
        probe(generic_model("qwen3"))


def test_an_argument_of_unknown_meaning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = modeling_llama.LlamaAttention.forward
    monkeypatch.setattr(
        modeling_llama.LlamaAttention,
        "forward",
        lambda self, *args, **kwargs: attend(self, *args, **kwargs, temperature=2.0),
    )
    with pytest.raises(UnsupportedModelError, match=r"called with temperature = 2\.0"):
        probe(generic_model("llama"))


def test_a_mask_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = modeling_llama.LlamaAttention.forward

    def forward(self: nn.Module, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return attend(self, *args, attention_mask=torch.ones(3, 3), **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    with pytest.raises(UnsupportedModelError, match="a mask of its own making"):
        probe(generic_model("llama"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda layer, rows, forward: (forward(rows),), "its layers return a tuple"),
        (
            lambda layer, rows, forward: forward(torch.cat([rows, rows], dim=1))[:, :3],
            "rows of shape .* for a step of 3 rows",
        ),
    ],
    ids=["a tuple", "more rows"],
)
def test_layers_of_another_form_are_refused(
    change: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = modeling_llama.LlamaDecoderLayer.forward

    def changed(self: nn.Module, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        kwargs = {**kwargs, "position_embeddings": (torch.ones(1, 1, 1, device="meta"),) * 2}
        return change(self, hidden_states, lambda rows: forward(self, rows, **kwargs))

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", changed)
    with pytest.raises(UnsupportedModelError, match=words):
        probe(generic_model("llama"))


def test_a_layer_that_runs_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it attends once."""
    decode, pass_layer = LlamaModel.forward, modeling_llama.LlamaDecoderLayer.forward

    def twice(self: nn.Module, **kwargs: Any) -> Any:
        output = decode(self, **kwargs)
        self.layers[0](output.last_hidden_state, again=True)
        return output

    def forward(self: nn.Module, rows: torch.Tensor, again: bool = False, **kwargs: Any) -> Any:
        return rows if again else pass_layer(self, rows, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", twice)
    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", forward)
    with pytest.raises(UnsupportedModelError, match="runs layers 5 times, and has 4"):
        probe(generic_model("llama"))


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (lambda batch, head, row, key: key <= row + 1, "shows key 1 to row 0"),
        (lambda batch, head, row, key: (key <= row) & (key // 64 == row // 64), "hides key"),
    ],
    ids=["the next token", "chunks"],
)
def test_a_mask_that_is_neither_causal_nor_a_window_is_refused(
    mask: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.masking_utils.causal_mask_function", mask)
    with pytest.raises(UnsupportedModelError, match=words):
        probe(generic_model("llama"))


def load(name: str, spec: GenericSpec, layers: range = range(4)) -> Any:
    return load_stage_model(
        spec,
        generic_model(name),
        layers=layers,
        is_first=False,
        is_last=False,
        dtype=torch.float32,
        device=CPU,
        kernels=TorchKernels(),
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda result, embeds: result + 1.0, "changes the residual stream after the layers"),
        (lambda result, embeds: result + 0.0 * embeds, "changes the residual stream"),
    ],
    ids=["at the end", "by the embedding"],
)
def test_a_decoder_that_touches_the_stream_is_refused(
    change: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = probe(generic_model("qwen3"))
    forward = Qwen3Model.forward

    def changed(self: nn.Module, **kwargs: Any) -> Any:
        output = forward(self, **kwargs)
        embeds = kwargs.get("inputs_embeds", torch.zeros((), device="meta"))
        output.last_hidden_state = change(output.last_hidden_state, embeds)
        return output

    monkeypatch.setattr(Qwen3Model, "forward", changed)
    with pytest.raises(UnsupportedModelError, match=words):
        load("qwen3", spec)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda angles, x, ids: angles + x.sum(), "depends on the embedding"),
        (lambda angles, x, ids: angles * ids.max(), "more than the position of each row"),
        (
            lambda angles, x, ids: angles + torch.arange(ids.shape[1], device=ids.device)[:, None],
            "more than the position of each row",
        ),
    ],
    ids=["embedding", "longest sequence", "place in the step"],
)
def test_what_layers_get_must_follow_from_the_position_of_each_row(
    change: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = probe(generic_model("llama"))
    forward = modeling_llama.LlamaRotaryEmbedding.forward

    def changed(self: nn.Module, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        cosine, sine = forward(self, x, position_ids)
        return change(cosine, x, position_ids), sine

    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", changed)
    with pytest.raises(UnsupportedModelError, match=words):
        load("llama", spec)


def test_a_rotation_that_is_not_that_of_its_type_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = probe(generic_model("phi4-mini"))
    forward = modeling_phi3.Phi3RotaryEmbedding.forward

    def changed(self: nn.Module, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        cosine, sine = forward(self, x, position_ids)
        return (cosine, sine) if self.rope_type == "longrope" else (cosine * 1.5, sine)

    monkeypatch.setattr(modeling_phi3.Phi3RotaryEmbedding, "forward", changed)
    with pytest.raises(UnsupportedModelError, match="of type longrope computes something else"):
        load("phi4-mini", spec)


def test_rotation_by_length_in_some_layers_alone_is_refused(tmp_path: Path) -> None:
    kinds = {
        "full_attention": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    path = write_config(
        tmp_path, "gemma3_text", {"layer_types": WINDOWED, "rope_parameters": kinds}
    )
    with pytest.raises(UnsupportedModelError, match="of type dynamic in some layers"):
        probe(path)


def test_a_context_of_unknown_length_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="max_position_embeddings None"):
        context_lengths(SimpleNamespace(max_position_embeddings=None))


def test_a_stage_refuses_another_model_than_the_one_that_was_probed() -> None:
    with pytest.raises(UnsupportedModelError, match="attends in other ways"):
        load("gemma2", probe(generic_model("gemma3")))


def test_a_stage_on_a_gpu_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="CPUs only"):
        load_stage_model(
            probe(generic_model("llama")),
            generic_model("llama"),
            layers=(),
            is_first=True,
            is_last=False,
            dtype=torch.float32,
            device=torch.device("cuda"),
            kernels=TorchKernels(),
        )


def test_the_spec_travels_as_json_and_the_command_prints_it() -> None:
    path = generic_model("gpt-oss")
    spec = probe(path, "w8a8_int8")
    assert GenericSpec.from_json(spec.to_json()) == spec
    assert spec.quantization is not None and spec.quantization.method == "w8a8_int8"
    assert spec.expert_layers == {0, 1, 2, 3} and spec.kinds == (0, 1, 0, 1)


def test_the_command_says_in_one_line_why_a_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process of its own asks it in test/server/test_model_impl.py."""
    command = "sgl_pipeline.pp_runner.model.generic"
    path = write_config(tmp_path / "nanochat", "nanochat", {})
    for model, code in ((path, 2), (generic_model("llama"), 0)):
        monkeypatch.setattr(sys, "argv", [command, str(model)])
        with pytest.raises(SystemExit) as end:
            runpy.run_module(command, run_name="__main__")
        assert end.value.code == code
        line = capsys.readouterr().out
        assert line.count("\n") == 1
        if code == 2:
            assert "instead of one norm" in line
        else:
            assert GenericSpec.from_json(line) == probe(model)


def test_a_directory_that_cannot_be_read_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such directory"):
        probe(tmp_path / "none")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no such model"}))
    with pytest.raises(UnsupportedModelError, match="transformers cannot read its config"):
        probe(tmp_path)


def test_a_module_is_replaced_only_if_it_computes_the_same() -> None:
    llama = modeling_llama.LlamaRMSNorm(24, 1e-4)
    llama.weight.data.uniform_(0.5, 1.5)
    assert layers.norm_weight(llama) is not None
    other = modeling_llama.LlamaRMSNorm(24, 1e-4)
    other.forward = lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-4)
    assert layers.norm_weight(other) is None
    (gemma,) = [
        module
        for name, module in Gemma2Model(
            AutoConfig.for_model("gemma2", **MODEL_SIZES)
        ).named_modules()
        if name == "layers.0.input_layernorm"
    ]
    gemma.weight.data.uniform_(-0.5, 0.5)
    found = layers.norm_weight(gemma)
    assert found is not None and torch.equal(found[0], 1.0 + gemma.weight)
    # 1 + w has more digits than bf16.
    assert layers.norm_weight(gemma.bfloat16()) is None


def test_an_mlp_is_ours_only_with_a_silu_gate() -> None:
    model = LlamaModel(AutoConfig.for_model("llama", **MODEL_SIZES))
    mlp = model.layers[0].mlp
    assert layers.gated_mlp(mlp) == (("gate_proj", "up_proj"), "down_proj")
    mlp.act_fn = nn.GELU()
    assert layers.gated_mlp(mlp) is None
