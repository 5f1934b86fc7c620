"""gpt-oss with experts in four bits: transformers' tokens, the same ones at every depth."""

import shutil

import pytest
from safetensors.torch import load_file, save_file
from support.greedy_oracle import count_ties
from support.local_pipeline import LocalPipeline
from support.mxfp4_models import mxfp4_model
from test_token_identity import CHUNKED, make_requests

from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.errors import CheckpointError
from sgl_pipeline.records.move_record import MoveOutcome

pytestmark = pytest.mark.slow

COMPILED = {"dtype": "bfloat16", "attention_backend": "cpu", "layer_kernels": "cpu"}


def pipeline(layer_counts: tuple[int, ...], **arguments: str) -> LocalPipeline:
    throttle = ThrottleArgs(**CHUNKED)
    return LocalPipeline(mxfp4_model().path, layer_counts, throttle=throttle, **arguments)


@pytest.mark.parametrize("layer_counts", [(6,), (2, 4), (2, 1, 3)], ids=str)
def test_tokens_are_those_of_the_weights_that_the_numbers_stand_for(
    layer_counts: tuple[int, ...],
) -> None:
    requests = make_requests(4)
    pipeline(layer_counts).run(requests)
    for request in requests:
        count_ties(
            mxfp4_model().dequantized, request.prompt_ids, request.output_ids, request.sampling
        )


@pytest.mark.compiler
def test_compiled_products_give_the_same_tokens_at_every_depth_and_while_layers_move() -> None:
    answers = [pipeline(counts, **COMPILED).run(make_requests(4)) for counts in [(6,), (2, 1, 3)]]
    assert answers[0] == answers[1]
    assert len({token for output in answers[0] for token in output}) > 9, "hardly any tokens"
    moving, requests = pipeline((3, 3), **COMPILED), make_requests(4)
    migration = moving.core.migration
    for request in requests:
        moving.scheduler.add(request)
    while not moving.scheduler.is_idle:
        while moving.schedule():
            if migration.coordinator.current is None:
                migration.move_to([(4, 2), (1, 5)][len(migration.history) % 2], 0.0)
        moving.complete()
    assert [request.output_ids for request in requests] == answers[0]
    assert any(move.outcome is MoveOutcome.DONE for move in migration.history)


def test_four_bits_are_held_in_little_more_than_four_bits() -> None:
    model = pipeline((6,), **COMPILED).runners[0].held_layers.model
    numbers = 6 * 6 * (2 * 96 * 64 + 64 * 96)  # layers, experts, gate and up, down
    experts = {name: size for name, size in model.loaded.items() if "experts" in name}
    stored = sum(size for name, size in experts.items() if "bias" not in name)
    assert stored == numbers * (4 / 8 + 1 / 32)


@pytest.mark.parametrize("scale", [1, 253, 255])
def test_a_scale_that_sixteen_bits_do_not_have_is_named(scale: int, tmp_path) -> None:
    shutil.copytree(mxfp4_model().path, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    name = "model.layers.2.mlp.experts.down_proj_scales"
    tensors[name][1, 2, 0] = scale
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor {name} holds a scale"):
        LocalPipeline(tmp_path / "model", (6,))
