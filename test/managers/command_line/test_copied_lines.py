"""SGLang's own command lines of pipelines start, and say what has no effect here."""

from typing import Any

import pytest
from support.documented_lines import (
    DYNAMIC_CHUNKS,
    DYNAMIC_CHUNKS_8,
    FIXED_CHUNKS,
    FIXED_CHUNKS_8,
    LAYERS,
    LONGEST,
    PREFILL_SERVER,
    DocumentedLine,
)

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.command_line.model_files import DEMO_MODEL
from sgl_pipeline.managers.command_line.server_args import LaunchPlan, make_parser
from sgl_pipeline.managers.command_line.server_args import parse_command_line as parse
from sgl_pipeline.managers.upstream.upstream_checks import flag_of
from sgl_pipeline.managers.upstream.upstream_fields import HELP, NOTED

SMOOTH, LAYER_PARTITION = "SGLANG_DYNAMIC_CHUNKING_SMOOTH_FACTOR", "SGLANG_PP_LAYER_PARTITION"
LONG_CONTEXT = [
    "--attention-backend fa3",
    "--mem-fraction-static 0.8",
    "--trust-remote-code",
    "--watchdog-timeout 3600.0",
]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SMOOTH, LAYER_PARTITION, "SGLANG_PP_COMM_OVERLAP"):
        monkeypatch.delenv(name, raising=False)


