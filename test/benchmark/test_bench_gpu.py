"""The GPU benchmark, tried on a CPU: its arithmetic by hand, and all of its parts on a tiny model.

What it measures there means nothing; that it runs to its end, without sglang, does.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmark import bench_gpu
from benchmark.gpu.checks import Check, check_attention
from benchmark.gpu.limits import CardLimits
from benchmark.gpu.pipelines import Script
from benchmark.gpu.shapes import MODELS, STEPS, Extent, decode_step, mixed_step, spec_of, step_work
from sgl_pipeline.step_plan import RequestMirror

ROOT = Path(__file__).parents[2]


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
    assert (step.num_rows, step.num_kv_tokens) == (43, 3 * 17 + 40)


def test_a_script_gives_every_request_all_of_its_tokens_in_order() -> None:
    script = Script(num_requests=6, prompt_tokens=5, num_rounds=3, num_groups=2, prefill_requests=4)
    mirror = RequestMirror()
    lengths = dict.fromkeys(range(6), 0)
    for plan in script.plans(4, 100):
        for chunk in mirror.apply(plan):
            assert chunk.start == lengths[chunk.request.handle]
            lengths[chunk.request.handle] += chunk.length
    assert set(lengths.values()) == {8}
    pages = [page for request in mirror for page in request.pages]
    assert sorted(pages) == list(range(script.total_tokens(4) // 4))


def test_a_wrong_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful:
        def plan(self, layout: object) -> None:
            pass

        def attend(self, query: torch.Tensor, *pages: torch.Tensor) -> torch.Tensor:
            return torch.full_like(query, torch.nan)

    monkeypatch.setattr(
        "benchmark.gpu.checks.make_attention_backend", lambda choice, shape: Forgetful()
    )
    shape = spec_of("tiny").attention_shape(16, torch.bfloat16, torch.device("cpu"))
    assert not check_attention(shape, "tiny", "torch", rounds=1).passed
    assert not Check("nothing", float("nan"), 1.0).passed


def test_all_parts_run_and_are_saved(tmp_path: Path) -> None:
    options = "--device cpu --models tiny --depths 1 2 --few --parts checks stages"
    assert bench_gpu.main([*options.split(), "--folder", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*_gpu.json")
    saved = json.loads(path.read_text())
    assert {row["stage"] for row in saved["rows"]} == {0, 1}
    assert all(row["step_ms"] > 0 and row["limit_ms"] > 0 for row in saved["rows"])
    assert "# gpu" in path.with_suffix(".md").read_text()


@pytest.mark.multiproc
def test_stage_processes_draw_the_same_tokens_at_each_depth(tmp_path: Path) -> None:
    options = "--device cpu --models tiny --depths 1 2 --few --parts pipelines"
    assert bench_gpu.main([*options.split(), "--folder", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*_gpu.json")
    saved = json.loads(path.read_text())
    assert [check["error"] for check in saved["checks"]] == [0.0] * len(saved["checks"])
    assert [row["stages"] for row in saved["pipelines"]][:2] == [1, 2]


def test_without_time_everything_is_named_as_not_measured(tmp_path: Path) -> None:
    options = "--device cpu --models tiny --few --budget-s 0"
    assert bench_gpu.main([*options.split(), "--folder", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*_gpu.json")
    saved = json.loads(path.read_text())
    assert "checking the sampler" in saved["skipped"]
    assert not saved["rows"]


def test_it_needs_no_sglang() -> None:
    """Where the card is, only torch, msgspec and zmq may be installed."""
    script = (
        "import sys\n"
        "for name in ('sglang', 'transformers', 'torchvision', 'xgrammar'):\n"
        "    sys.modules[name] = None\n"
        "import benchmark.bench_gpu, sgl_pipeline.pp_runner.stage_worker\n"
        "import sgl_pipeline.scheduling, sgl_pipeline.throttle, sgl_pipeline.simulator\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_models_of_the_issue_are_all_there() -> None:
    assert {"Qwen3-0.6B", "Qwen3-8B", "Qwen3-14B"} <= set(MODELS)
