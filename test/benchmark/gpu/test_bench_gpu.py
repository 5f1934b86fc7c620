"""The GPU benchmark, rehearsed on a CPU: its arithmetic by hand, and its parts on a tiny model.

What it measures there means nothing; that it runs to its end, without sglang, does.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmark.gpu import bench_gpu, part_checks, part_kernels, part_stages
from benchmark.gpu.checks import Check, check_attention, random_layout, unused_slots
from benchmark.gpu.limits import CardLimits
from benchmark.gpu.lone_stage import LoneStage
from benchmark.gpu.quantized_checks import why_not_rehearsed
from benchmark.gpu.shapes import (
    MODELS,
    STEPS,
    Extent,
    attention_work,
    decode_step,
    mixed_step,
    spec_of,
    step_work,
)


def test_the_work_of_a_step_by_hand() -> None:
    """Hidden 64, 4 query and 2 KV heads of 16, 128 inner, a vocabulary of 512."""
    spec = spec_of("tiny")
    layer_weights = 64 * (2 * 64 + 2 * 32 + 3 * 128)
    work = step_work(spec, 2, False, [Extent(9, 1), Extent(4, 3)])
    read, written = 10 + 7, 4
    assert work.num_bytes == 2 * 2 * (layer_weights + 2 * 32 * (read + written))
    visible = 10 + (5 + 6 + 7)
    assert work.num_flops == 2 * (2 * layer_weights * 4 + 4 * 64 * visible)
    with_head = step_work(spec, 2, True, [Extent(9, 1), Extent(4, 3)])
    assert with_head.num_bytes - work.num_bytes == 2 * 512 * 64
    assert with_head.num_flops - work.num_flops == 2 * 512 * 64 * 2


def test_the_work_of_a_layers_attention_by_hand() -> None:
    work = attention_work(spec_of("tiny"), [Extent(9, 1), Extent(4, 3)])
    assert work.num_bytes == 2 * (2 * 32 * (10 + 7) + 2 * 64 * 4)
    assert work.num_flops == 4 * 64 * (10 + 5 + 6 + 7)


def test_the_limit_is_the_larger_of_moving_and_computing() -> None:
    limits = CardLimits("a card", bytes_per_ms=1e6, flops_per_ms=1e9)
    spec = spec_of("tiny")
    few, many = (step_work(spec, 2, False, [Extent(0, rows)]) for rows in (1, 4096))
    assert limits.limit_ms(few) == limits.bytes_ms(few) > limits.flops_ms(few)
    assert limits.limit_ms(many) == limits.flops_ms(many) > limits.bytes_ms(many)


def test_weights_of_the_shapes_are_those_of_the_models() -> None:
    """Parameters without embedding, head and norms, as the model cards round them."""
    for model, billions in (("Qwen3-0.6B", 0.44), ("Qwen3-8B", 6.95), ("Qwen3-14B", 13.2)):
        spec = spec_of(model)
        weights = step_work(spec, spec.num_layers, False, ()).num_bytes / 2
        assert weights / 1e9 == pytest.approx(billions, rel=0.01)
    assert all(len(chunks) == 1 or chunks[0].length == 1 for chunks in (s.chunks for s in STEPS))


def test_steps_say_their_rows_and_pages() -> None:
    assert decode_step(3, 17).num_pages(16) == 6
    step = mixed_step(3, 17, 40)
    assert step.num_rows == 43


def test_a_wrong_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful:
        def plan(self, layout: object) -> None:
            pass

        def attend(self, query: torch.Tensor, *pages: torch.Tensor) -> torch.Tensor:
            return torch.full_like(query, torch.nan)

    monkeypatch.setattr("benchmark.gpu.checks.make_attention_backend", lambda *choice: Forgetful())
    shape = spec_of("tiny").attention_shapes(16, torch.bfloat16, torch.device("cpu"))[0]
    assert not check_attention(shape, "tiny", "torch", rounds=1).passed
    assert not Check("nothing", float("nan"), 1.0).passed


def test_nan_beside_the_tokens_is_noted_and_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless:
        """Lets every slot of the pages into its result."""

        def plan(self, layout: object) -> None:
            pass

        def attend(self, query: torch.Tensor, *pages: torch.Tensor) -> torch.Tensor:
            return query + sum(store.sum() for store in pages)

    monkeypatch.setattr("benchmark.gpu.checks.make_attention_backend", lambda *choice: Careless())
    shape = spec_of("tiny").attention_shapes(16, torch.bfloat16, torch.device("cpu"))[0]
    clean, noted = (
        check_attention(shape, "tiny", "torch", rounds=1, has_nan_in_unused_slots=has_nan)
        for has_nan in (False, True)
    )
    assert clean.error < float("inf") and not clean.passed
    assert noted.error == float("inf") and noted.passed and noted.cells()[-1] == "noted"


def test_unused_slots_are_those_after_a_requests_last_token() -> None:
    layout = random_layout([Extent(4, 1), Extent(0, 8), Extent(0, 3)], page_size=4, seed=0)
    unused = unused_slots(layout)
    ends = layout.page_indptr.tolist()
    last_pages = [int(layout.page_indices[end - 1]) for end in ends[1:]]
    assert unused[last_pages].tolist() == [
        [False, True, True, True],
        [False] * 4,
        [False] * 3 + [True],
    ]
    assert int(unused.sum()) == 4


def saved_by(folder: Path, options: str, code: int = 0) -> dict[str, Any]:
    """What the benchmark saves, having ended with `code`."""
    assert bench_gpu.main([*options.split(), "--device", "cpu", "--folder", str(folder)]) == code
    (path,) = folder.glob("*_gpu.json")
    assert "# gpu" in path.with_suffix(".md").read_text()
    saved: dict[str, Any] = json.loads(path.read_text())
    return saved


def test_a_rehearsal_measures_all_and_names_what_needs_a_gpu(tmp_path: Path) -> None:
    saved = saved_by(tmp_path, "--depths 1 2 --parts checks stages kernels host")
    stages, attention = saved["rows"]["stages"], saved["rows"]["attention"]
    assert {(row["stages"], row["stage"]) for row in stages} == {(1, 0), (2, 0), (2, 1)}
    assert all(row["step_ms"] > 0 and row["limit_ms"] > 0 for row in stages)
    assert {row["kind"] for row in attention} == set(part_kernels._STEPS)
    assert all(row["layer_ms"] > 0 and row["limit_ms"] > 0 for row in attention)
    (host,) = saved["rows"]["host"]
    assert all(host[name] > 0 for name in ("prepare_us", "launch_us", "wait_us"))
    assert "build_step_inputs" in " ".join(each["name"] for each in host["functions"])
    agreed = [check["name"] for check in saved["checks"] if "torch against auto" in check["name"]]
    assert len(agreed) == len(attention) / 2
    checks = [check["name"] for check in saved["checks"]]
    expected_checks = [
        "e4m3 pages",
        "product in int8, ",
        "experts of tiny-moe, ",
        "tiny-moe, graphs",
    ]
    if not why_not_rehearsed("fp8"):
        expected_checks.append("product in fp8, ")
    for expected in expected_checks:
        assert any(expected in name for name in checks), expected
    assert {each["part"] for each in saved["not_measured"]} == {"checks", "stages", "kernels"}
    assert all("need" in each["why"] for each in saved["not_measured"])
    assert saved["run"]["state"] == "finished"


def leave_out_but_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the part `checks`, whose other checks a whole rehearsal makes."""
    for name in ("check_attention", "check_experts", "check_sampler"):
        passed = Check(f"{name}, left out", 0.0, 1.0)
        monkeypatch.setattr(part_checks, name, lambda *_, passed=passed, **__: passed)
    monkeypatch.setattr(part_checks, "check_stage", lambda *_: ())


