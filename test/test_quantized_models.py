"""Models of 8 and 4 bits: the right tokens, the same ones at every depth, split and policy.

4-bit models are held to transformers on the weights that they stand for. Formats that round rows
are not, as a rounding may go either way; their products are held to the definition one by one in
test_quantized_linear.py.
"""

import shutil
from functools import cache
from itertools import cycle

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.greedy_oracle import count_ties
from support.local_pipeline import LocalPipeline
from support.quantized_models import (
    FORMATS,
    INT4,
    INT8_ROWS,
    INT8_WEIGHTS,
    compressed,
    quantized_model,
    write_config,
)
from support.tiny_models import tiny_model
from test_token_identity import CHUNKED, make_requests

from sgl_pipeline.args import POLICIES, ThrottleArgs
from sgl_pipeline.records.move_record import MoveOutcome

pytestmark = pytest.mark.slow

SPLITS = [(6,), (2, 1, 3)]
ROUNDING_ROWS = [name for name, own in FORMATS.items() if own.rounds_rows]
OTHERS = [name for name in FORMATS if name not in ROUNDING_ROWS]
COMPILED = {"dtype": "bfloat16", "attention_backend": "cpu", "layer_kernels": "cpu"}
INT8_ROWS_OF = "w4a8_int8 of "
FOUR_BITS_ROUNDING_ROWS = {  # the format and the model
    INT8_ROWS_OF + "pack-quantized": ("pack-quantized", "qwen3"),
    INT8_ROWS_OF + "gptq v2, ordered": ("gptq v2, ordered", "qwen3"),
    INT8_ROWS_OF + "tied": ("gptq", "qwen2-tied"),
    INT8_ROWS_OF + "experts": ("pack-quantized", "qwen3-moe"),
}
SERVED = [
    *FORMATS,
    *FOUR_BITS_ROUNDING_ROWS,
    "w8a8_int8",
    "w8a8_int8 experts",
    "w8a8_int8 tied",
    "w8a8_int8 one qkv",
]
ONLINE = {"experts": "qwen2-moe", "tied": "qwen2-tied", "one qkv": "chatglm", "": "qwen3"}


def pipeline(served: str, layer_counts: tuple[int, ...], **arguments) -> LocalPipeline:
    quantization, path = None, None
    if served in FORMATS:
        path = quantized_model(served).path
    elif served in FOUR_BITS_ROUNDING_ROWS:
        quantization = "w4a8_int8"
        path = quantized_model(*FOUR_BITS_ROUNDING_ROWS[served]).path
    else:
        quantization, _, kind = served.partition(" ")
        path = tiny_model(ONLINE[kind])
    throttle = arguments.pop("throttle", ThrottleArgs(**CHUNKED))
    return LocalPipeline(
        path, layer_counts, throttle=throttle, quantization=quantization, **arguments
    )


@pytest.mark.parametrize("format_name", OTHERS)
def test_four_bits_give_the_tokens_of_the_weights_that_they_stand_for(format_name):
    requests = make_requests(4)
    pipeline(format_name, (2, 4)).run(requests)
    path = quantized_model(format_name).dequantized
    for request in requests:
        count_ties(path, request.prompt_ids, request.output_ids, request.sampling)


@pytest.mark.compiler
@pytest.mark.parametrize("served", SERVED)
def test_tokens_are_the_same_at_every_depth_and_split(served):
    answers = []
    for layer_counts in SPLITS:
        requests = make_requests(4)
        answers.append(pipeline(served, layer_counts, **COMPILED).run(requests))
    assert all(answer == answers[0] for answer in answers)
    assert len({token for output in answers[0] for token in output}) > 9, "hardly any tokens"


@pytest.mark.compiler
# A policy decides which rows share a step, and a format how a row is computed: each in turn.
@pytest.mark.parametrize(
    ("policy", "served"),
    [*zip(POLICIES, cycle(["w8a8_int8", "pack-quantized", INT8_ROWS_OF + "pack-quantized"]))],
)
def test_tokens_are_the_same_under_every_policy(policy, served):
    throttle = ThrottleArgs(policy=policy, **CHUNKED)
    answers = pipeline(served, (2, 4), throttle=throttle, **COMPILED).run(make_requests(4))
    assert answers == alone(served)


