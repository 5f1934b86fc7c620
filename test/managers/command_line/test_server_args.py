import argparse
import os
import socket
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.observability import trace
from sglang.srt.server_args import ServerArgs
from support.front_model import byte_tokenizer, write_front_model
from support.generic_families import GENERIC_FAMILIES, generic_model
from support.multimodal_models import MULTIMODAL, multimodal_model
from support.quantized_models import quantized_model
from support.tiny_models import tiny_model
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sgl_pipeline.args import (
    HOST_BACKEND,
    POLICIES,
    GrammarArgs,
    MigrationArgs,
    SchedulingArgs,
    StageArgs,
    ThrottleArgs,
    TierArgs,
)
from sgl_pipeline.args.store_config import StoreConfig
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.command_line import pipeline_args, server_args
from sgl_pipeline.managers.command_line.model_choice import ChosenModel
from sgl_pipeline.managers.command_line.pipeline_args import _device
from sgl_pipeline.managers.command_line.server_args import (
    _parse,
    check_port_is_free,
    parse_command_line,
)
from sgl_pipeline.managers.upstream.upstream_checks import refuse_unsupported
from sgl_pipeline.managers.upstream.upstream_fields import refusal
from sgl_pipeline.pp_runner.model.generic.probe import probe
from sgl_pipeline.pp_runner.model.model_spec import read_model_spec
from sgl_pipeline.pp_runner.model.rope_spec import YarnScaling
from sgl_pipeline.pp_runner.stage_spec import stage_spec
from sgl_pipeline.simulator.tune import server_flags
from sgl_pipeline.throttle import POLICY_TABLE

YARN_OVERRIDE = '{"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}'
YARN_OVERRIDE_OF_TEXT = f'{{"text_config": {YARN_OVERRIDE}}}'
LINEAR_OVERRIDE = '{"rope_scaling": {"rope_type": "linear", "factor": 2.0}}'


@pytest.fixture(scope="module", autouse=True)
def one_parser() -> Iterator[None]:
    """To read a command line changes no parser, and to make one takes long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_args, "make_parser", cache(server_args.make_parser))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_front_model(tmp_path_factory.mktemp("model")))


def options_from(*flags: str) -> argparse.Namespace:
    return _parse(["--model-path", "unused", *flags])


def other_than(value: Any) -> Any:
    """A value that differs from a field's default, of whatever type."""
    return not value if isinstance(value, bool) else f"not {value!r}"


REFUSED = [
    field.name
    for field in msgspec.structs.fields(ServerArgs)
    if refusal(field.name, ServerArgs._NS_BY_FIELD[field.name]) is not None
]


def test_the_defaults_of_every_upstream_flag_are_accepted() -> None:
    refuse_unsupported(options_from())


def test_a_refused_field_stops_the_start_and_is_named() -> None:
    defaults = {field.name: field.default for field in msgspec.structs.fields(ServerArgs)}
    assert len(REFUSED) > 400
    for name in REFUSED:
        options = argparse.Namespace(**{name: other_than(defaults[name])})
        with pytest.raises(ConfigurationError, match="--" + name.replace("_", "-")):
            refuse_unsupported(options)


def test_our_defaults_are_those_of_the_argument_sections(model: str) -> None:
    pipeline = parse_command_line(["--model-path", model, "--device", "cpu"]).pipeline
    assert pipeline.throttle == ThrottleArgs()
    assert pipeline.scheduling == SchedulingArgs()
    assert pipeline.migration == MigrationArgs()
    assert pipeline.stages == StageArgs(model_path=model, dtype="float32")


@pytest.mark.parametrize("flag", ["--pp", "--pp-size", "--pipeline-parallel-size"])
def test_the_three_pipeline_flags_mean_stages_and_upstream_runs_at_one(
    model: str, flag: str
) -> None:
    plan = parse_command_line(["--model-path", model, flag, "3"])
    assert plan.pipeline.stages.num_stages == 3
    assert (plan.upstream.pp_size, plan.upstream.tp_size) == (1, 1)


