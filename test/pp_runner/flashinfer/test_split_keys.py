"""Which chunks of prompts FA2 serves on a Hopper, against the times that an H200 took."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fake_flashinfer import Fakes
from support.paged_attention import ChunkExtent, attention_shape, random_problem

from benchmark.gpu.checks import random_layout
from benchmark.gpu.shapes import PAGE_SIZE, prefill_step, spec_of
from benchmark.support.paths import RESULTS
from sgl_pipeline.pp_runner.flashinfer.flashinfer_attention import open_flashinfer
from sgl_pipeline.pp_runner.flashinfer.split_keys import split_keys_are_faster

CPU = torch.device("cpu")
H200 = 132  # multiprocessors
MEASURED = json.loads((RESULTS / "2026-11-27_1954_gpu.json").read_text())["rows"]["attention"]
STEPS = {
    step.name: step
    for step in (
        *(prefill_step(length) for length in (256, 2048, 8192)),
        prefill_step(512, 4096),
        prefill_step(128, 16_384),
    )
}
RACES = sorted({(row["model"], row["step"]) for row in MEASURED if row["step"] in STEPS})


@pytest.mark.parametrize(("model", "step"), RACES)
def test_the_faster_kernels_are_chosen(model: str, step: str) -> None:
    took_ms = {
        row["kernels"]: row["layer_ms"]
        for row in MEASURED
        if (row["model"], row["step"]) == (model, step)
    }
    shape = spec_of(model).attention_shapes(PAGE_SIZE, torch.bfloat16, CPU)[0]
    layout = random_layout(STEPS[step].chunks, PAGE_SIZE, seed=0)
    assert split_keys_are_faster(layout, shape, H200) is (took_ms["fa2"] < took_ms["fa3"])


def test_many_prompts_fill_the_card_and_need_no_split() -> None:
    shape = spec_of("Qwen3-8B").attention_shapes(PAGE_SIZE, torch.bfloat16, CPU)[0]
    (alone,) = prefill_step(128, 16_384).chunks
    assert split_keys_are_faster(random_layout([alone], PAGE_SIZE, seed=0), shape, H200)
    assert not split_keys_are_faster(random_layout([alone] * 8, PAGE_SIZE, seed=0), shape, H200)


def test_a_window_is_a_context_of_the_keys_that_a_tile_sees_through_it() -> None:
    """Those of 128 rows, each of which sees one more and one fewer than the row before it."""
    shape = spec_of("Qwen3-8B").attention_shapes(PAGE_SIZE, torch.bfloat16, CPU)[0]
    long = random_layout(prefill_step(128, 16_384).chunks, PAGE_SIZE, seed=0)
    found = []
    for window in range(32, 8192, 32):
        alone = random_layout(prefill_step(128, window - 1).chunks, PAGE_SIZE, seed=0)
        found.append(split_keys_are_faster(long, replace(shape, window=window), H200))
        assert found[-1] is split_keys_are_faster(alone, shape, H200)
    assert found == sorted(found) and {*found} == {False, True}
    for window in (16_384, 2**20):  # longer than the context
        assert split_keys_are_faster(long, replace(shape, window=window), H200)


@pytest.mark.parametrize(
    ("num_multiprocessors", "is_faster"), [(H200, True), (114, True), (78, False)]
)
def test_fewer_multiprocessors_gain_less_by_a_split(
    num_multiprocessors: int, is_faster: bool
) -> None:
    """An H100 with PCIe has 114, an H20 78. FA3 keeps one for each of the 40 heads busy."""
    shape = spec_of("Qwen3-14B").attention_shapes(PAGE_SIZE, torch.bfloat16, CPU)[0]
    layout = random_layout(prefill_step(128, 16_384).chunks, PAGE_SIZE, seed=0)
    assert split_keys_are_faster(layout, shape, num_multiprocessors) is is_faster


@pytest.mark.parametrize(
    ("kernels", "capability", "coded", "backends"),
    [
        ("auto", (9, 0), None, ["auto", "fa2"]),
        ("auto", (8, 9), None, ["auto"]),
        ("auto", (12, 0), None, ["auto"]),
        ("auto", (9, 0), torch.float8_e4m3fn, ["auto"]),
        ("fa2", (9, 0), None, ["fa2"]),
        ("fa3", (9, 0), None, ["fa3"]),
    ],
)
def test_fa2_is_opened_beside_fa3_where_there_is_a_choice(
    monkeypatch: pytest.MonkeyPatch,
    kernels: str,
    capability: tuple[int, int],
    coded: torch.dtype | None,
    backends: list[str],
) -> None:
    def open_prefill(workspace: torch.Tensor, layout: str, *, backend: str) -> SimpleNamespace:
        return SimpleNamespace(workspace=workspace, backend=backend)

    library = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=open_prefill,
        BatchDecodeWithPagedKVCacheWrapper=lambda *_, **__: SimpleNamespace(),
    )
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(multi_processor_count=78),
    )
    shape = replace(attention_shape(4, 2, 64, 16, torch.bfloat16), coded_dtype=coded)
    parts = open_flashinfer(shape, kernels)
    split = parts.split_prefill
    opened: list[Any] = [parts.prefill, *([split.wrapper] if split else [])]
    assert split is None or split.num_multiprocessors == 78
    assert [wrapper.backend for wrapper in opened] == backends
    assert len({id(wrapper.workspace) for wrapper in opened}) == 1


def test_a_step_runs_the_kernels_that_it_was_planned_with() -> None:
    """And decodes beside the chunk do not count."""
    shape = attention_shape(4, 2, 64, 16, torch.bfloat16)
    fakes = Fakes(shape, has_split=True)
    for start, name in ((0, "prefill"), (4000, "split"), (0, "prefill")):
        problem = random_problem([ChunkExtent(4000, 1), ChunkExtent(start, 5)], shape)
        fakes.recorder.calls.clear()
        fakes.attention.plan(problem.layout)
        fakes.attention.attend(problem.query, problem.key_pages, problem.value_pages)
        ours = [call for call in fakes.recorder.calls if call.endswith(("prefill", "split"))]
        assert ours == [f"plan {name}", f"run {name}"]