@cache
def alone(served: str) -> list[list[int]]:
    """The answers to the same requests, one after the other."""
    by_itself = pipeline(served, (6,), **COMPILED)
    return [by_itself.run([request])[0] for request in make_requests(4)]


@pytest.mark.compiler
@pytest.mark.parametrize(
    "served", ["w8a8_int8", "gptq v2, ordered", INT8_ROWS_OF + "gptq v2, ordered"]
)
def test_tokens_are_the_same_though_layers_move(served):
    still = pipeline(served, (3, 3), **COMPILED).run(make_requests(6))
    moving = pipeline(served, (3, 3), **COMPILED)
    requests, migration = make_requests(6), moving.core.migration
    for request in requests:
        moving.scheduler.add(request)
    while not moving.scheduler.is_idle:
        while moving.schedule():
            if migration.coordinator.current is None:
                migration.move_to([(4, 2), (1, 5)][len(migration.history) % 2], 0.0)
        moving.complete()
    assert [request.output_ids for request in requests] == still
    assert any(move.outcome is MoveOutcome.DONE for move in migration.history)


@cache
def plain_weight_bytes() -> int:
    return LocalPipeline(tiny_model("qwen3"), (6,)).runners[0].held_layers.model.weight_bytes


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_stage_reads_its_own_layers_only(format_name, tmp_path):
    """Each may lack what it does not need, and what is quantized takes fewer bytes."""
    whole = pipeline(format_name, (6,)).runners[0].held_layers.model
    first, second = (runner.held_layers.model for runner in pipeline(format_name, (2, 4)).runners)
    layers = [{name for name in model.loaded if ".layers." in name} for model in (first, second)]
    assert not layers[0] & layers[1]
    assert {name for name in whole.loaded if ".layers." in name} == layers[0] | layers[1]
    assert whole.weight_bytes < 0.8 * plain_weight_bytes()


def test_a_tied_head_is_rounded_though_the_config_does_not_leave_it_out(tmp_path):
    """The two configs mean the same model, as its head is the embedding table."""
    leaves_it_out = quantized_model("pack-quantized", "qwen2-tied").path
    shutil.copytree(leaves_it_out, tmp_path / "model")
    config = compressed(INT4, None, "pack-quantized")
    write_config(tmp_path / "model", config | {"ignore": ["re:.*layers[.]1[.].*down_proj"]})
    pipelines = [
        LocalPipeline(path, (6,), dtype="bfloat16", quantization="w4a8_int8")
        for path in (leaves_it_out, tmp_path / "model")
    ]
    models = [one.runners[0].held_layers.model for one in pipelines]
    assert models[0].weight_bytes == models[1].weight_bytes
    answers = [one.run(make_requests(3)) for one in pipelines]
    assert answers[0] == answers[1]


def test_logits_of_sixteen_bits_rounded_when_loaded_are_those_of_the_rounded_checkpoint(tmp_path):
    """A bf16 checkpoint under --quantization, and its weights rounded by hand and stored."""
    plain = tiny_model("qwen3")
    shutil.copytree(plain, tmp_path / "stored")
    tensors = load_file(plain / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("_proj.weight", "lm_head.weight"))]:
        matrix = tensors[name].bfloat16().float()
        scales = matrix.abs().amax(dim=1, keepdim=True) / 127
        tensors[name] = (matrix / scales).round().to(torch.int8)
        tensors[f"{name}_scale"] = scales
    save_file(tensors, tmp_path / "stored" / "model.safetensors")
    config = compressed(INT8_WEIGHTS, INT8_ROWS, "int-quantized")
    write_config(tmp_path / "stored", config | {"ignore": []})
    online = pipeline("w8a8_int8", (2, 4), dtype="bfloat16").run(make_requests(3))
    stored = LocalPipeline(tmp_path / "stored", (6,), dtype="bfloat16").run(make_requests(3))
    assert online == stored
