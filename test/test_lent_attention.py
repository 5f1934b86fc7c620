"""Tokens and logits do not depend on where attention is computed: a pipeline that leaves the
attention of some requests to the stages of another one, at any two depths and splits, has the bits
of a pipeline that attends to all by itself.

Real stages, sockets and keys of two servers; what their schedulers order is the test's.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from itertools import cycle, repeat
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.clusters import host_directory, open_port
from support.driven_stages import Driven, DrivenStages, LendingStages
from support.generic_families import generic_model, trace_once
from support.tiny_models import tiny_model

from sgl_pipeline.pp_runner.lent_attention import executor_stream
from sgl_pipeline.pp_runner.lent_attention.leases import Planned
from sgl_pipeline.pp_runner.model.generic.probe import probe
from sgl_pipeline.pp_runner.model.generic.spec import GenericSpec
from sgl_pipeline.pp_runner.recorded_layers import RecordedLayers
from sgl_pipeline.requests import GREEDY, SamplingSpec
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.attention_messages import AttendedRows, AttendRows

pytestmark = pytest.mark.slow

NUM_REQUESTS, OUTPUT_TOKENS = 5, 10
VOCAB_SIZE = 128  # that of the smallest model
# With pages of 4 tokens the rests of these prompts have 1, 2, 3, 4 and 1 tokens.
PROMPT_TOKENS = (61, 58, 47, 36, 21)
SEEDED = SamplingSpec(temperature=0.9, seed=5)
DEPTHS = [((6,), (6,)), ((2, 4), (6,)), ((6,), (1, 5)), ((4, 2), (1, 3, 2))]
KERNELS = {"attention_backend": "cpu", "layer_kernels": "cpu"}
NOBODY, SOME, ALL = frozenset[int](), frozenset({1, 3}), frozenset(range(NUM_REQUESTS))


def prompt_of(number: int) -> list[int]:
    return [
        (7 * number * at + at * at + number) % VOCAB_SIZE for at in range(PROMPT_TOKENS[number])
    ]


def sampling_of(number: int) -> SamplingSpec:
    return SEEDED if number % 2 else GREEDY


@cache
def spec_of(model: Path) -> GenericSpec:
    return probe(model)


@cache
def alone(
    model: Path | None = None, num_layers: int = 6, is_generic: bool = False, **stage: Any
) -> list[Driven]:
    path = model or tiny_model("qwen3")
    spec = spec_of(path) if is_generic else None
    stages = DrivenStages(path, (num_layers,), spec=spec, **KERNELS | stage)
    requests = [
        stages.new_request(prompt_of(number), OUTPUT_TOKENS, sampling_of(number))
        for number in range(NUM_REQUESTS)
    ]
    stages.run(requests, OUTPUT_TOKENS)
    return requests


class Pair:
    """The stages of a prefill server, whose run directory and port these are, and of a decode
    server."""

    prefill: LendingStages
    decode: DrivenStages

    def __init__(self, directory: Path) -> None:
        self._open = ExitStack()
        self._runs = [host_directory(directory / name) for name in ("P", "D")]
        self._address, _ = self._open.enter_context(open_port(self._runs[0]))

    def start(
        self,
        counts: tuple[tuple[int, ...], tuple[int, ...]] = ((6,), (6,)),
        model: Path | None = None,
        **stage: Any,
    ) -> None:
        path, stage = model or tiny_model("qwen3"), KERNELS | stage
        self.prefill = LendingStages(path, counts[0], self._runs[0], self._address, **stage)
        self._open.callback(self.prefill.close)
        self.decode = DrivenStages(path, counts[1], self._runs[1], **stage)
        self._open.callback(self.decode.close)
        self.use_peer()

    def use_peer(self) -> None:
        for runner in self.decode.runners:
            runner.offload.use((self.prefill.place,))

    def request(self, number: int, is_offloaded: bool) -> Driven:
        prompt = prompt_of(number)
        lease, num_lent = None, 0
        if is_offloaded:
            lease, num_lent = self.prefill.lend(prompt, OUTPUT_TOKENS)
        return self.decode.new_request(prompt, OUTPUT_TOKENS, sampling_of(number), lease, num_lent)

    def requests(self, offloaded: frozenset[int]) -> list[Driven]:
        return [self.request(number, number in offloaded) for number in range(NUM_REQUESTS)]

    def close(self) -> None:
        self._open.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.close()


def assert_equal(requests: list[Driven], others: list[Driven]) -> None:
    for one, other in zip(requests, others, strict=True):
        assert one.output_ids == other.output_ids
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))


# All depths with some and all, one of them in each precision; nobody in each precision.
@pytest.mark.parametrize(
    ("counts", "dtype", "offloaded"),
    [
        *zip(DEPTHS, cycle(("float32", "bfloat16")), repeat(SOME)),
        *zip(DEPTHS, cycle(("bfloat16", "float32")), repeat(ALL)),
        *((DEPTHS[-1], dtype, NOBODY) for dtype in ("float32", "bfloat16")),
    ],
    ids=str,
)
def test_attention_on_another_server_has_the_same_bits(
    pair: Pair,
    counts: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: str,
    offloaded: frozenset[int],
) -> None:
    pair.start(counts, dtype=dtype)
    requests = pair.requests(offloaded)
    pair.decode.run(requests, OUTPUT_TOKENS)
    assert_equal(requests, alone(dtype=dtype))
    has_work = [report.offloaded is not None for report in pair.decode.reports]
    assert any(has_work) == bool(offloaded)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("offloaded", [SOME, ALL], ids=["some", "all"])
def test_codes_of_eight_bits_are_written_as_they_are(
    pair: Pair, offloaded: frozenset[int], kv_cache_dtype: str
) -> None:
    stage = {"dtype": "bfloat16", "kv_cache_dtype": kv_cache_dtype}
    pair.start(((2, 4), (3, 3)), **stage)
    requests = pair.requests(offloaded)
    pair.decode.run(requests, OUTPUT_TOKENS)
    assert_equal(requests, alone(**stage))


@pytest.mark.parametrize("model", ["qwen3-moe", "qwen3-layer-types", "mistral-window"])
def test_experts_and_windows(pair: Pair, model: str) -> None:
    pair.start(((4, 2), (1, 5)), tiny_model(model))
    requests = pair.requests(SOME)
    pair.decode.run(requests, OUTPUT_TOKENS)
    assert_equal(requests, alone(tiny_model(model)))


@pytest.mark.parametrize("family", ["gpt-oss", "gemma2", "mimo-v2-flash"])
def test_layers_of_transformers_with_sinks_softcaps_and_other_widths_of_values(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """torch's products may give a row other bits in other company."""
    trace_once(monkeypatch)
    model = generic_model(family)
    pair.start(((1, 3), (2, 2)), model, spec=spec_of(model))
    requests = pair.requests(SOME)
    pair.decode.run(requests, OUTPUT_TOKENS)
    for one, other in zip(requests, alone(model, 4, is_generic=True), strict=True):
        assert one.output_ids == other.output_ids
        logits, wanted = torch.stack(one.logits), torch.stack(other.logits)
        assert float((logits - wanted).norm() / wanted.norm()) < 1e-5


