"""Reasoning tokens are counted as SGLang counts them; its own request class is the oracle."""

from random import Random
from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import (
    REQUEST_REASONING_END_TOKEN_IDS_KEY,
    SamplingParams,
)
from support.front_model import byte_tokenizer
from support.upstream_front import UpstreamFront, generate

from sgl_pipeline.managers.front.reasoning_tokens import ReasoningCounter, ReasoningMarks
from sgl_pipeline.requests import FinishReason, Request
from sgl_pipeline.scheduling import TokenEvent

TOKENIZER = byte_tokenizer()


def upstream_count(ids: list[int], start: list[int], end: list[int]) -> int:
    """What upstream's scheduler reports for an output, token by token."""
    request = Req("r", "", [1], SamplingParams(), vocab_size=320)
    for token in ids:
        if start:
            request.update_self_opened_reasoning_tokens(token, start, end)
        else:
            request.update_reasoning_tokens(token, end)
    return request.reasoning_tokens


@pytest.mark.parametrize("start", [[], [1], [1, 2], [1, 1]])
@pytest.mark.parametrize("end", [[3], [3, 3], [3, 1, 3, 2]])
def test_counts_equal_upstreams_however_the_output_is_cut(start: list[int], end: list[int]) -> None:
    random = Random(0)
    for _ in range(300):
        # Few different tokens, so that marks begin, break off and repeat.
        ids = start[: random.choice([0, 1, 2])] + random.choices([1, 2, 3], k=random.randrange(12))
        counter = ReasoningCounter(start, end)
        cut = random.randrange(len(ids) + 1)
        counter.add(ids[:cut])
        counter.add(ids[cut:])
        assert counter.count == upstream_count(ids, start, end), ids


def message(require_reasoning: bool, **custom: object) -> SimpleNamespace:
    sampling = SimpleNamespace(custom_params=custom or None)
    return SimpleNamespace(require_reasoning=require_reasoning, sampling_params=sampling)


def count(marks: ReasoningMarks, request: SimpleNamespace, text: str) -> int:
    counter = marks.counter(request)
    counter.add(TOKENIZER.encode(text))
    return counter.count


@pytest.mark.parametrize("parser", ["qwen3", "deepseek-r1", "glm45"])
def test_an_asked_for_thought_counts_up_to_its_closing_mark(parser: str) -> None:
    marks = ReasoningMarks.of_parser(parser, TOKENIZER)
    thought = "<think>hm</think>"
    assert count(marks, message(True), thought + "42") == len(thought)
    assert count(marks, message(True), "never closed") == len("never closed")
    assert count(marks, message(False), thought + "42") == 0


def test_without_a_reasoning_parser_nothing_is_counted() -> None:
    marks = ReasoningMarks.of_parser(None, TOKENIZER)
    assert count(marks, message(True), "<think>hm</think>42") == 0


def test_a_model_that_opens_its_thought_itself_is_counted_when_it_does() -> None:
    marks = ReasoningMarks.of_parser("minimax-m3", TOKENIZER)
    thought = "<mm:think>hm</mm:think>"
    assert count(marks, message(False), thought + "42") == len(thought)
    assert count(marks, message(False), "42" + thought) == 0


def test_a_request_may_choose_its_closing_mark_among_the_parsers() -> None:
    marks = ReasoningMarks(end=(5,), selectable_ends=((6,), (7, 8)))
    chosen = marks.counter(message(True, **{REQUEST_REASONING_END_TOKEN_IDS_KEY: [7, 8]}))
    chosen.add([1, 5, 6, 7, 8, 9])
    assert chosen.count == 5
    stranger = marks.counter(message(True, **{REQUEST_REASONING_END_TOKEN_IDS_KEY: [9]}))
    stranger.add([1, 5, 9])
    assert stranger.count == 2


def test_the_count_grows_with_the_stream_and_leaves_with_every_message() -> None:
    upstream = UpstreamFront(reasoning_parser="qwen3")
    upstream.send(generate("r1", "hello", require_reasoning=True))
    upstream.front.socket.poll(2000)
    (request,) = upstream.front.receive()
    assert isinstance(request, Request)
    for text, expected in (("hm", 2), ("</think>4", 10), ("2", 10)):
        ids = TOKENIZER.encode(text)
        request.output_ids.extend(ids)
        finish = FinishReason("length") if text == "2" else None
        upstream.front.send_events([TokenEvent(request, tuple(ids), finish)])
        assert upstream.output().reasoning_tokens == [expected]
    upstream.close()
