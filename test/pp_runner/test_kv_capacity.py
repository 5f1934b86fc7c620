"""How many pages fit, on a machine without a GPU."""

import pytest
import torch

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.messages import StageAssignment
from sgl_pipeline.pp_runner.kv_capacity import DEFAULT_CPU_KV_TOKENS, kv_page_capacity
from sgl_pipeline.pp_runner.model_spec import model_spec
from sgl_pipeline.stage_plan import StagePlan

CPU = torch.device("cpu")
SPEC = model_spec(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
)


def assignment(max_total_tokens: int | None, page_size: int = 16) -> StageAssignment:
    return StageAssignment(
        stage=1,
        plan=StagePlan(0, (4, 2)),
        model_path="",
        load_format="dummy",
        dtype="float32",
        device="cpu",
        attention_backend="auto",
        layer_kernels="auto",
        page_size=page_size,
        max_total_tokens=max_total_tokens,
        memory_fraction=0.8,
        links=(),
        cpu_threads=1,
        cpu_cores=(),
    )


def test_capacity_on_a_cpu_is_a_fixed_size_or_what_was_asked_for():
    default = kv_page_capacity(assignment(None), SPEC, CPU, torch.float32)
    assert default.num_pages * 16 == DEFAULT_CPU_KV_TOKENS
    # Two layers of keys and values for 16 tokens, 2 heads of 8 fp32 numbers.
    assert default.page_bytes == 2 * 2 * 16 * 2 * 8 * 4
    assert kv_page_capacity(assignment(100), SPEC, CPU, torch.float32).num_pages == 6


def test_less_than_a_page_names_the_knobs():
    with pytest.raises(ConfigurationError, match=r"--max-total-tokens 15 .* --page-size"):
        kv_page_capacity(assignment(15), SPEC, CPU, torch.float32)


def test_more_than_memory_holds_names_the_limit_and_the_knob():
    with pytest.raises(ConfigurationError, match=r"room for \d+ MiB.*lower --max-total-tokens"):
        kv_page_capacity(assignment(10**13), SPEC, CPU, torch.float32)