def test_leases_of_two_servers_in_one_step(pair: Pair, tmp_path: Path) -> None:
    pair.start(((6,), (2, 4)))
    directory = host_directory(tmp_path / "Q")
    with open_port(directory) as (address, _):
        other = LendingStages(tiny_model("qwen3"), (1, 5), directory, address, name="Q", **KERNELS)
        for runner in pair.decode.runners:
            runner.offload.use((pair.prefill.place, other.place))
        requests = [pair.request(number, is_offloaded=True) for number in (0, 1)]
        for number, where in ((2, other), (3, pair.prefill), (4, other)):
            lease, num_lent = where.lend(prompt_of(number), OUTPUT_TOKENS)
            requests.append(pair.decode.new_request(
                prompt_of(number), OUTPUT_TOKENS, sampling_of(number), lease, num_lent
            ))  # fmt: skip
        pair.decode.run(requests, OUTPUT_TOKENS)
        assert_equal(requests, alone())
        other.close()


def test_each_stage_reports_its_part_of_the_work(pair: Pair) -> None:
    pair.start(((6,), (2, 4)))
    requests = [pair.request(0, True), pair.request(1, False), pair.request(4, True)]
    assert pair.decode.step(requests, most_tokens=5) == set()
    works = [report.offloaded for report in pair.decode.reports]
    for work, num_layers in zip(works, (2, 4), strict=True):
        assert work is not None and work.num_layers == num_layers
        assert work.local_tokens == 1 + 2 + 3 + 4 + 5
        assert work.remote_tokens == PROMPT_TOKENS[0] + PROMPT_TOKENS[4]
        assert 0 < work.local_s < work.trip_s and 0 < work.wait_s < work.trip_s
        assert 0 < work.remote_s < work.trip_s
    pair.decode.step([requests[1]])
    assert [report.offloaded for report in pair.decode.reports[2:]] == [None, None]


def test_steps_without_leases_are_recorded_calls_between_those_with_some(pair: Pair) -> None:
    pair.start(((6,), (2, 4)), dtype="bfloat16")
    requests = pair.requests(SOME)
    local = [one for one in requests if one.lease is None]
    for number in range(4):
        pair.decode.step(local if number % 2 else requests)
        for runner in pair.decode.runners:
            assert isinstance(runner._layers, RecordedLayers)
            assert runner._layers.is_recorded == (number > 0)
    pair.decode.run(requests, OUTPUT_TOKENS)
    assert_equal(requests, alone(dtype="bfloat16"))