def test_a_rehearsal_names_products_that_torch_lacks_on_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch 2.11 lacks `scaled_mm`."""

    def lacking(*_: object, **__: object) -> torch.Tensor:
        raise NotImplementedError("Could not run 'aten::_scaled_mm_v2' on the 'CPU' backend. This")

    monkeypatch.setattr(F, "scaled_mm", lacking)
    leave_out_but_products(monkeypatch)
    saved = saved_by(tmp_path, "--parts checks")
    whys = {each["what"]: each["why"] for each in saved["not_measured"]}
    assert whys["checking products in fp8 of tiny"].endswith("on the 'CPU' backend")
    assert not any("in fp8, " in check["name"] for check in saved["checks"])
    assert any("product in int8, " in check["name"] for check in saved["checks"])


@pytest.mark.multiproc
def test_stage_processes_draw_the_same_tokens_at_each_depth(tmp_path: Path) -> None:
    saved = saved_by(tmp_path, "--depths 1 2 --extra-steps 0 1 --parts pipelines")
    rows = saved["rows"]["pipelines"]
    in_flight = [(row["stages"], row["requests"], row["in_flight"]) for row in rows]
    assert in_flight == [
        (depth, requests, depth + extra)
        for depth in (1, 2)
        for requests in (8, 16)
        for extra in (0, 1)
    ]
    assert all(row["round_ms"] > row["step_ms"] * 0.99 for row in rows)
    names = [check["name"] for check in saved["checks"]]
    assert [name for name in names if "8 requests in 2 groups" in name]
    assert [check["error"] for check in saved["checks"]] == [0.0] * len(names)


def test_without_time_everything_is_named_as_not_measured(tmp_path: Path) -> None:
    saved = saved_by(tmp_path, "--budget-s 0")
    named = {each["what"] for each in saved["not_measured"]}
    assert {"measuring the card", "checking the sampler", "timing stage 3 of 4 of tiny"} <= named
    assert {each["part"] for each in saved["not_measured"]} > set(bench_gpu.PARTS)
    assert not saved["rows"] and not saved["checks"]


def test_a_part_that_fails_is_named_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("no such stage")

    monkeypatch.setattr(part_stages, "LoneStage", fail)
    saved = saved_by(tmp_path, "--depths 1 --parts stages kernels", code=1)
    failed = [each for each in saved["not_measured"] if each["is_failure"]]
    assert [each["why"] for each in failed] == ["ValueError: no such stage"]
    assert "in fail" in failed[0]["trace"]
    assert saved["rows"]["attention"]


class MissingJITCacheError(RuntimeError):
    """FlashInfer's, with the name of a module."""

    def __init__(self) -> None:
        super().__init__("JIT compilation is disabled via FLASHINFER_DISABLE_JIT")
        self.spec = type("Spec", (), {"name": "batch_prefill_fa3"})


