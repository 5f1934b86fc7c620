"""Tokens of models whose layers keep states are transformers', at any depth and in any chunks."""

import random
from pathlib import Path

import pytest
import torch
from support.greedy_oracle import count_ties, reference_model
from support.hybrid_stages import HandledRequest, HybridStages
from support.local_pipeline import LocalPipeline
from support.pipelines import make_request
from support.quantized_models import quantized_model
from support.tiny_models import HYBRID_MODELS, VOCAB_SIZE, tiny_model

from sgl_pipeline.args import SchedulingArgs
from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.microbatch import StateSnapshot
from sgl_pipeline.records.move_record import MoveOutcome

SPLITS = [(6,), (4, 2), (1, 3, 2)]
WHOLE = 1000
KERNELS = {
    "torch": {"attention_backend": "torch", "layer_kernels": "torch"},
    "compiled": {"attention_backend": "cpu", "layer_kernels": "cpu"},
}
with_and_without_kernels = pytest.mark.parametrize(
    "kernels", ["torch", pytest.param("compiled", marks=pytest.mark.compiler)]
)


def prompt(seed: int, length: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(VOCAB_SIZE) for _ in range(length)]


def assert_greedy(path: Path, request: HandledRequest) -> None:
    ties = count_ties(path, request.prompt_ids, request.output_ids)
    print(f"{len(request.output_ids)} greedy tokens, {ties} ties below 1e-4 went the other way")


@pytest.mark.parametrize(
    ("name", "layer_counts", "kernels"),
    [
        *(("qwen3.5", counts, kernels) for counts in SPLITS for kernels in KERNELS),
        *(("qwen3.5-moe-multimodal", counts, "compiled") for counts in SPLITS),
        *((name, (1, 3, 2), "torch") for name in HYBRID_MODELS),
    ],
)
@pytest.mark.slow
@pytest.mark.compiler
def test_chunks_of_any_length(name: str, layer_counts: tuple[int, ...], kernels: str) -> None:
    path = tiny_model(name)
    stages = HybridStages(path, layer_counts, **KERNELS[kernels])
    outputs = []
    for slot, chunk in enumerate((1, 7, 64, WHOLE)):
        request = stages.open(prompt(5, 90), slot)
        stages.finish(request, chunk, 12)
        assert_greedy(path, request)
        outputs.append(request.output_ids)
    assert all(one == outputs[0] for one in outputs)
    assert len({*outputs[0]}) > 4, "the model repeats itself"


@with_and_without_kernels
def test_several_requests_in_a_step_and_a_slot_that_another_had(kernels: str) -> None:
    path = tiny_model("qwen3.5")
    stages = HybridStages(path, (2, 4), **KERNELS[kernels])
    first, second, third = (stages.open(prompt(slot, 40), slot) for slot in range(3))
    stages.step((first, 40), (second, 5))
    stages.step((first, 1), (second, 35), (third, 17))
    stages.step((second, 1), (first, 1), (third, 23))
    stages.step((third, 1), (second, 1), (first, 1))
    again = stages.open(prompt(7, 30), first.state_slot)
    stages.step((third, 1), (second, 1), (again, 30), closes=(first.handle,))
    stages.step((third, 1), (again, 1))
    for request in (first, second, third, again):
        assert len(request.output_ids) >= 2
        assert_greedy(path, request)


@pytest.mark.compiler
@pytest.mark.parametrize("quantization", [None, "w8a8_int8", "fp8"])
def test_bfloat16_has_the_same_tokens_in_any_chunks_and_splits(quantization: str | None) -> None:
    settings = {**KERNELS["compiled"], "dtype": "bfloat16", "quantization": quantization}
    outputs = []
    for layer_counts, chunk in (((6,), 1), ((1, 3, 2), 7), ((6,), WHOLE)):
        stages = HybridStages(tiny_model("qwen3.5"), layer_counts, **settings)
        request = stages.open(prompt(5, 60), 2)
        stages.finish(request, chunk, 10)
        outputs.append(request.output_ids)
        if quantization is None:
            assert all(runner._layers.is_recorded for runner in stages.runners)
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("layer_counts", [(6,), (4, 2)])
@pytest.mark.parametrize(
    "settings",
    [
        KERNELS["torch"],
        pytest.param({**KERNELS["compiled"], "dtype": "bfloat16"}, marks=pytest.mark.compiler),
    ],
    ids=["torch", "compiled"],
)
def test_requests_that_begin_with_a_snapshot(
    layer_counts: tuple[int, ...], settings: dict[str, str]
) -> None:
    path = tiny_model("qwen3.5")
    stages = HybridStages(path, layer_counts, num_state_slots=6, **settings)
    taken = StateSnapshot(16, 4), StateSnapshot(48, 5)
    first = stages.open(prompt(5, 60), 0)
    stages.step((first, 50), snapshots=taken)
    stages.finish(first, 7, 8)
    same = stages.open_behind(taken[1], first, first.prompt_ids[48:], 1)
    other = stages.open_behind(taken[0], first, prompt(6, 20), 2)
    stages.step((first, 1), (same, 12), (other, 20))
    stages.finish(same, WHOLE, 8)
    assert same.output_ids == first.output_ids[:8]
    stages.finish(other, WHOLE, 6)
    whole = stages.open(other.prompt_ids, 3)
    stages.finish(whole, WHOLE, 6)
    assert other.output_ids == whole.output_ids
    if settings is KERNELS["torch"]:
        assert_greedy(path, other)
    else:
        assert all(runner._layers.is_recorded for runner in stages.runners)


