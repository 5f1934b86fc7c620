"""The role of a server on the command line, and what upstream's front learns of it."""

from pathlib import Path
from typing import Any

import pytest
from support.front_model import write_front_model

from sgl_pipeline.args import DisaggregationArgs
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.command_line.keyword_arguments import parse_keywords
from sgl_pipeline.managers.command_line.server_args import LaunchPlan, parse_command_line


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_front_model(tmp_path_factory.mktemp("model")))


def plan_of(model: str, flags: str = "") -> LaunchPlan:
    return parse_command_line(["--model-path", model, "--device", "cpu", *flags.split()])


def resolved(plan: LaunchPlan) -> dict[str, Any]:
    """What `/server_info` shows."""
    return dict(plan.upstream.resolved_dict())  # type: ignore[attr-defined]


def test_without_a_role_upstream_is_told_nothing(model: str) -> None:
    plan = plan_of(model)
    assert plan.pipeline.disaggregation == DisaggregationArgs()
    assert resolved(plan)["disaggregation_mode"] == "null"
    assert not plan.features.is_disaggregated


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_upstream_learns_of_the_role_and_changes_nothing_else(model: str, mode: Any) -> None:
    plain, plan = plan_of(model), plan_of(model, f"--disaggregation-mode {mode}")
    assert plan.pipeline.disaggregation == DisaggregationArgs(mode=mode)
    assert plan.features.is_disaggregated
    before, after = resolved(plain), resolved(plan)
    assert {name for name in before if before[name] != after[name]} - {"random_seed"} == {
        "disaggregation_mode",
        "disaggregation_transfer_backend",
    }
    assert after["disaggregation_mode"] == mode
    assert after["disaggregation_transfer_backend"] == "page_link"


def test_flags_and_variables_reach_the_section(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "7")
    flags = """--disaggregation-mode decode --disaggregation-transfer-backend page_link
        --disaggregation-bootstrap-port 9000 --num-reserved-decode-tokens 64
        --disaggregation-decode-fallback"""
    plan = plan_of(model, flags)
    assert plan.pipeline.disaggregation == DisaggregationArgs(
        mode="decode",
        bootstrap_port=9000,
        reserved_decode_tokens=64,
        decode_fallback=True,
        waiting_timeout_s=7.0,
    )
    shown = resolved(plan)
    assert shown["disaggregation_bootstrap_port"] == 9000
    assert shown["num_reserved_decode_tokens"] == 64


def test_variables_alone_give_no_role(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "no number")
    assert plan_of(model).pipeline.disaggregation == DisaggregationArgs()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--disaggregation-decode-enable-radix-cache", "always has its radix cache"),
        ("--disaggregation-decode-polling-interval 4", "an event, not polled"),
        ("--disaggregation-enable-kv-checksum", "has a checksum"),
        ("--disaggregation-decode-retraction-backup cpu_tensor", "computes them again"),
        ("--disaggregation-decode-allocation-policy prefill_complete", "its prefill is complete"),
        ("--disaggregation-decode-extra-slots 3", "have no slots"),
        ("--optimistic-prefill-attempts 2", "computes at once"),
        ("--num-reserved-decode-tokens 64", "has no effect on a prefill server"),
    ],
)
def test_what_is_met_anyway_is_taken_with_a_line(
    model: str, flags: str, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan_of(model, f"--disaggregation-mode prefill {flags}")
    assert named in caplog.text


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--disaggregation-transfer-backend nixl", "nixl is not built.* page_link"),
        ("--disaggregation-transfer-backend mooncake", "mooncake is not built.* page_link"),
        ("--disaggregation-ib-device mlx5_0", "ib-device mlx5_0 cannot be honored: .*RDMA"),
        ("--disaggregation-decode-enable-offload-kvcache", "a store keeps .*--enable-hier"),
        ("--disaggregation-decode-host-receive-threshold 0.5", "--max-total-tokens is its size"),
        ("--disaggregation-decode-retraction-backup none", "retracted requests go on here"),
        ("--enable-pd-role-switch", "a role lasts as long as the server"),
        ("--enable-pdmux", "--enable-pdmux True cannot be honored: .*--policy bounds prefill"),
        ("--sm-group-num 4", "--sm-group-num 4 cannot be honored: .*a step has both"),
        ("--encoder-only", "--encoder-only True cannot be honored: only text"),
        ("--decoupled-spec-role drafter", "drafts are looked up by the scheduler"),
        ("--disable-radix-cache", "hands pages of the radix cache on"),
        ("--enable-response-store", "each server would keep responses of its own"),
    ],
)
def test_what_has_no_meaning_is_refused_with_the_reason(model: str, flags: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        plan_of(model, f"--disaggregation-mode decode {flags}")


def test_an_engine_has_no_role(model: str) -> None:
    with pytest.raises(ConfigurationError, match="Engine takes no 'disaggregation_mode'"):
        parse_keywords({"model_path": model, "disaggregation_mode": "decode"})


def test_a_config_file_gives_a_role_too(model: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"model-path: {model}\ndevice: cpu\ndisaggregation-mode: prefill\n")
    plan = parse_command_line(["--config", str(file)])
    assert plan.pipeline.disaggregation == DisaggregationArgs(mode="prefill")