def test_the_server_that_lends_goes_on_with_its_own_steps(pair: Pair) -> None:
    pair.start(((2, 4), (6,)), dtype="bfloat16")
    requests = pair.requests(ALL)
    own = [
        pair.prefill.new_request(prompt_of(number), OUTPUT_TOKENS, sampling_of(number))
        for number in range(NUM_REQUESTS)
    ]
    steps = threading.Thread(target=pair.prefill.run, args=(own, OUTPUT_TOKENS, 5))
    steps.start()
    pair.decode.run(requests, OUTPUT_TOKENS)
    steps.join()
    assert_equal(requests, alone(dtype="bfloat16"))
    assert_equal(own, alone(dtype="bfloat16"))


def test_layers_move_on_the_decode_server_while_its_requests_are_elsewhere(pair: Pair) -> None:
    pair.start(((4, 2), (2, 4)))
    requests = pair.requests(ALL)
    for _ in range(4):
        assert not pair.decode.step(requests)
    pair.decode.plan = StagePlan(1, (5, 1))
    for layer in (2, 3, 4):
        pair.decode.runners[0].held_layers.hold(layer)
    for runner in pair.decode.runners:
        runner.know_plan(pair.decode.plan)
    pair.decode.run(requests, OUTPUT_TOKENS)
    assert_equal(requests, alone())


# What goes wrong


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("way", ["dies", "hangs"])
def test_an_executor_that_is_gone_in_the_middle_of_a_step_costs_its_leases_only(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, stage: int, way: str
) -> None:
    """Those of the decode server's requests that have lost a lease are computed anew there."""
    monkeypatch.setattr(executor_stream, "ANSWER_LIMIT_S", 0.5)
    pair.start(((2, 4), (3, 3)))
    requests = pair.requests(SOME)
    for _ in range(4):
        pair.decode.step(requests)
    leases, calls = pair.prefill.leases[stage]._leases, list[int]()
    attend, going_on = leases.attend, threading.Event()

    def attend_once_more(planned: Planned, rows: AttendRows) -> AttendedRows:
        calls.append(rows.layer)
        if len(calls) > 1:
            if way == "dies":
                raise OSError("killed")
            going_on.wait(20.0)
        return attend(planned, rows)

    monkeypatch.setattr(leases, "attend", attend_once_more)
    numbers = {one.lease.number for one in requests if one.lease is not None}
    num_calls = []
    for _ in range(3):  # each stage of two finds out; then none is asked for a second
        started_s = time.monotonic()
        assert pair.decode.step(requests) == numbers
        assert time.monotonic() - started_s < 5.0
        num_calls.append(len(calls))
    assert num_calls[2] == num_calls[1]
    monkeypatch.setattr(leases, "attend", attend)
    going_on.set()
    retracted = [pair.request(number, is_offloaded=False) for number in sorted(SOME)]
    for one, number in zip(retracted, sorted(SOME), strict=True):
        one.tokens += requests[number].output_ids
        one.logits += requests[number].logits
        requests[number] = one
    pair.decode.run(requests, OUTPUT_TOKENS)
    assert_equal(requests, alone())
    time.sleep(max(0.0, started_s + executor_stream.REDIAL_PAUSE_S - time.monotonic()))
    again = pair.request(1, is_offloaded=True)
    pair.decode.run([again], OUTPUT_TOKENS)
    assert again.output_ids == alone()[1].output_ids


def test_a_lease_that_ends_while_it_is_used_is_refused_and_no_other(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.start(((2, 4), (6,)))
    requests = pair.requests(ALL)
    for _ in range(3):
        assert not pair.decode.step(requests)
    ended = requests.pop(2)
    assert ended.lease is not None
    pair.prefill.end(ended.lease)
    with caplog.at_level(logging.WARNING):
        assert pair.decode.step([ended, *requests]) == {ended.lease.number}
    text = f"peer P refuses lease {ended.lease.number}: it is not lent here, or not any more"
    assert [record.getMessage() for record in caplog.records] == [text]
    pair.decode.run(requests, OUTPUT_TOKENS)
    others = [one for number, one in enumerate(alone()) if number != 2]
    assert_equal(requests, others)


def test_a_lease_of_a_server_that_is_not_in_use_is_lost_at_once(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.start(((2, 4), (6,)))
    request = pair.request(0, is_offloaded=True)
    assert request.lease is not None
    place = pair.prefill.place
    for peers in ((), (msgspec.structs.replace(place, stages=place.stages[1:]),)):
        pair.decode.runners[0].offload.use(peers)
        assert pair.decode.step([request]) == {request.lease.number}
        assert "the leases of peer P are lost: it is not in use here" in caplog.text
        caplog.clear()
    other = msgspec.structs.replace(place, digest="ukv1-0")
    pair.decode.runners[0].offload.use((other,))
    assert pair.decode.step([request]) == {request.lease.number}
    assert "of another model or format" in caplog.text


def test_a_server_that_forgets_all_leases_refuses_them(pair: Pair) -> None:
    pair.start(((2, 4), (1, 5)))
    requests = pair.requests(ALL)
    pair.decode.step(requests)
    for transfers in pair.prefill.transfers:
        transfers.cancel()
    assert pair.decode.step(requests) == {one.lease.number for one in requests if one.lease}
