"""A worker that is ready has done what happens once: its first real steps import nothing."""

import json
import os
import subprocess
import sys
from array import array
from collections import deque
from pathlib import Path

import pytest
import torch
from support.local_pipeline import QueueLink, open_stage
from support.tiny_models import tiny_model

from sgl_pipeline.pp_runner.rehearsal import rehearsed_steps
from sgl_pipeline.requests import GREEDY
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.step_order import ChunkOrder, RequestOpen, StepOrder

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.multiproc
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_step_imports_a_module(dtype: str) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'test'}"}
    command = [sys.executable, "-m", "support.worker_steps", str(tiny_model("llama")), dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


@pytest.mark.parametrize(
    ("num_pages", "page_size", "context_length"),
    [(1, 16, 100), (2, 1, 100), (3, 4, 100), (64, 16, 100), (64, 16, 2), (64, 128, 1000)],
)
def test_what_is_rehearsed_fits_the_pool_and_the_model(
    num_pages: int, page_size: int, context_length: int
) -> None:
    steps = [*rehearsed_steps(num_pages, page_size, context_length)]
    if num_pages * page_size < 2 * min(num_pages, 2):
        assert steps == []
        return
    assert len(steps) == 3
    for chunks in steps:
        pages = [page for chunk in chunks for page in chunk.request.pages]
        assert len({*pages}) == len(pages) and max(pages) < num_pages
        for chunk in chunks:
            end = chunk.start + chunk.length
            assert chunk.length >= 1 and end <= context_length
            assert end <= len(chunk.request.pages) * page_size


def test_a_pool_of_a_token_has_nothing_to_rehearse() -> None:
    assert [*rehearsed_steps(1, 1, 100)] == [*rehearsed_steps(8, 16, 1)] == []


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_nothing_is_left_of_a_rehearsal(stage: int) -> None:
    """Pages are zeros again, nothing was sent, and the first step has its tokens."""
    sent: list[deque] = []
    for rehearses in (True, False):
        rows, downstream = deque([(0, torch.ones(3, 64))]), deque()
        runner = open_stage(
            tiny_model("llama"), StagePlan(0, (2, 2, 2)), stage, QueueLink(rows, downstream)
        )
        if rehearses:
            runner.rehearse()
            assert not downstream
            pool = runner.held_layers.kv_pool
            assert not any(bool(one.any()) for layer in pool.layers for one in pool.pages(layer))
        chunk = ChunkOrder(
            0, 0, 3, True, array("i", [5, 6, 7]).tobytes(), array("i", [4]).tobytes()
        )
        opened = RequestOpen(0, GREEDY, 3)
        step = runner.prepare(StepOrder(0, 0, (), (opened,), (chunk,)))
        report = runner.launch(step).report()
        sent.append(deque([report.token_ids, *(row.tolist() for _, row in downstream)]))
    assert sent[0] == sent[1]
