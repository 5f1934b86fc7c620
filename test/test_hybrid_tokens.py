"""Tokens of models whose layers keep states are transformers', at any depth and in any chunks."""

import random
import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from support.greedy_oracle import count_ties, reference_model
from support.hybrid_stages import HandledRequest, HybridStages
from support.local_pipeline import LocalPipeline
from support.pipelines import make_request
from support.quantized_models import FORMATS, quantized_model
from support.tiny_models import GROUPED_HYBRIDS, HYBRID_MODELS, VOCAB_SIZE, tiny_model

from sgl_pipeline.args import SchedulingArgs
from sgl_pipeline.errors import CheckpointError, ProtocolError
from sgl_pipeline.microbatch import StateSnapshot
from sgl_pipeline.pp_runner.layer_kernels import torch_quantized
from sgl_pipeline.records.move_record import MoveOutcome

SPLITS = [(6,), (4, 2), (1, 3, 2)]
WHOLE = 1000
LENGTHS = (1, 7, 64, WHOLE)
FOUR_BITS = [name for name, own in FORMATS.items() if not own.rounds_rows]
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
    ("name", "layer_counts", "kernels", "chunks"),
    [
        # Where layers are cut is nothing to a kernel: each in turn. Models with states have one
        # recurrence, whatever else is in their layers: one with experts and one without meet every
        # length.
        *(("qwen3.5", counts, "compiled", LENGTHS) for counts in SPLITS),
        ("qwen3.5", (1, 3, 2), "torch", LENGTHS),
        ("qwen3.5-moe-multimodal", (1, 3, 2), "compiled", LENGTHS),
        *((name, (1, 3, 2), "torch", (7, WHOLE)) for name in HYBRID_MODELS if name != "qwen3.5"),
    ],
)
@pytest.mark.slow
@pytest.mark.compiler
def test_chunks_of_any_length(
    name: str, layer_counts: tuple[int, ...], kernels: str, chunks: tuple[int, ...]
) -> None:
    path = tiny_model(name)
    stages = HybridStages(path, layer_counts, **KERNELS[kernels])
    outputs = []
    for slot, chunk in enumerate(chunks):
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
@pytest.mark.parametrize("quantization", [None, "w8a8_int8", "fp8", "w4a8_int8"])
def test_bfloat16_has_the_same_tokens_in_any_chunks_and_splits(quantization: str | None) -> None:
    assert_same_tokens(tiny_model("qwen3.5"), quantization, is_recorded=quantization is None)


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("format_name", "name"),
    [
        # A format gives matrices their kernel, a model its layers their recurrence: each in turn.
        # That all of them are read right in all models,
        # `test_stored_formats_give_the_tokens_of_the_weights_that_they_stand_for` shows.
        *((format_name, "qwen3.5-moe-grouped") for format_name in FORMATS),
        *((format_name, "qwen3.5-grouped") for format_name in ("int-quantized", "awq")),
        *((format_name, "qwen3-next-grouped") for format_name in ("fp8 blocks", "gptq")),
    ],
)
def test_stored_formats_have_the_same_tokens_in_any_chunks_and_splits(
    format_name: str, name: str
) -> None:
    assert_same_tokens(quantized_model(format_name, name).path)


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("format_name", FOUR_BITS)
def test_so_have_four_bits_whose_rows_are_rounded(format_name: str) -> None:
    assert_same_tokens(quantized_model(format_name, "qwen3.5-grouped").path, "w4a8_int8")


