"""vLLM beside our pipeline: what is asked of it, and what is made of its times."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmark.gpu import vllm_beside
from benchmark.gpu.script import PlanWriter, Script
from benchmark.gpu.session import Budget, Session
from benchmark.gpu.shapes import PAGE_SIZE
from benchmark.gpu.vllm_beside import (
    Measurement,
    measure_loads,
    prompts_of,
    run_burst,
    text_of,
)
from benchmark.gpu.vllm_engine import EXECUTIONS, Answer, engine_options

SCRIPT = Script(num_requests=10, prompt_tokens=40, num_rounds=6)
VOCABULARY = 151_936
START_S, ROUND_S = 0.5, 0.01


class EmulatedEngine:
    """A prefix cache of whole pages, steps of `START_S` for prompts and of `ROUND_S` for a token of
    every request; a request's handing over takes a second, which nothing may count."""

    def __init__(self, drawn_too_many: int = 0) -> None:
        self.now_s = 0.0
        self._is_prefilled = False
        self._drawn_too_many = drawn_too_many
        self._cache: set[tuple[int, ...]] = set()
        self._left: list[tuple[int, Answer]] = []

    def clock(self) -> float:
        return self.now_s

    def add(self, name: str, prompt: Sequence[int], num_tokens: int) -> None:
        self.now_s += 1.0
        pages = [tuple(prompt[:end]) for end in range(PAGE_SIZE, len(prompt), PAGE_SIZE)]
        hits = sum(page in self._cache for page in pages) * PAGE_SIZE
        self._cache.update(pages)
        self._left.append((num_tokens, Answer(num_tokens + self._drawn_too_many, hits)))

    def step(self) -> list[Answer]:
        self.now_s += ROUND_S if self._is_prefilled else START_S
        ended = [answer for left, answer in self._left if left == 1]
        self._left = [(left - 1, answer) for left, answer in self._left if left > 1]
        self._is_prefilled = bool(self._left)
        return ended

    def is_busy(self) -> bool:
        return bool(self._left)


def measurement(engine: EmulatedEngine, seconds: float = 1000.0) -> Measurement:
    session = Session(torch.device("cpu"), ["tiny"], (), (), Budget(seconds, engine.clock))
    return Measurement(session, engine, SCRIPT, VOCABULARY, repeats=3, clock=engine.clock)


def test_a_prefill_is_all_prompts_over_the_time_after_they_were_handed_over() -> None:
    loads = measurement(EmulatedEngine())
    loads.prefill()
    (row,) = loads.session.table("loads")
    expected = pytest.approx(10 * 40 / START_S)
    assert row["tokens_per_s"] == expected and row["all_tokens_per_s"] == [expected] * 3
    assert [burst["add_s"] for burst in row["bursts"]] == [10.0] * 3


@pytest.mark.parametrize("num_requests", [10, 4, 1])
def test_a_round_is_free_of_what_one_token_takes(num_requests: int) -> None:
    loads = measurement(EmulatedEngine())
    loads.prefill()
    loads.decode(num_requests)
    row = loads.session.table("loads")[-1]
    assert row["all_round_ms"] == [pytest.approx(ROUND_S * 1e3)] * 3
    assert row["tokens_per_s"] == pytest.approx(num_requests / ROUND_S)
    assert len(row["bursts"]) == 6 and len(row["bursts"][-1]["ends_s"]) == 1 + SCRIPT.num_rounds
    assert f"| {num_requests} decode" in text_of(loads.session)


@pytest.mark.parametrize(
    ("seconds", "not_measured"),
    [
        (1000.0, []),
        (14.0, ["prefill", "decodes of 256", "decodes of 64", "decodes of 1"]),
        (40.0, ["decodes of 256", "decodes of 64", "decodes of 1"]),  # which the prefill takes
    ],
)
def test_every_load_is_measured_or_named(seconds: float, not_measured: list[str]) -> None:
    loads = measurement(EmulatedEngine(), seconds)
    saved: list[str] = []
    loads.session.save = lambda session: saved.append(text_of(session))
    measure_loads(loads)
    assert [missed.what for missed in loads.session.not_measured] == not_measured
    assert len(loads.session.table("loads")) == 4 - len(not_measured)
    assert all(f"Not measured: {what} (" in saved[-1] for what in not_measured)


def test_decodes_whose_prompts_left_the_cache_are_no_result() -> None:
    loads = measurement(EmulatedEngine())
    loads.prefill()
    loads.prompts = prompts_of(SCRIPT, 99, VOCABULARY)
    with pytest.raises(RuntimeError, match=r"after 32 hits were expected.*\[\(1, 0\)\]"):
        loads.decode(4)


def test_a_prefill_with_hits_is_no_result() -> None:
    engine = EmulatedEngine()
    prompts = prompts_of(SCRIPT, 0, VOCABULARY)
    run_burst(engine, prompts, 1, 0, engine.clock)
    with pytest.raises(RuntimeError, match="after 0 hits"):
        run_burst(engine, prompts, 1, 0, engine.clock)


def test_another_number_of_tokens_is_no_result() -> None:
    engine = EmulatedEngine(drawn_too_many=1)
    with pytest.raises(RuntimeError, match=r"\[\(4, 0\)\]"):
        run_burst(engine, prompts_of(SCRIPT, 0, VOCABULARY), 3, 0, engine.clock)


def test_the_first_prompts_are_those_of_our_script() -> None:
    ours = PlanWriter(SCRIPT, PAGE_SIZE, VOCABULARY).prefills()
    chunks = [chunk for plan in ours for chunk in plan.chunks]
    theirs = prompts_of(SCRIPT, 0, VOCABULARY)
    assert [np.frombuffer(each.new_tokens, np.int32).tolist() for each in chunks] == theirs


def test_no_prompt_of_a_round_begins_like_one_of_another() -> None:
    script = Script(prompt_tokens=1)
    begins = [
        prompt[0] for number in range(12) for prompt in prompts_of(script, number, VOCABULARY)
    ]
    assert len(set(begins)) == 12 * script.num_requests


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_request_fits_the_engine_and_every_decode_has_its_graph(execution: str) -> None:
    options, script = engine_options(execution, "folder"), Script()
    assert script.tokens_a_request + 1 <= options["max_model_len"]
    # What is left of prompts after their hits is one step, so that all begin to decode together.
    rest = script.prompt_tokens - (script.prompt_tokens - 1) // PAGE_SIZE * PAGE_SIZE
    assert rest * max(vllm_beside.CONCURRENCIES) <= options["max_num_batched_tokens"]
    assert 256 * 1056 * 147_456 < options["kv_cache_memory_bytes"] < 60e9  # beside weights: an H100
    graphs = options.get("compilation_config", {}).get("cudagraph_capture_sizes")
    assert graphs is None or set(vllm_beside.CONCURRENCIES) <= set(graphs)


def test_without_a_card_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert vllm_beside.main(shlex.split(f"--folder {tmp_path}")) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().out and not list(tmp_path.iterdir())