@pytest.mark.parametrize(("part", "code"), [("kernels", 0), ("checks", 1)])
def test_a_kernel_that_was_not_built_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, code: int
) -> None:
    """It is no failure of a measurement; but what it computes has not been checked."""

    def missing(*_: object, **__: object) -> None:
        raise MissingJITCacheError

    leave_out_but_products(monkeypatch)
    monkeypatch.setattr(part_kernels, "time_attention", missing)
    monkeypatch.setattr(part_checks, "check_attention", missing)
    saved = saved_by(tmp_path, f"--parts {part}", code)
    missed = [
        each["why"]
        for each in saved["not_measured"]
        if each["what"].startswith(("timing attention", "checking attention"))
    ]
    assert missed and all(why.startswith("no prebuilt kernel batch_prefill_fa3") for why in missed)


def test_a_run_that_is_cut_short_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CutShort(LoneStage):
        num_timed = 0

        def step_ms(self, *_: object, **__: object) -> float:
            if self.num_timed:
                raise KeyboardInterrupt
            self.num_timed += 1
            return 1.0

    monkeypatch.setattr(part_stages, "LoneStage", CutShort)
    with pytest.raises(KeyboardInterrupt):
        saved_by(tmp_path, "--depths 1 --parts stages kernels")
    (path,) = tmp_path.glob("*_gpu.json")
    saved = json.loads(path.read_text())
    assert [row["step_ms"] for row in saved["rows"]["stages"]] == [1.0]
    assert saved["run"]["state"] == "cut short in: stages, kernels"


def test_models_of_the_issue_are_all_there() -> None:
    assert {"Qwen3-0.6B", "Qwen3-8B", "Qwen3-14B"} <= set(MODELS)
