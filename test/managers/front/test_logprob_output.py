"""The twelve lists against upstream's own code, before them and behind them."""

import asyncio
import random
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.schedule_batch import ReqLogprob
from sglang.srt.managers.scheduler_components.logprob_result_processor import (
    SchedulerLogprobResultProcessor,
)
from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager
from sglang.srt.utils.json_response import orjson_response
from support.front_model import VOCAB_SIZE, byte_tokenizer
from support.upstream_front import UpstreamFront, generate

from sgl_pipeline.managers.front.logprob_output import FIELDS, LogprobCursor
from sgl_pipeline.requests import (
    GREEDY,
    FinishReason,
    LogprobRows,
    LogprobSpec,
    Request,
    StopRules,
)
from sgl_pipeline.scheduling import TokenEvent

TOKENIZER = byte_tokenizer()
LENGTH = FinishReason("length")


def number(position: int, place: int = 0) -> float:
    """What the model says of a position; exact in fp32."""
    return -position - place / 1024


def top_ids(position: int, count: int) -> list[int]:
    return [(position + place) % VOCAB_SIZE for place in range(count)]


def book_rows(request: Request, end: int) -> None:
    """The rows of all positions before `end` that have not come yet."""
    spec = request.logprobs
    assert spec is not None
    positions = range(request.first_logits_position, end)

    def numbers(places: range) -> bytes:
        return array("f", [number(p, place) for p in positions for place in places]).tobytes()

    rows = LogprobRows(
        len(positions),
        numbers(range(1)),
        numbers(range(spec.num_top)),
        array("i", [i for p in positions for i in top_ids(p, spec.num_top)]).tobytes(),
        numbers(range(100, 100 + len(spec.token_ids))),
    )
    request.logprob_runs.append(rows)
    request.num_logprob_rows += len(positions)


def upstream_fields(request: Request) -> dict[str, list[Any]]:
    """What upstream's scheduler keeps of a request that has ended, from the same numbers."""
    spec = request.logprobs
    assert spec is not None
    prompt_length, num_outputs = len(request.prompt_ids), len(request.output_ids)
    ids = list(spec.token_ids) or None
    req = SimpleNamespace(
        logprob=ReqLogprob(top_logprobs_num=spec.num_top, token_ids_logprob=ids),
        origin_input_ids=request.prompt_ids,
        logprob_start_len=spec.prompt_start,
        return_logprob=True,
        return_flat_raw_top_logprobs=False,
        is_prefill_only=False,
        input_token_logprobs=None,
        temp_input_top_logprobs_val=None,
        temp_input_top_logprobs_idx=None,
        temp_input_token_ids_logprobs_val=None,
        temp_input_token_ids_logprobs_idx=None,
    )
    for field in FIELDS[6:]:
        setattr(req.logprob, field, [])
    processor = SchedulerLogprobResultProcessor(
        model_config=SimpleNamespace(vocab_size=VOCAB_SIZE + 1)  # it replaces the last id by 0
    )
    positions = range(spec.prompt_start, prompt_length)

    def of_ids(position: int) -> list[float]:
        return [number(position, 100 + place) for place in range(len(spec.token_ids))]

    def top(position: int) -> list[float]:
        return [number(position, place) for place in range(spec.num_top)]

    for index in range(num_outputs):
        position = prompt_length - 1 + index
        output = SimpleNamespace(
            input_token_logprobs=tuple(number(p) for p in positions),
            input_top_logprobs_val=[[top(p) for p in positions]],
            input_top_logprobs_idx=[[top_ids(p, spec.num_top) for p in positions]],
            input_token_ids_logprobs_val=[[of_ids(p) for p in positions]],
            input_token_ids_logprobs_idx=[[ids for _ in positions]],
            next_token_logprobs=[number(position)],
            next_token_top_logprobs_val=[top(position)],
            next_token_top_logprobs_idx=[top_ids(position, spec.num_top)],
            next_token_token_ids_logprobs_val=[of_ids(position)],
            next_token_token_ids_logprobs_idx=[ids],
        )
        num_inputs = 0 if index else len(positions)
        drawn = request.output_ids[index : index + 1]
        processor.add_logprob_return_values(0, req, 0, drawn, num_inputs, output)
    return {field: getattr(req.logprob, field) or [] for field in FIELDS}