def plan_of(*flags: str) -> LaunchPlan:
    return parse(["--model-path", str(DEMO_MODEL), "--device", "cpu", *flags])


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Our own lines so far, each up to what has no effect."""
    ours = [record for record in caplog.records if record.name.startswith("sgl_pipeline")]
    return sorted(record.getMessage().partition(" has no effect")[0] for record in ours)


@pytest.mark.parametrize(
    ("line", "stages", "names"),
    [
        (FIXED_CHUNKS, 4, LONG_CONTEXT),
        (DYNAMIC_CHUNKS, 4, [*LONG_CONTEXT, SMOOTH]),
        (FIXED_CHUNKS_8, 8, LONG_CONTEXT),
        (DYNAMIC_CHUNKS_8, 8, [*LONG_CONTEXT, SMOOTH]),
        (LAYERS, 4, LONG_CONTEXT),
        (
            LONGEST,
            2,
            [
                "--cuda-graph-max-bs-decode 8",
                "--mem-fraction-static 0.8",
                "--moe-dense-tp-size 1",
                "--trust-remote-code",
                "--watchdog-timeout 3600.0",
            ],
        ),
    ],
)
def test_a_documented_line_is_taken_with_a_line_for_each_flag_without_effect(
    line: DocumentedLine,
    stages: int,
    names: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in line.environment.items():
        monkeypatch.setenv(name, value)
    plan = parse(line.flags())
    lines = said(caplog)
    assert len(lines) == len(names)
    assert all(name in found for name, found in zip(names, lines, strict=True)), lines
    assert plan.pipeline.stages.num_stages == stages
    wanted = line.environment.get(LAYER_PARTITION, "auto")
    assert plan.pipeline.stages.layer_partition == wanted
    assert plan.pipeline.throttle.dynamic_chunking == ("--enable-dynamic-chunking" in line.text)
    assert plan.pipeline.cluster.head_address is not None
    # Upstream never runs a model's code, nor looks for kernels.
    upstream: Any = plan.upstream
    assert (upstream.trust_remote_code, upstream.tp_size, upstream.pp_size) == (False, 1, 1)
    assert upstream.attention_backend != "fa3"


@pytest.mark.parametrize("line", [FIXED_CHUNKS, DYNAMIC_CHUNKS, FIXED_CHUNKS_8, DYNAMIC_CHUNKS_8])
def test_tensor_parallelism_is_what_cannot_be(line: DocumentedLine) -> None:
    with pytest.raises(ConfigurationError, match=r"--tp-size \d"):
        parse(line.flags(tp_is_1=False))


def test_a_prefill_server_has_no_rdma_device() -> None:
    with pytest.raises(ConfigurationError, match=r"-ib-device mlx5_bond_0.* it is for RDMA"):
        parse(PREFILL_SERVER.flags())


def test_flags_that_upstream_has_not_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(LONGEST.flags(tp_is_1=False))
    usage, error = capsys.readouterr().err.splitlines()
    assert "--help" in usage and "--enable-dsa-prefill-context-parallel" in error
    with pytest.raises(ConfigurationError, match="--attn-cp-size 8"):
        plan_of("--attn-cp-size", "8")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--disable-overlap-schedule", "--disable-overlap-schedule"),
        ("--enable-mixed-chunk", "--enable-mixed-chunk"),
        ("--schedule-conservativeness 0.3", "--schedule-conservativeness 0.3"),
        ("--max-prefill-tokens 8k", "--max-prefill-tokens 8000"),
        ("--prefill-attention-backend flashinfer", "--prefill-attention-backend flashinfer"),
        ("--decode-attention-backend triton", "--decode-attention-backend triton"),
        ("--cuda-graph-max-bs-prefill 4", "--cuda-graph-max-bs-prefill 4"),
    ],
)
def test_a_flag_without_effect_says_what_holds(
    flags: str, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_of(*flags.split())
    assert said(caplog) == [named]
    field = flags.split()[0].removeprefix("--").replace("-", "_")
    (record,) = [one for one in caplog.records if one.name.startswith("sgl_pipeline")]
    assert record.getMessage() == f"{named} has no effect here: {NOTED[field].text}"
    assert plan.pipeline == plan_of().pipeline
    given: Any = plan.upstream
    assert getattr(given, field) == getattr(plan_of().upstream, field)


def test_defaults_are_not_worth_a_line(caplog: pytest.LogCaptureFixture) -> None:
    plan_of("--watchdog-timeout", "300", "--max-prefill-tokens", "16384", "--tp-size", "1")
    assert said(caplog) == []


def test_help_says_what_holds_here() -> None:
    help_of = {
        flag: action.help for action in make_parser()._actions for flag in action.option_strings
    }
    for name, note in NOTED.items():
        assert help_of[flag_of(name)] == f"No effect here: {note.text}."
    for name, text in HELP.items():
        assert help_of[flag_of(name)] == text
    shown = help_of["--pp-layer-partition"]
    assert shown is not None and "(default: auto; SGLang's: SGLANG_PP_LAYER_PARTITION)" in shown


def test_disabled_graphs_are_off() -> None:
    assert plan_of("--disable-cuda-graph").pipeline.stages.graphs == "off"
    assert plan_of().pipeline.stages.graphs == "auto"


def test_the_microbatch_limit_is_one_of_decodes() -> None:
    scheduling = plan_of("--pp-max-micro-batch-size", "7").pipeline.scheduling
    assert scheduling.max_decodes_per_step == 7
    assert plan_of().pipeline.scheduling.max_decodes_per_step is None


@pytest.mark.parametrize(
    ("flags", "extra"),
    [
        ("", 0),
        ("--pp-async-batch-depth 2", 2),
        ("--extra-steps-in-flight 3", 3),
        ("--pp-async-batch-depth 2 --extra-steps-in-flight 2", 2),
    ],
)
def test_the_async_batch_depth_is_extra_steps(flags: str, extra: int) -> None:
    assert plan_of(*flags.split()).pipeline.scheduling.extra_steps_in_flight == extra


@pytest.mark.parametrize(("depth", "extra"), [("2", "1"), ("2", "0"), ("0", "1")])
def test_two_async_batch_depths_are_refused_by_both_names(depth: str, extra: str) -> None:
    named = f"--extra-steps-in-flight {extra} and --pp-async-batch-depth {depth}"
    with pytest.raises(ConfigurationError, match=named):
        plan_of("--pp-async-batch-depth", depth, "--extra-steps-in-flight", extra)


@pytest.mark.parametrize("flag", ["8,8", "auto"])
def test_the_flag_comes_before_the_variable(
    flag: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(LAYER_PARTITION, "7,9")
    assert plan_of("--pp", "2").pipeline.stages.layer_partition == "7,9"
    plan_of("--pp", "2", "--pp-layer-partition", "7,9")
    assert said(caplog) == []
    plan = plan_of("--pp", "2", "--pp-layer-partition", flag)
    assert plan.pipeline.stages.layer_partition == flag
    assert f"{LAYER_PARTITION}=7,9 has no effect: --pp-layer-partition {flag} holds" in caplog.text


def test_one_stage_needs_no_partition(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(LAYER_PARTITION, "7,9")
    assert plan_of().pipeline.stages.layer_partition == "auto"
    assert said(caplog) == [f"{LAYER_PARTITION}=7,9"]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("8,x", "'8,x' is not auto, even or a list"),
        ("", "'' is not auto, even or a list"),
        ("8,4,4", "8,4,4 names 3 stages"),
        ("8,9", "8,9 sums to 17"),
    ],
)
def test_a_partition_that_does_not_fit_names_its_variable(
    value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAYER_PARTITION, value)
    with pytest.raises(ConfigurationError, match=rf"^{LAYER_PARTITION} {reason}"):
        plan_of("--pp", "2")
    with pytest.raises(ConfigurationError, match=rf"^--pp-layer-partition {reason}"):
        plan_of("--pp", "2", f"--pp-layer-partition={value}")


def test_variables_without_effect_share_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGLANG_PP_COMM_OVERLAP", "1")
    monkeypatch.setenv(SMOOTH, "0.65")
    plan_of("--pp", "2")
    (line,) = said(caplog)
    assert line.startswith(f"no effect here: {SMOOTH}, SGLANG_PP_COMM_OVERLAP;")
