"""Models with states: what they do not take is refused by name, in a line."""

from dataclasses import replace

import pytest

from sgl_pipeline.args import (
    DisaggregationArgs,
    PipelineArgs,
    RecoveryArgs,
    SchedulingArgs,
    StageArgs,
    TierArgs,
)
from sgl_pipeline.errors import ConfigurationError

WITH_STATES = PipelineArgs(
    stages=StageArgs(model_path="m", dtype="float32", num_stages=2),
    scheduling=SchedulingArgs(num_state_slots=4, radix_cache=False),
)
DECODE = DisaggregationArgs(mode="decode")


def test_a_model_with_states_has_no_boundary_logs() -> None:
    assert WITH_STATES.log_mib == 0
    without = replace(WITH_STATES, scheduling=SchedulingArgs())
    assert without.log_mib > 0


@pytest.mark.parametrize(
    ("section", "flag"),
    [
        ({"recovery": RecoveryArgs(log_mib=64)}, "--recovery-log-mib 64"),
        ({"disaggregation": DECODE}, "--disaggregation-mode decode"),
        (
            {"disaggregation": replace(DECODE, attention_offload=True)},
            "--enable-attention-offload",
        ),
        ({"tiers": TierArgs(enabled=True, backend="file")}, "--enable-hierarchical-cache"),
    ],
)
def test_what_states_cannot_do_is_refused_by_name(section: dict[str, object], flag: str) -> None:
    # Without states it is taken: the radix cache is on then.
    replace(WITH_STATES, scheduling=SchedulingArgs(), **section)
    with pytest.raises(ConfigurationError) as refused:
        replace(WITH_STATES, **section)
    text = str(refused.value)
    assert "\n" not in text
    assert text.startswith(f"{flag} is not built for models with states: ")


def test_a_gpu_is_refused_with_the_flag_that_helps_where_none_was_given_too() -> None:
    """Without `--device` the GPU is found: to leave the flag out would fail again."""
    with pytest.raises(ConfigurationError) as refused:
        replace(WITH_STATES, stages=replace(WITH_STATES.stages, device="cuda"))
    text = str(refused.value)
    assert text.endswith("; use --device cpu") and "\n" not in text
    assert "--device cuda" in text and "leave it out" not in text