@given(
    prompt_length=st.integers(1, 9),
    num_outputs=st.integers(1, 7),
    start=st.integers(0, 9),
    num_top=st.integers(0, 3),
    token_ids=st.lists(st.integers(0, 300), max_size=2).map(tuple),
    seed=st.integers(0, 1000),
)
def test_whatever_the_increments_they_add_up_to_what_upstream_sends(
    prompt_length: int,
    num_outputs: int,
    start: int,
    num_top: int,
    token_ids: tuple[int, ...],
    seed: int,
) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(prompt_length)]
    spec = LogprobSpec(min(start, prompt_length), num_top, token_ids)
    request = Request("r", prompt, GREEDY, StopRules(num_outputs), logprobs=spec)
    cursor = LogprobCursor(request)
    sent: dict[str, list[Any]] = {field: [] for field in FIELDS}

    def send(num_new: int) -> None:
        new_ids = request.output_ids[len(request.output_ids) - num_new :]
        for field, values in cursor.next_fields(new_ids).items():
            sent[field] += values

    for end in sorted(rng.sample(range(prompt_length), rng.randrange(prompt_length))):
        if end > request.first_logits_position:
            book_rows(request, end)
        send(0)
        assert not any(sent.values()), "nothing is sent before the prompt is whole"
    num_new = 0
    for index in range(num_outputs):
        request.output_ids.append(rng.randrange(VOCAB_SIZE))
        book_rows(request, prompt_length + index)
        num_new += 1
        if rng.random() < 0.5 or index == num_outputs - 1:
            send(num_new)
            num_new = 0
    assert sent == upstream_fields(request)


# Through upstream's Detokenizer to what its TokenizerManager answers


@pytest.fixture
def upstream() -> Iterator[UpstreamFront]:
    front = UpstreamFront()
    yield front
    front.close()


class Readers:
    """Upstream's Detokenizer and TokenizerManager, without their sockets."""

    def __init__(self) -> None:
        self.detokenizer = DetokenizerManager.__new__(DetokenizerManager)
        self.detokenizer.tokenizer = TOKENIZER
        self.detokenizer.vocab_size = len(TOKENIZER)
        self.detokenizer.decode_status = {}
        self.detokenizer.disable_tokenizer_batch_decode = False
        self.detokenizer.is_tool_call_parser_gpt_oss = False
        self.detokenizer.tool_close_token_ids = set()
        self.manager = TokenizerManager.__new__(TokenizerManager)
        self.manager.tokenizer = TOKENIZER
        self.states: dict[str, ReqState] = {}

    def expect(self, rid: str, **fields: Any) -> None:
        obj = GenerateReqInput(text="x", rid=rid, return_text_in_logprobs=True, **fields)
        obj.normalize_batch_and_arguments()
        self.states[rid] = ReqState([], False, asyncio.Event(), obj, None)

    def read(self, output: Any) -> dict[str, dict[str, Any]]:
        """The meta_info of each request of a message, as JSON gives it."""
        text_output = self.detokenizer.handle_batch_token_id_out(output)
        answers = {}
        for index, rid in enumerate(text_output.rids):
            state, meta_info = self.states[rid], {}
            if state.obj.return_logprob:
                self.manager.convert_logprob_style(
                    meta_info,
                    state,
                    state.obj.top_logprobs_num,
                    state.obj.token_ids_logprob,
                    True,
                    text_output,
                    index,
                    finished=text_output.finished_reasons[index] is not None,
                )
            answers[rid] = orjson.loads(orjson_response(meta_info).body)
        return answers


ALL: dict[str, Any] = {
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 2,
    "token_ids_logprob": [5, 9],
}


def take(
    upstream: UpstreamFront, readers: Readers, rid: str, sampling: Any = None, **fields: Any
) -> Request:
    readers.expect(rid, **fields)
    upstream.send(generate(rid, "abcd", sampling=sampling, **fields))
    upstream.front.socket.poll(2000)
    (request,) = upstream.front.receive()
    assert isinstance(request, Request)
    return request


def step(request: Request, finish: FinishReason | None = None) -> TokenEvent:
    """The step that ends the prompt or a decode: one more token, and its row."""
    end = request.num_tokens
    if request.logprobs is not None:
        book_rows(request, end)
    new_ids = (70 + len(request.output_ids),) if request.stops.max_new_tokens else ()
    request.output_ids += new_ids
    return TokenEvent(request, new_ids, finish)