def assert_same_tokens(
    path: Path, quantization: str | None = None, *, is_recorded: bool = False
) -> None:
    settings = {**KERNELS["compiled"], "dtype": "bfloat16", "quantization": quantization}
    outputs = []
    for layer_counts, chunk in (((6,), 1), ((1, 3, 2), 7), ((6,), WHOLE)):
        stages = HybridStages(path, layer_counts, **settings)
        request = stages.open(prompt(5, 40), 2)
        stages.finish(request, chunk, 8)
        outputs.append(request.output_ids)
        if is_recorded:
            assert all(runner._layers.is_recorded for runner in stages.runners)
    assert outputs[0] == outputs[1] == outputs[2]
    assert len({*outputs[0]}) > 3, "the model repeats itself"


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
@pytest.mark.parametrize(
    ("format_name", "name"),
    [
        # What the last one has, dense layers and attention, is in test_quantized_models.py and in
        # the first one: two ways to store numbers.
        *product(FORMATS, [name for name in GROUPED_HYBRIDS if name != "qwen3.5-grouped"]),
        *product(("int-quantized", "gptq v2, ordered"), ("qwen3.5-grouped",)),
    ],
)
def test_stored_formats_give_the_tokens_of_the_weights_that_they_stand_for(
    format_name: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows as they are, also where the format rounds them: a rounding may go either way."""
    dequantized: dict[int, tuple[Any, torch.Tensor]] = {}  # with the weight, which keeps its id

    def product_of_dequantized(x: torch.Tensor, weight: Any) -> torch.Tensor:
        if id(weight) not in dequantized:
            dequantized[id(weight)] = weight, weight.dequantized()
        return F.linear(x, dequantized[id(weight)][1])

    monkeypatch.setattr(torch_quantized, "_product", product_of_dequantized)
    model = quantized_model(format_name, name)
    stages = HybridStages(model.path, (1, 3, 2))
    request = stages.open(prompt(5, 60), 0)
    stages.finish(request, 7, 10)
    assert_greedy(model.dequantized, request)


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`tensors` with all experts of a layer in one, all gates before all ups."""
    joined: dict[str, torch.Tensor] = {}
    parts: dict[tuple[str, str], list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.\d+\.(\w+)\.weight", name):
            parts.setdefault((match[1], match[2]), []).append(tensor)
        else:
            joined[name] = tensor
    for experts in {experts for experts, _ in parts}:
        gates, ups = (torch.stack(parts[experts, part]) for part in ("gate_proj", "up_proj"))
        joined[f"{experts}.gate_up_proj"] = torch.cat((gates, ups), dim=1)
        joined[f"{experts}.down_proj"] = torch.stack(parts[experts, "down_proj"])
    return joined


@pytest.mark.compiler
@pytest.mark.parametrize("name", ["qwen3.5-moe", "qwen3.5-moe-multimodal"])
@pytest.mark.parametrize("quantization", [None, "w8a8_int8"])
def test_experts_in_a_stack_are_those_in_tensors_of_their_own(
    quantization: str | None, name: str, tmp_path: Path
) -> None:
    separate = tiny_model(name)
    shutil.copytree(separate, tmp_path / "model")
    weights = stacked(load_file(separate / "model.safetensors"))
    save_file(weights, tmp_path / "model" / "model.safetensors")
    settings = {**KERNELS["compiled"], "dtype": "bfloat16", "quantization": quantization}
    outputs, sizes = [], []
    for path in (separate, tmp_path / "model"):
        stages = HybridStages(path, (4, 2), **settings)
        request = stages.open(prompt(5, 40), 0)
        stages.finish(request, 7, 10)
        outputs.append(request.output_ids)
        sizes.append([runner.held_layers.model.weight_bytes for runner in stages.runners])
    assert outputs[0] == outputs[1] and sizes[0] == sizes[1]


@pytest.mark.slow
def test_a_stack_of_experts_that_should_have_fewer_bits_is_refused(tmp_path: Path) -> None:
    """Rounding it would give weights that the checkpoint does not hold."""
    name = "qwen3.5-moe-grouped"
    shutil.copytree(quantized_model("gptq", name).path, tmp_path / "model")
    weights = stacked(load_file(tiny_model(name) / "model.safetensors"))
    weights |= load_file(tmp_path / "model" / "model.safetensors")
    save_file(weights, tmp_path / "model" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts\.\w+ holds all experts"):
        HybridStages(tmp_path / "model", (6,))


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
def test_logits_after_4000_tokens() -> None:
    """Of the last row, whose states have forgotten and kept what came before. Models with states
    have one recurrence, whatever else is in their layers."""
    path = tiny_model("qwen3.5")
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