def test_flags_reach_every_section(model: str) -> None:
    """Which field a flag sets is in `test/args/test_flags.py`."""
    flags = """--pp 2 --pp-layer-partition 3,1 --dtype bfloat16 --max-total-tokens 999 --device cpu
        --policy sarathi --chunked-prefill-size 100 --min-prefill-tokens 7
        --page-size 16 --max-queued-requests 0 --disable-radix-cache --accounting gllm
        --migration manual --migration-spare-layers 3 --migration-timeout-s 2.5
        --grammar-backend none --grammar-compile-seconds 3
        --constrained-json-disable-any-whitespace --trace-path trace.jsonl"""
    pipeline = parse_command_line(["--model-path", model, *flags.split()]).pipeline
    assert pipeline.throttle == ThrottleArgs(
        policy="sarathi", max_prefill_tokens=100, min_prefill_tokens=7
    )
    assert pipeline.scheduling == SchedulingArgs(
        page_size=16, max_queued_requests=0, radix_cache=False, accounting="gllm"
    )
    assert pipeline.stages == StageArgs(
        model_path=model,
        num_stages=2,
        layer_partition="3,1",
        dtype="bfloat16",
        max_total_tokens=999,
    )
    assert pipeline.migration == MigrationArgs(mode="manual", spare_layers=3, timeout_s=2.5)
    assert pipeline.grammars == GrammarArgs(
        enabled=False, any_whitespace=False, compile_seconds=3.0
    )
    assert pipeline.trace_path == "trace.jsonl"


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "int8"])
def test_coded_keys_and_values_are_ours_alone(
    kv_cache_dtype: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--model-path", model, "--kv-cache-dtype", kv_cache_dtype]
    plan = parse_command_line([*flags, "--device", "cpu"])
    assert plan.pipeline.stages.kv_cache_dtype == kv_cache_dtype
    assert plan.pipeline.stages.precision.endswith(f"-kv_{kv_cache_dtype}")
    assert plan.upstream.kv_cache_dtype == "auto"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if kv_cache_dtype == "int8":
        with pytest.raises(ConfigurationError, match=r"int8.*CPU.*fp8_e4m3"):
            parse_command_line(flags)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e5m2", "bf16", "mxfp8", "nvfp4"])
def test_other_dtypes_of_the_kv_cache_are_refused_by_name(kv_cache_dtype: str, model: str) -> None:
    flags = ["--model-path", model, "--device", "cpu", "--kv-cache-dtype", kv_cache_dtype]
    with pytest.raises(ConfigurationError, match=rf"{kv_cache_dtype} .*auto"):
        parse_command_line(flags)


def test_quantized_weights_are_ours_alone(model: str) -> None:
    flags = ["--model-path", model, "--quantization", "w8a8_int8"]
    plan = parse_command_line([*flags, "--device", "cpu"])
    assert plan.pipeline.stages.quantization == "w8a8_int8"
    assert plan.pipeline.stages.precision.endswith("-w8a8_int8")
    assert plan.upstream.quantization is None
    published = str(quantized_model("awq").path)
    plan = parse_command_line(["--model-path", published, "--device", "cpu"])
    assert plan.pipeline.stages.quantization == "awq"
    plan = parse_command_line([*flags[:1], published, "--quantization", "w4a8_int8"])
    assert plan.pipeline.stages.quantization == "w4a8_int8"
    assert plan.pipeline.stages.precision.endswith("-w4a8_int8")
    assert plan.upstream.quantization is None
    with pytest.raises(ConfigurationError, match="awq"):
        parse_command_line(["--model-path", published, "--quantization", "w8a8_int8"])


@pytest.mark.parametrize("policy", POLICIES)
def test_the_flags_that_the_budget_search_ends_with_mean_its_parameters(
    model: str, policy: str
) -> None:
    last_values = {name: values[-1] for name, values in POLICY_TABLE[policy].searched.items()}
    found = ThrottleArgs(policy=policy, **last_values)
    flags = ["--model-path", model, "--device", "cpu", *server_flags(found)]
    assert parse_command_line(flags).pipeline.throttle == found


def test_prefill_kernels_are_for_flashinfer_on_a_gpu(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    flags = ["--model-path", model, "--device", "cuda", "--stage-prefill-kernels", "fa2"]
    assert parse_command_line(flags).pipeline.stages.prefill_kernels == "fa2"
    with pytest.raises(ConfigurationError, match=r"fa2.*torch"):
        parse_command_line([*flags, "--stage-attention-backend", "torch"])
    with pytest.raises(ConfigurationError, match=r"'fa4'.*auto, fa2, fa3"):
        StageArgs(model_path=model, dtype="bfloat16", device="cuda", prefill_kernels="fa4")


@pytest.mark.parametrize("flags", [[], ["--grammar-backend", "xgrammar"]])
def test_grammars_are_on_unless_told_otherwise(model: str, flags: list[str]) -> None:
    pipeline = parse_command_line(["--model-path", model, *flags]).pipeline
    assert pipeline.grammars == GrammarArgs()


def test_priority_scheduling_preempts_unless_told_not_to(model: str) -> None:
    def threshold(*flags: str) -> int | None:
        plan = parse_command_line(["--model-path", model, *flags])
        return plan.pipeline.scheduling.preemption_threshold

    enable = "--enable-priority-scheduling"
    assert threshold() is None
    assert threshold(enable) == 10  # upstream's default
    assert threshold(enable, "--priority-scheduling-preemption-threshold", "3") == 3
    assert threshold(enable, "--disable-priority-preemption") is None


@pytest.mark.parametrize(
    ("flags", "draft_tokens"),
    [
        ("", 0),
        ("--speculative-algorithm NGRAM", 11),
        ("--speculative-algorithm NGRAM --speculative-num-draft-tokens 4", 3),
    ],
)
def test_draft_tokens_are_those_behind_the_one_that_is_known(
    model: str, flags: str, draft_tokens: int
) -> None:
    plan = parse_command_line(["--model-path", model, *flags.split()])
    assert plan.pipeline.scheduling.draft_tokens == draft_tokens
    assert plan.upstream.speculative_algorithm is None


@pytest.mark.parametrize(("text", "seconds"), [("2.5", 2.5), ("-1", None), ("0", None)])
def test_upstreams_timeout_variables_set_seconds(
    model: str, monkeypatch: pytest.MonkeyPatch, text: str, seconds: float | None
) -> None:
    monkeypatch.setenv("SGLANG_REQ_WAITING_TIMEOUT", text)
    scheduling = parse_command_line(["--model-path", model]).pipeline.scheduling
    assert (scheduling.waiting_timeout_s, scheduling.running_timeout_s) == (seconds, None)


def test_a_timeout_that_is_no_number_is_refused(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", "5m")
    with pytest.raises(ConfigurationError, match="SGLANG_REQ_RUNNING_TIMEOUT=5m"):
        parse_command_line(["--model-path", model])


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--otlp-traces-endpoint", "localhost:4318"),
        ("--otlp-service-name", "mine"),
        ("--trace-modules", "mooncake"),
    ],
)
def test_where_spans_go_is_refused_without_the_tracing(model: str, flag: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{flag}.*--enable-trace"):
        parse_command_line(["--model-path", model, "--pp", "2", flag, value])


def test_what_tracing_lacks_is_named(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["--model-path", model, "--pp", "2", "--enable-trace"]
    monkeypatch.setattr(trace, "opentelemetry_imported", False)
    with pytest.raises(ConfigurationError, match="OpenTelemetry: pip install"):
        parse_command_line(asked)
    monkeypatch.setattr(trace, "opentelemetry_imported", True)
    assert parse_command_line(asked).upstream.enable_trace
    monkeypatch.setenv("SGLANG_TRACE_ASYNC", "1")
    with pytest.raises(ConfigurationError, match="SGLANG_TRACE_ASYNC"):
        parse_command_line(asked)


def test_a_config_file_that_would_not_be_read_is_refused(model: str) -> None:
    with pytest.raises(ConfigurationError, match="--config FILE"):
        parse_command_line(["--model-path", model, "--config=settings.yaml"])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--pp 0", "--pp 0"),
        ("--nnodes 2", "--nnodes 2"),
        ("--tp 2", "--tp-size 2"),
        ("--dp-size 2", "--dp-size 2"),
        ("--model-impl mindspore", "mindspore. is unknown; choose from auto, sglang, transformers"),
        ("--attention-backend dsa", "--attention-backend dsa .* models with another attention"),
        ("--decode-attention-backend flashmla", "--decode-attention-backend flashmla"),
        ("--moe-dense-tp-size 2", "--moe-dense-tp-size 2"),
        ("--pp-max-micro-batch-size 0", "--pp-max-micro-batch-size 0"),
        ("--pp-async-batch-depth 9", "--pp-async-batch-depth. must be between 0 and 8"),
        ("--mem-fraction-static 1.5", "--mem-fraction-static 1.5"),
        ("--stage-prefill-kernels fa2 --device cpu", "needs --device cuda, this is cpu"),
        ("--page-size 0", "--page-size 0"),
        ("--min-prefill-tokens 0", "between 1 and"),
        ("--chunked-prefill-size -1", "--chunked-prefill-size -1"),
        ("--load-format npcache", "--load-format npcache"),
        ("--load-format gguf", "must hold one GGUF file, and holds none"),
        ("--context-length 1", "--context-length 1 must be at least 2"),
        ('--json-model-override-args {"num_hidden_layers":2}', "num_hidden_layers cannot be"),
        ("--stream-interval 0", "--stream-interval 0"),
        ("--cpu-threads-per-stage 0", "--cpu-threads-per-stage 0"),
        ("--device tpu", "--device tpu"),
        ("--grammar-backend llguidance", "choose xgrammar or none"),
        ("--constrained-json-whitespace-pattern x", "xgrammar has no such pattern"),
        ("--constrained-json-max-whitespace-cnt 0", "--constrained-json-max-whitespace-cnt 0"),
        ("--grammar-compile-seconds 0", "--grammar-compile-seconds 0"),
        ("--grammar-compile-memory-mib 1", "--grammar-compile-memory-mib 1"),
        ("--grammar-match-ms-per-token 0", "--grammar-match-ms-per-token 0"),
        ("--served-model-name a:b", "SGLang refuses"),
        ("--migration manual", "--migration manual needs stages .* --pp 2 or more"),
        ("--migration-spare-layers 0 --pp 2", "--migration-spare-layers 0 must be at least 1"),
        ("--recovery-log-mib -1", "--recovery-log-mib -1 must be between"),
        ("--recovery-log-mib 8 --stage-recovery off", "--stage-recovery is off"),
        ("--enable-hicache", "on a CPU the pool is in host memory already"),
        ("--hicache-storage-backend file", "does nothing without --enable-hierarchical-cache"),
        ("--hicache-write-policy write_back", "does nothing without --enable-hierarchical-cache"),
        ("--enable-hicache --hicache-storage-backend hf3fs", "hf3fs is not built"),
        ("--enable-lmcache", "--enable-lmcache True cannot be honored: .*storage-backend file"),
        ("--enable-flexkv", "--enable-flexkv True cannot be honored: .*storage-backend file"),
        ("--enable-unified-cache-external-linker", "external-linker True cannot be honored"),
        ("--radix-eviction-policy lfu", "--radix-eviction-policy lfu .* least recently used"),
        ("--migration-window 0 --pp 2", "--migration-window 0 must be at least 1"),
        ("--migration-timeout-s nan --pp 2", "--migration-timeout-s nan"),
        ("--speculative-algorithm EAGLE", "--speculative-algorithm EAGLE is not built"),
        ("--speculative-num-draft-tokens 4", "nothing without --speculative-algorithm NGRAM"),
        (
            "--speculative-algorithm NGRAM --speculative-num-draft-tokens 1",
            "--speculative-num-draft-tokens 1 must be between 2 and 64",
        ),
        (
            "--speculative-algorithm NGRAM --speculative-ngram-capacity 9",
            "--speculative-ngram-capacity 9 cannot be honored: .* one chain of tokens",
        ),
        (
            "--enable-priority-scheduling --priority-scheduling-preemption-threshold -1",
            "--priority-scheduling-preemption-threshold -1",
        ),
    ],
)
def test_a_value_that_cannot_be_honored_is_a_clear_error(
    model: str, flags: str, named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        parse_command_line(["--model-path", model, *flags.split()])


STORE_FLAGS = """--enable-hicache --hicache-storage-backend file --hicache-write-policy write_back
    --hicache-storage-prefetch-policy best_effort
    --hicache-storage-backend-extra-config {"file_storage_path":"/x"}"""


def test_the_flags_of_a_store_reach_its_section_and_the_front(model: str) -> None:
    plan = parse_command_line(["--model-path", model, *STORE_FLAGS.split()])
    assert plan.pipeline.tiers == TierArgs(
        enabled=True,
        backend="file",
        store=StoreConfig(file_storage_path="/x"),
        write_policy="write_back",
        prefetch_policy="best_effort",
    )
    assert not plan.upstream.enable_hierarchical_cache  # type: ignore[attr-defined]
    # `GET /hicache/storage-backend` shows these.
    assert plan.upstream.hicache_storage_backend == "file"  # type: ignore[attr-defined]
    assert plan.upstream.hicache_write_policy == "write_back"  # type: ignore[attr-defined]


def test_a_store_that_may_come_later_is_a_notice(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    flags = ["--enable-hierarchical-cache", "--admin-api-key", "secret"]
    tiers = parse_command_line(["--model-path", model, *flags]).pipeline.tiers
    assert tiers == TierArgs(enabled=True, is_attachable=True)
    assert "PUT /hicache/storage-backend" in caplog.text


def test_a_gpu_has_host_memory_as_its_tier_unless_another_one_is_given(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    flags = ["--model-path", model, "--device", "cuda", "--enable-hierarchical-cache"]

    def tiers_of(*others: str) -> TierArgs:
        return parse_command_line([*flags, *others]).pipeline.tiers

    assert tiers_of() == TierArgs(enabled=True, backend=HOST_BACKEND, pool_is_on_gpu=True)
    sized = tiers_of("--hicache-size", "30", "--hicache-ratio", "3")
    assert (sized.host_size_gb, sized.host_ratio) == (30, 3.0)
    assert "--hicache-ratio" not in caplog.text
    files = tiers_of("--hicache-storage-backend", "file", "--hicache-ratio", "3")
    assert files.backend == "file"
    assert "--hicache-ratio and --hicache-size have no effect" in caplog.text


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver for CUDA 12.4, on a machine where PyTorch finds no GPU."""
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho '| NVIDIA-SMI 550.54    CUDA Version: 12.4   |'\n")
    command.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("built_for", "reason"), [(None, "is built for CPUs"), ("13.0", "built for CUDA 13.0, cannot")]
)
@pytest.mark.usefixtures("driver")
def test_a_driver_that_pytorch_cannot_use_is_named(
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    built_for: str | None,
    reason: str,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built_for)
    plan = parse_command_line(["--model-path", model])
    assert plan.pipeline.stages.device == "cpu"
    (notice,) = (line for line in caplog.messages if "--device auto" in line)
    assert "NVIDIA driver for CUDA 12.4" in notice and reason in notice
    with pytest.raises(ConfigurationError, match=rf"--device cuda: .*CUDA 12.4.*{reason}"):
        parse_command_line(["--model-path", model, "--device", "cuda"])


@pytest.mark.usefixtures("driver")
def test_a_gpu_that_works_is_taken_without_a_notice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert _device(options_from("--device", "auto")) == "cuda"
    assert not caplog.messages


@pytest.mark.usefixtures("driver")
def test_who_asks_for_the_cpu_hears_nothing_of_the_driver(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    parse_command_line(["--model-path", model, "--device", "cpu"])
    assert not [line for line in caplog.messages if "driver" in line]


def test_a_served_name_falls_back_to_what_the_user_typed(model: str) -> None:
    assert parse_command_line(["--model-path", model]).upstream.served_model_name == model
    named = ["--model-path", model, "--served-model-name", "mine"]
    assert parse_command_line(named).upstream.served_model_name == "mine"


def test_a_config_file_sets_our_flags_too(model: str, tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(f"model-path: {model}\npp: 2\npolicy: greedy-queue\n", encoding="utf-8")
    pipeline = parse_command_line(["--config", str(path)]).pipeline
    assert (pipeline.stages.num_stages, pipeline.throttle.policy) == (2, "greedy-queue")


@pytest.mark.parametrize("name", ["chatglm", "glm4", "mixtral-sharded", "qwen2-moe", "qwen3-moe"])
def test_upstreams_front_reads_the_config_of_every_family(name: str) -> None:
    path = str(tiny_model(name))
    plan = parse_command_line(["--model-path", path, "--device", "cpu", "--pp", "4"])
    config = ModelConfig.from_server_args(plan.upstream)
    spec = read_model_spec(path)
    assert (config.context_len, config.vocab_size) == (spec.context_length, spec.vocab_size)
    assert config.hf_eos_token_id == spec.eos_token_ids


@pytest.mark.parametrize(
    ("name", "flags", "context_length", "context_of_stages"),
    [
        ("qwen2-yarn", [], 128, None),
        ("qwen2-yarn", ["--context-length", "100"], 100, 100),
        ("qwen3", ["--json-model-override-args", YARN_OVERRIDE], 4096, None),
        ("qwen3.5-multimodal", ["--json-model-override-args", YARN_OVERRIDE], 4096, None),
        ("qwen3.5-multimodal", ["--json-model-override-args", YARN_OVERRIDE_OF_TEXT], 4096, None),
        ("qwen3.5-multimodal", ["--json-model-override-args", LINEAR_OVERRIDE], 4096, None),
        ("llama-biases-linear-rope", [], 8192, None),
        ("llama-dynamic", [], 64, None),
        ("llama-dynamic", ["--context-length", "256"], 256, 256),
        ("llama-longrope", [], 64, None),
        ("llama-longrope", ["--context-length", "200"], 200, 200),
    ],
)
def test_a_stretched_context_is_one_for_front_scheduler_and_stages(
    name: str, flags: list[str], context_length: int, context_of_stages: int | None
) -> None:
    plan = parse_command_line(["--model-path", str(tiny_model(name)), "--device", "cpu", *flags])
    assert plan.context_length == plan.upstream.context_length == context_length
    assert ModelConfig.from_server_args(plan.upstream).context_len == context_length
    assert plan.pipeline.stages.context_length == context_of_stages
    assert stage_spec(plan.pipeline.stages).context_length == context_length


def test_overrides_of_rope_fields_reach_every_stage() -> None:
    path = str(tiny_model("qwen3"))
    flags = ["--json-model-override-args", YARN_OVERRIDE]
    stages = parse_command_line(["--model-path", path, "--device", "cpu", *flags]).pipeline.stages
    assert stage_spec(stages).rope.scaling == YarnScaling(2.0, 2048, 32.0, 1.0, True)
    assert read_model_spec(path).rope.scaling is None


@pytest.mark.parametrize("name", ["qwen3", "qwen2-yarn", "llama-dynamic", "llama-longrope"])
def test_more_context_than_the_rotary_embedding_is_made_for_is_refused(name: str) -> None:
    path, longest = str(tiny_model(name)), read_model_spec(tiny_model(name)).own_context_lengths[1]
    with pytest.raises(ConfigurationError, match=f"context_length.*{longest + 1}.*{longest}"):
        parse_command_line(["--model-path", path, "--context-length", str(longest + 1)])


@pytest.mark.parametrize("name", ["llama-longrope", "llama-dynamic"])
def test_an_embedding_that_depends_on_the_context_is_said_at_the_start(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    line = ["--model-path", str(tiny_model(name)), "--device", "cpu"]
    parse_command_line(line)
    (notice,) = (message for message in caplog.messages if "--context-length" in message)
    assert "serves 64 tokens" in notice and "up to 256" in notice
    caplog.clear()
    parse_command_line([*line, "--context-length", "64"])
    assert not [message for message in caplog.messages if "--context-length" in message]
    parse_command_line([*line, "--context-length", "65"])
    (notice,) = (message for message in caplog.messages if "--context-length" in message)
    assert "short ones too" in notice


def probe_here(path: str, quantization: str | None, *_: object) -> ChosenModel:
    """As the child of `choose_model`, in this process: a child takes seconds."""
    spec = probe(path, quantization)
    return ChosenModel(spec, spec.to_json())


def read_by_the_front(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    """The config of a generic model as SGLang's front has it."""
    monkeypatch.setattr(pipeline_args, "choose_model", probe_here)
    flags = ["--model-path", str(path), "--device", "cpu", "--pp", "2"]
    plan = parse_command_line(flags)
    assert plan.pipeline.stages.is_generic
    config = ModelConfig.from_server_args(plan.upstream)
    spec = stage_spec(plan.pipeline.stages)
    assert (config.context_len, config.vocab_size) == (spec.context_length, spec.vocab_size)
    assert plan.context_length == spec.context_length
    assert config.hf_eos_token_id == spec.eos_token_ids
    return config


# SGLang reads heads from the whole config, which transformers 5 refuses where layers differ.
_TEXT_ALONE_FAILS = {"gemma4"}


@pytest.mark.parametrize("name", sorted({*GENERIC_FAMILIES} - _TEXT_ALONE_FAILS))
def test_upstreams_front_takes_the_families_that_transformers_computes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_by_the_front(generic_model(name), monkeypatch)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_upstreams_front_takes_the_text_of_multimodal_models(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_by_the_front(multimodal_model(name), monkeypatch)
    assert not config.is_multimodal
    assert not config.is_image_understandable_model


@pytest.mark.parametrize("name", sorted(_TEXT_ALONE_FAILS))
def test_a_config_that_the_front_cannot_read_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match="SGLang's front cannot read the config of"):
        read_by_the_front(generic_model(name), monkeypatch)


@pytest.mark.parametrize("model_type", ["exaone4", "mimo_v2_flash"])
def test_checks_of_upstreams_own_attention_are_none_of_ours(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With upstream's defaults for a CPU their configs are refused, or not understood."""
    config = AutoConfig.for_model(model_type)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    config.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    ours = ChosenModel(read_model_spec(tiny_model("qwen3")), "")
    monkeypatch.setattr(pipeline_args, "choose_model", lambda *_: ours)
    plan = parse_command_line(["--model-path", str(tmp_path), "--device", "cpu"])
    assert ModelConfig.from_server_args(plan.upstream).is_generation


def test_a_taken_port_is_named_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"--port {port}"):
            check_port_is_free("127.0.0.1", port)
    check_port_is_free("127.0.0.1", port)


def test_a_port_or_host_that_cannot_exist_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="65535"):
        check_port_is_free("127.0.0.1", 70000)
    with pytest.raises(ConfigurationError, match="--host"):
        check_port_is_free("no host of this name", 30000)


def test_tenants_with_one_key_in_all_are_refused(model: str) -> None:
    flags = ["--model-path", model, "--fair-shares-by", "api-key"]
    args = parse_command_line([*flags, "--tenant-weights", '{"key-0123456789ab": 2}'])
    assert args.pipeline.scheduling.weights_of_tenants == {"key-0123456789ab": 2.0}
    with pytest.raises(ConfigurationError, match="--api-key lets only one pass"):
        parse_command_line([*flags, "--api-key", "secret"])
