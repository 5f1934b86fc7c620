"""FP8 in the simulator, of weights and of keys and values: bytes by hand, times by the tables."""

import csv
import gzip

import pytest

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.simulator.__main__ import main
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.kernel_costs import DATA, DEVICES, part_seconds
from sgl_pipeline.simulator.models import MODELS, model_shape
from sgl_pipeline.simulator.step_shape import StepShape

QWEN = "Qwen3-32B"
# Of a layer: (64 + 16 + 64) heads of 128 and three matrices of 25600, all by 5120.
LAYER_NUMBERS = 5120 * ((64 + 2 * 8) * 128 + 64 * 128 + 3 * 25600)
END_BYTES = 151936 * 5120 * 2


def table_ms(table: str, num_tokens: int) -> float:
    with gzip.open(DATA / f"h100_sxm_{table}.csv.gz", "rt") as file:
        return next(
            float(row["linear_ms"])
            for row in csv.DictReader(file)
            if (row["model"], int(row["num_tokens"])) == (QWEN, num_tokens)
        )


def test_a_layer_has_a_byte_for_each_number_and_embedding_and_head_have_two() -> None:
    plain, fp8 = MODELS[QWEN], model_shape(QWEN, "fp8")
    assert (plain.layer_weight_bytes, fp8.layer_weight_bytes) == (2 * LAYER_NUMBERS, LAYER_NUMBERS)
    assert fp8.weight_bytes(10, 1) == 10 * LAYER_NUMBERS + END_BYTES
    assert fp8.kv_bytes_per_layer_token == plain.kv_bytes_per_layer_token == 2 * 8 * 128 * 2


def test_what_the_weights_leave_is_for_pages() -> None:
    """Of 90 % of 80 GB, 32 layers and one of the model's ends on each of two cards."""
    cluster = Cluster(model=QWEN, device="h100", quantization="fp8", num_stages=2)
    room = 0.9 * 80e9 - 32 * LAYER_NUMBERS - END_BYTES
    assert cluster.kv_pool_tokens() == int(room / (32 * 4096))
    plain = Cluster(model=QWEN, device="h100", num_stages=2)
    more = (cluster.kv_pool_tokens() - plain.kv_pool_tokens()) * 32 * 4096
    assert more == pytest.approx(32 * LAYER_NUMBERS, abs=2 * 32 * 4096)


@pytest.mark.parametrize("num_tokens", [64, 2048])
def test_products_take_what_the_table_of_fp8_says_and_nothing_else_changes(
    num_tokens: int,
) -> None:
    step = StepShape(((num_tokens, 0),), (), 0)
    plain, fp8 = (
        part_seconds(DEVICES["h100"], model_shape(QWEN, kind)) for kind in ("none", "fp8")
    )
    ms = (table_ms("layer_gemm_ms", num_tokens), table_ms("layer_gemm_fp8_ms", num_tokens))
    assert plain.layer_s(step) - fp8.layer_s(step) == pytest.approx((ms[0] - ms[1]) * 1e-3)
    assert 0.45 < ms[1] / ms[0] < 0.75
    sampling = StepShape(((num_tokens, 0),), (), 1)
    assert plain.tail_s(sampling) == fp8.tail_s(sampling) > 0


def test_keys_and_values_have_a_byte_for_each_number() -> None:
    """Of 90 % of 80 GB, 32 layers and one of the model's ends on each of two cards."""
    plain = Cluster(model=QWEN, device="h100", num_stages=2)
    fp8 = Cluster(model=QWEN, device="h100", num_stages=2, kv_cache_dtype="fp8_e4m3")
    room = 0.9 * 80e9 - 32 * 2 * LAYER_NUMBERS - END_BYTES
    assert fp8.kv_pool_tokens() == int(room / (32 * 2 * 8 * 128))
    assert fp8.kv_pool_tokens() // plain.kv_pool_tokens() == 2
    assert fp8.shape.weight_bytes(10, 1) == plain.shape.weight_bytes(10, 1)


@pytest.mark.parametrize(("num_decodes", "context"), [(1, 128), (64, 2048), (128, 4096)])
def test_decodes_take_what_the_table_of_fp8_says_and_prompts_as_long_as_before(
    num_decodes: int, context: int
) -> None:
    def decode_ms(table: str) -> float:
        with gzip.open(DATA / f"h100_sxm_{table}.csv.gz", "rt") as file:
            return next(
                float(row["latency_ms"])
                for row in csv.DictReader(file)
                if (row["q_heads"], row["kv_heads"]) == ("32", "8")
                and (int(row["batch_size"]), int(row["kv_tokens_each"])) == (num_decodes, context)
            )

    plain, fp8 = (
        part_seconds(DEVICES["h100"], model_shape(QWEN, "none", kind))
        for kind in ("auto", "fp8_e4m3")
    )
    step = StepShape((), (context,) * num_decodes, num_decodes)
    saved_ms = decode_ms("attn_generation_ms") - decode_ms("attn_generation_fp8_ms")
    assert plain.layer_s(step) - fp8.layer_s(step) == pytest.approx(saved_ms * 1e-3)
    assert (saved_ms > 0) is (num_decodes > 1)
    prompt = StepShape(((512, 0),), (), 1)
    assert plain.layer_s(prompt) == fp8.layer_s(prompt)
    assert plain.tail_s(prompt) == fp8.tail_s(prompt)


def test_the_split_by_time_sees_cheaper_layers() -> None:
    """The head costs as many layers as before, and each of them is worth more."""
    counts = [
        Cluster(model=QWEN, device="h200", quantization=kind, split="auto").layers
        for kind in ("none", "fp8")
    ]
    assert counts[1][-1] < counts[0][-1]


@pytest.mark.parametrize("device", ["a100-80g", "a100-40g-pcie", "rtxpro6000"])
def test_cards_without_times_of_fp8_are_refused_by_name(
    device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigurationError, match=rf"FP8 .* on {device}.*l40s"):
        Cluster(model=QWEN, device=device, quantization="fp8").costs()
    flags = ["run", "--model", QWEN, "--device", device, "--quantization", "fp8"]
    assert main([*flags, "--requests", "3"]) == 2
    assert "no times of FP8 products" in capsys.readouterr().err


def test_cards_without_times_of_fp8_pages_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="FP8 keys and values on a100-80g"):
        Cluster(model=QWEN, device="a100-80g", kv_cache_dtype="fp8_e4m3").costs()
    with pytest.raises(ConfigurationError, match="FP8 products or keys and values"):
        both = Cluster(model=QWEN, device="a100-80g", quantization="fp8", kv_cache_dtype="fp8_e4m3")
        both.costs()


def test_the_command_line_has_pages_in_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["run", "--model", QWEN, "--device", "h100", "--kv-cache-dtype", "fp8_e4m3"]
    assert main([*flags, "--requests", "20", "--policy", "throttle"]) == 0
    assert f"{QWEN} with KV in fp8_e4m3 on 4 x h100" in capsys.readouterr().out


def test_the_command_line_serves_in_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["run", "--model", QWEN, "--device", "h100", "--quantization", "fp8"]
    assert main([*flags, "--requests", "20", "--policy", "throttle"]) == 0
    assert f"{QWEN} in fp8 on 4 x h100" in capsys.readouterr().out