def test_slots_of_snapshots_that_a_step_cannot_have_are_refused() -> None:
    stages = HybridStages(tiny_model("qwen3.5"), (6,), num_state_slots=3)
    first = stages.open(prompt(5, 40), 0)
    stages.step((first, 20), snapshots=[StateSnapshot(16, 1)])
    with pytest.raises(ProtocolError, match=r"names the state slots \[0, 3\], of 3"):
        stages.step((first, 16), snapshots=[StateSnapshot(32, 3)])
    with pytest.raises(ProtocolError, match=r"write to the state slots \[0, 0\]"):
        stages.step((stages.open(prompt(1, 20), 0), 20), snapshots=[StateSnapshot(16, 0)])
    behind = stages.open_behind(StateSnapshot(16, 1), first, [5], 2)
    with pytest.raises(ProtocolError, match=r"writes to the state slots \[1\], with which"):
        stages.step((stages.open([1], 1), 1), (behind, 1))


@pytest.mark.slow
@pytest.mark.parametrize("format_name", ["pack-quantized", "pack-quantized asymmetric, ordered"])
def test_four_bits_give_the_tokens_of_the_weights_that_they_stand_for(
    format_name: str,
) -> None:
    model = quantized_model(format_name, "qwen3.5")
    stages = HybridStages(model.path, (1, 3, 2))
    request = stages.open(prompt(5, 60), 0)
    stages.finish(request, 7, 10)
    assert_greedy(model.dequantized, request)


def test_a_step_without_its_state_slots_is_refused() -> None:
    stages = HybridStages(tiny_model("qwen3.5"), (6,), num_state_slots=2)
    with pytest.raises(
        ProtocolError, match=r"the chunks of a step write to the state slots \[1, 1\]"
    ):
        stages.step((stages.open([1], 1), 1), (stages.open([1], 1), 1))
    with pytest.raises(ProtocolError, match=r"names the state slots \[2\], of 2"):
        stages.step((stages.open([1], 2), 1))
    nowhere = stages.open([1], 0)
    nowhere.state_slot = None
    with pytest.raises(ProtocolError, match="names no state slots"):
        stages.step((nowhere, 1))


@with_and_without_kernels
@pytest.mark.parametrize(
    "plans",
    [((4, 2), (1, 5), (5, 1), (3, 3)), ((1, 3, 2), (3, 2, 1), (1, 1, 4), (4, 1, 1), (2, 2, 2))],
)
def test_states_go_to_and_fro_with_their_layers(
    plans: tuple[tuple[int, ...], ...], kernels: str
) -> None:
    """While more requests are served than there are slots: slots change their owners too."""
    path = tiny_model("qwen3.5")
    scheduling = SchedulingArgs(page_size=16, num_state_slots=3, radix_cache=False)
    pipeline = LocalPipeline(path, plans[0], scheduling=scheduling, **KERNELS[kernels])
    for number in range(5):
        pipeline.scheduler.add(make_request(str(number), prompt(number, 20 + 9 * number), 14))
    requests = pipeline.scheduler.requests()
    moves = []
    place = 0
    while not pipeline.scheduler.is_idle:
        if pipeline.core.migration.coordinator.current is None:
            place += 1
            moves.append(pipeline.core.migration.move_to(plans[place % len(plans)], 0.0))
        if not pipeline.schedule() or pipeline.core.scheduler.num_running > 2:
            pipeline.complete()
    for mover in pipeline.movers:
        mover.close()
    done = [move for move in moves if move.outcome is MoveOutcome.DONE]
    assert len(done) >= 3 and sum(move.patched_bytes for move in done) > 0
    for request in requests:
        ties = count_ties(path, request.prompt_ids, request.output_ids)
        assert len(request.output_ids) == 14
        print(f"{ties} ties below 1e-4 went the other way")


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe", "qwen3-next"])
def test_logits_after_4000_tokens(name: str) -> None:
    """Of the last rows, whose states have forgotten and kept what came before."""
    path = tiny_model(name)
    rows: list[torch.Tensor] = []
    stages = HybridStages(path, (6,), pages_each=256, num_state_slots=1, **KERNELS["compiled"])
    head = stages.runners[0].held_layers.model.logits
    stages.runners[0]._tail._head = lambda hidden: rows.append(head(hidden)) or rows[-1]
    request = stages.open(prompt(9, 4000), 0)
    while request.num_left > 1:
        stages.step((request, min(512, request.num_left - 1)))
    stages.step((request, 1))
    with torch.inference_mode():
        expected = reference_model(path)(torch.tensor([request.prompt_ids])).logits[0, -1]
    (found,) = rows[-1]
    print(f"largest difference {(found - expected).abs().max().item():.1e}")
    assert (found - expected).abs().max() < 1e-3


def test_rehearsed_steps_use_few_slots() -> None:
    stages = HybridStages(tiny_model("qwen3.5"), (6,), num_state_slots=1)
    stages.runners[0].rehearse()
    request = stages.open(prompt(3, 20), 0)
    stages.finish(request, WHOLE, 6)
    assert_greedy(tiny_model("qwen3.5"), request)