def test_a_mixed_stream_keeps_every_requests_numbers_apart(upstream: UpstreamFront) -> None:
    readers = Readers()
    everything = take(upstream, readers, "all", **ALL)
    plain = take(upstream, readers, "plain")
    output_only = take(upstream, readers, "output", return_logprob=True)
    three = (everything, plain, output_only)
    for finish in (None, None, LENGTH):
        upstream.front.send_events([step(request, finish) for request in three])
        output = upstream.output()
        assert all(len(getattr(output, field)) == 3 for field in FIELDS)
        answers = readers.read(output)
    assert answers["plain"] == {}
    assert answers["output"]["input_token_logprobs"] == []
    tokens = everything.prompt_ids + everything.output_ids
    expected = [[None if p == 0 else number(p - 1), tokens[p]] for p in range(len(tokens))]
    prompt = [row[:2] for row in answers["all"]["input_token_logprobs"]]
    drawn = [row[:2] for row in answers["all"]["output_token_logprobs"]]
    assert (prompt, drawn) == (expected[:4], expected[4:])
    assert [row[2] for row in answers["all"]["input_token_logprobs"]] == ["a", "b", "c", "d"]
    assert [row[:2] for row in answers["output"]["output_token_logprobs"]] == expected[4:]
    top = answers["all"]["input_top_logprobs"]
    assert top[0] is None and len(top) == 4
    assert [row[:2] for row in top[1]] == [[number(0), 0], [number(0, 1), 1]]
    of_ids = answers["all"]["output_token_ids_logprobs"]
    assert [row[:2] for row in of_ids[2]] == [[number(5, 100), 5], [number(5, 101), 9]]


def test_requests_without_any_pay_nothing(upstream: UpstreamFront) -> None:
    plain = take(upstream, Readers(), "plain")
    upstream.front.send_events([step(plain)])
    output = upstream.output()
    assert all(getattr(output, field) is None for field in FIELDS)


def test_a_request_that_only_scores_has_no_drawn_token(upstream: UpstreamFront) -> None:
    readers = Readers()
    scored = take(upstream, readers, "r", sampling={"max_new_tokens": 0}, **ALL)
    upstream.front.send_events([step(scored, LENGTH)])
    answer = readers.read(upstream.output())["r"]
    assert len(answer["input_token_logprobs"]) == 4
    assert answer["output_token_logprobs"] == []
    # The position after the prompt: what /v1/score reads.
    assert [row[0] for row in answer["output_token_ids_logprobs"][0]] == [
        number(3, 100),
        number(3, 101),
    ]
    assert len(answer["output_top_logprobs"]) == 1


@pytest.mark.parametrize("rows_before", [0, 2, 3])
def test_an_abort_before_the_first_token_is_answered_without_any(
    upstream: UpstreamFront, rows_before: int
) -> None:
    readers = Readers()
    request = take(upstream, readers, "r", **ALL)
    if rows_before:
        book_rows(request, rows_before)
    upstream.front.send_finish(request, FinishReason("abort", message="gone"))
    answer = readers.read(upstream.output())["r"]
    assert answer == {field: [] for field in answer} | {"output_token_logprobs_length": 0}


def test_an_abort_between_tokens_sends_what_was_held_back(upstream: UpstreamFront) -> None:
    readers = Readers()
    request = take(upstream, readers, "r", sampling={"stream_interval": 5}, **ALL)
    for _ in range(3):
        upstream.front.send_events([step(request)])
    assert len(readers.read(upstream.output())["r"]["output_token_logprobs"]) == 1
    upstream.front.send_finish(request, FinishReason("abort", message="gone"))
    answer = readers.read(upstream.output())["r"]
    assert len(answer["output_token_logprobs"]) == len(answer["output_top_logprobs"]) == 3
    assert len(answer["input_token_logprobs"]) == 4


def test_a_refused_request_is_answered_without_any(upstream: UpstreamFront) -> None:
    readers = Readers()
    readers.expect("r", **ALL)
    upstream.send(generate("r", [VOCAB_SIZE + 5], **ALL))
    upstream.front.socket.poll(2000)
    assert upstream.front.receive() == []
    answer = readers.read(upstream.output())["r"]
    assert answer["output_token_logprobs"] == answer["input_top_logprobs"] == []


@pytest.mark.parametrize("start", [0, 2, 3, 4])
def test_flat_arrays_are_made_by_the_front_from_what_it_gets(
    upstream: UpstreamFront, start: int
) -> None:
    readers = Readers()
    flat = {"return_flat_raw_top_logprobs": True}
    request = take(upstream, readers, "r", **(ALL | flat | {"logprob_start_len": start}))
    upstream.front.send_events([step(request, LENGTH)])
    answer = readers.read(upstream.output())["r"]
    num_rows = max(0, 3 - start)
    assert answer["input_top_logprobs_shape"] == [num_rows, 2]
    assert len(answer["input_top_logprobs_val_flat"]) == 2 * num_rows
