"""The flags of prefill and decode apart: what is taken, what is refused, and in which words."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.arg_groups.fields.disagg import Disagg

from sgl_pipeline.args import (
    DisaggregationArgs,
    PipelineArgs,
    RecoveryArgs,
    SchedulingArgs,
    StageArgs,
)
from sgl_pipeline.args.flags import flags_of
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.upstream.upstream_checks import flag_of, upstream_defaults
from sgl_pipeline.managers.upstream.upstream_fields import NOTED, refusal

PAGE = Path(__file__).resolve().parents[2] / "docs" / "disaggregation.md"
STAGES = StageArgs(model_path="m", dtype="float32")


def test_a_server_prefills_and_decodes_by_default() -> None:
    args = PipelineArgs(stages=STAGES).disaggregation
    assert args == DisaggregationArgs() and not args.is_on
    assert args.engine_type == "unified"


def test_defaults_of_upstreams_flags_are_upstreams_but_for_the_link() -> None:
    defaults = upstream_defaults()
    differing = {
        field.name
        for field, flag in flags_of(DisaggregationArgs)
        if flag.upstream and field.default != defaults[flag.dest]
    }
    assert differing == {"transfer_backend"}


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_both_roles_are_taken(mode: Any) -> None:
    args = DisaggregationArgs(mode=mode, bootstrap_port=9000)
    assert args.is_on and args.engine_type == mode


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"mode": "both"}, "--disaggregation-mode 'both' is unknown; choose from null, prefill"),
        ({"bootstrap_port": 9000}, "--disaggregation-bootstrap-port does nothing without"),
        ({"decode_fallback": True}, "--disaggregation-decode-fallback does nothing without"),
        ({"reserved_decode_tokens": 1}, "--num-reserved-decode-tokens does nothing without"),
        ({"mode": "prefill", "decode_fallback": True}, "-fallback is for --disaggregation-mode d"),
        ({"attention_offload": True}, "--enable-attention-offload does nothing without"),
        (
            {"mode": "prefill", "attention_offload": True, "attention_offload_ratio": "1"},
            "-ratio is for --disaggregation-mode decode, this is prefill",
        ),
        (
            {"mode": "decode", "attention_offload_ratio": "1"},
            "--attention-offload-ratio does nothing without --enable-attention-offload",
        ),
        *(
            (
                {"mode": "decode", "attention_offload": True, "attention_offload_ratio": ratio},
                f"-ratio {ratio} is neither auto nor a number from 0 to inf",
            )
            for ratio in ("-1", "nan", "half", "")
        ),
        ({"mode": "decode", "bootstrap_port": 0}, "-bootstrap-port 0 must be between 1 and 65535"),
        ({"mode": "decode", "reserved_decode_tokens": -1}, "-tokens -1 must be at least 0"),
        ({"transfer_backend": "mooncake"}, "mooncake is not built.*leave the flag out, or give p"),
        ({"mode": "decode", "transfer_backend": "nixl"}, "-backend nixl is not built"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        DisaggregationArgs(**values)


@pytest.mark.parametrize(
    ("ratio", "number"), [("auto", None), ("0", 0.0), ("0.7", 0.7), ("inf", math.inf)]
)
def test_the_ratio_is_a_number_or_measured(ratio: str, number: float | None) -> None:
    args = DisaggregationArgs(mode="decode", attention_offload=True, attention_offload_ratio=ratio)
    assert args.offload_ratio == number


def test_attention_is_lent_by_cpus_only() -> None:
    with pytest.raises(ConfigurationError, match="-attention-offload with --device cuda is not bu"):
        PipelineArgs(
            stages=StageArgs(model_path="m", dtype="float32", device="cuda"),
            recovery=RecoveryArgs(log_mib=0),
            disaggregation=DisaggregationArgs(mode="prefill", attention_offload=True),
        )


def test_a_role_needs_the_radix_cache() -> None:
    with pytest.raises(ConfigurationError, match="--disable-radix-cache switches that off"):
        PipelineArgs(
            stages=STAGES,
            scheduling=SchedulingArgs(radix_cache=False),
            disaggregation=DisaggregationArgs(mode="decode"),
        )


def test_the_page_names_every_flag_of_upstreams_namespace_that_is_about_it() -> None:
    text = PAGE.read_text(encoding="utf-8")
    about = [
        name
        for name in Disagg.__struct_fields__
        if not re.match(r"(encoder|decoupled|language|enable_adaptive)", name)
    ]
    assert len(about) == 18
    for name in about:
        assert f"`{flag_of(name)}" in text, name
        is_taken = refusal(name, "disagg") is None or name in NOTED
        refused = text.partition("## What is refused")[2].partition("\n## ")[0]
        assert (f"`{flag_of(name)}`" in refused) != is_taken, name
