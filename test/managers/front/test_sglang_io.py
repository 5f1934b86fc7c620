from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from sglang.srt.entrypoints.openai.utils import cached_tokens_details_from_dict
from sglang.srt.managers import io_struct
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from support.front_model import byte_tokenizer
from support.upstream_front import UpstreamFront, generate

from sgl_pipeline.args import HOST_BACKEND
from sgl_pipeline.args.disaggregation_args import Mode
from sgl_pipeline.errors import QueueFullError
from sgl_pipeline.managers.front.message_decoder import rids_of
from sgl_pipeline.managers.front.room_fields import RoomFields
from sgl_pipeline.managers.front.sglang_io import (
    AbortRequest,
    ControlRequest,
    RefusedRoom,
)
from sgl_pipeline.managers.grammars.spec import GrammarSpec
from sgl_pipeline.requests import FinishReason, Request, RequestState, Room
from sgl_pipeline.scheduling import TokenEvent

TOKENIZER = byte_tokenizer()
STOP_X = FinishReason("stop", matched="x")


@pytest.fixture
def upstream() -> Iterator[UpstreamFront]:
    front = UpstreamFront()
    yield front
    front.close()


def receive(upstream: UpstreamFront) -> list[Any]:
    """What the scheduler gets; messages between sockets of one process may take a moment."""
    upstream.front.socket.poll(2000)
    return upstream.front.receive()


def take(upstream: UpstreamFront, rid: str = "r1", text: str = "hello", **fields: Any) -> Request:
    upstream.send(generate(rid, text, **fields))
    (request,) = receive(upstream)
    assert isinstance(request, Request)
    return request


def emit(
    upstream: UpstreamFront, request: Request, text: str, finish: FinishReason | None = None
) -> None:
    """One step that adds `text` to the request's output."""
    ids = TOKENIZER.encode(text)
    request.output_ids.extend(ids)
    if request.stops.check_text is not None and finish is None:
        finish = request.stops.check_text(request.output_ids)
    upstream.front.send_events([TokenEvent(request, tuple(ids), finish)])


def abort_reason(output: io_struct.BatchTokenIDOutput, row: int = 0) -> tuple[int | None, str]:
    reason = output.finished_reasons[row]
    assert reason is not None and reason["type"] == "abort"
    return reason["status_code"], reason["message"]


# Requests in


def test_requests_arrive_one_by_one_and_in_batches(upstream: UpstreamFront) -> None:
    upstream.send(generate("a", "x"))
    upstream.send(
        io_struct.BatchTokenizedGenerateReqInput(batch=[generate("b", "y"), generate("c", "z")])
    )
    received: list[Any] = []
    while len(received) < 3:
        received += receive(upstream)
    assert [request.request_id for request in received] == ["a", "b", "c"]
    assert upstream.front.live_requests == received


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_the_room_of_a_refused_request_is_handed_out_for_its_other_server(mode: Mode) -> None:
    upstream = UpstreamFront(rooms=RoomFields(mode))
    room = {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 7}
    upstream.send(generate("r1", [100_000], **room))
    (refused,) = receive(upstream)
    peer = "h:1" if mode == "decode" else ""
    status, text = abort_reason(upstream.output())
    assert refused == RefusedRoom(Room(7, peer), text, 400) and status == 400
    upstream.send(generate("r2", "hello"))
    assert receive(upstream) == []
    assert "bootstrap_room" in abort_reason(upstream.output())[1]
    upstream.close()


def test_a_refused_request_is_answered_and_never_handed_out(upstream: UpstreamFront) -> None:
    upstream.send(generate("r1", [100_000]))
    assert receive(upstream) == []
    output = upstream.output()
    assert output.rids == ["r1"]
    status, message = abort_reason(output)
    assert status == 400 and "token id 100000" in message
    assert upstream.front.live_requests == []


def test_a_message_that_cannot_be_read_ends_its_request_with_a_400(upstream: UpstreamFront) -> None:
    message = generate("r1", "x")
    nested: Any = []
    for _ in range(100):
        nested = [nested]
    message.sampling_params.custom_params = {"a": nested}
    upstream.send(message)
    upstream.send(generate("r2", "still served"))
    received: list[Any] = []
    while not received:
        received += receive(upstream)
    assert [request.request_id for request in received] == ["r2"]
    assert abort_reason(upstream.output())[0] == 400


def test_an_unreadable_batch_ends_each_of_its_requests(upstream: UpstreamFront) -> None:
    bad = generate("b", "x")
    bad.sampling_params.custom_params = {"a": [[[1]]]}
    upstream.send(io_struct.BatchTokenizedGenerateReqInput(batch=[generate("a", "x"), bad]))
    assert receive(upstream) == []
    assert upstream.output().rids == ["a", "b"]


# The last is an id that is not UTF-8.
UNREADABLE = [
    b"",
    b"\xc1",
    b"\x93",
    msgspec.msgpack.encode([1, 2, 3]),
    msgspec.msgpack.encode(["TokenizedGenerateReqInput", "x"]).replace(b"x", b"\xff"),
]


@pytest.mark.parametrize("payload", UNREADABLE)
def test_bytes_that_are_no_message_are_dropped(upstream: UpstreamFront, payload: bytes) -> None:
    upstream.send_bytes(payload)
    assert receive(upstream) == []
    assert rids_of(payload) == []


def test_a_pickle_is_never_loaded(upstream: UpstreamFront) -> None:
    upstream.send(io_struct.PickleWrapper(b"cos\nsystem\n(S'exit 1'\ntR."))
    assert receive(upstream) == []


def test_tensors_are_not_accepted_even_where_any_value_is(upstream: UpstreamFront) -> None:
    upstream.send(io_struct.DumperControlReqInput(method="x", body={"a": torch.zeros(1)}))
    upstream.send(io_struct.DumperControlReqInput(method="y", body={"a": 1}))
    received: list[Any] = []
    while not received:
        received += receive(upstream)
    assert [control.message.method for control in received] == ["y"]


def test_a_double_of_a_live_request_does_not_end_it(upstream: UpstreamFront) -> None:
    take(upstream, "r1")
    upstream.send(generate("r1", "again"))
    assert receive(upstream) == []
    assert upstream.is_silent


def test_a_request_id_that_is_too_long_is_refused(upstream: UpstreamFront) -> None:
    upstream.send(generate("r" * 5000, "x"))
    assert receive(upstream) == []
    assert abort_reason(upstream.output())[0] == 400


BY_CLIENT = FinishReason("abort", message="aborted by the client")


def test_an_abort_names_the_live_request_and_no_other(upstream: UpstreamFront) -> None:
    first, _ = take(upstream, "1"), take(upstream, "11")
    upstream.send(io_struct.AbortReq(rid="1"))
    assert receive(upstream) == [AbortRequest((first,), BY_CLIENT)]
    upstream.send(io_struct.AbortReq(rid="unknown"))
    assert receive(upstream) == []


def test_abort_all_names_every_live_request(upstream: UpstreamFront) -> None:
    both = (take(upstream, "a"), take(upstream, "b"))
    upstream.send(io_struct.AbortReq(abort_all=True))
    assert receive(upstream) == [AbortRequest(both, BY_CLIENT)]
    reason = {"type": "abort", "message": "shutting down", "status_code": 503}
    upstream.send(io_struct.AbortReq(abort_all=True, finished_reason=reason))
    finish = FinishReason("abort", message="shutting down", status_code=503)
    assert receive(upstream) == [AbortRequest(both, finish)]


def test_a_control_message_is_handed_on(upstream: UpstreamFront) -> None:
    upstream.send(io_struct.FlushCacheReqInput())
    (received,) = receive(upstream)
    assert isinstance(received, ControlRequest)
    assert isinstance(received.message, io_struct.FlushCacheReqInput)


def test_an_embedding_request_is_refused(upstream: UpstreamFront) -> None:
    message = generate("e", "x")
    upstream.send(
        io_struct.TokenizedEmbeddingReqInput(
            rid="e",
            input_text="x",
            input_ids=message.input_ids,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=message.sampling_params,
        )
    )
    assert receive(upstream) == []
    assert "embeddings" in abort_reason(upstream.output())[1]


# Health


def test_a_health_check_of_an_idle_server_runs_like_any_request(upstream: UpstreamFront) -> None:
    assert take(upstream, "HEALTH_CHECK_1").request_id == "HEALTH_CHECK_1"


def test_a_health_check_of_a_busy_server_is_answered_by_the_next_step(
    upstream: UpstreamFront,
) -> None:
    request = take(upstream, "r1")
    request.state = RequestState.RUNNING
    upstream.send(generate("HEALTH_CHECK_1", "x"))
    assert receive(upstream) == []
    emit(upstream, request, "a")
    assert isinstance(upstream.reply(), io_struct.HealthCheckOutput)


def test_a_health_check_is_answered_while_a_stage_is_replaced(upstream: UpstreamFront) -> None:
    upstream.front.is_recovering = True
    upstream.send(generate("HEALTH_CHECK_1", "x"))
    assert receive(upstream) == []
    upstream.front.answer_health_checks()
    assert isinstance(upstream.reply(), io_struct.HealthCheckOutput)


def test_no_health_check_is_answered_for_a_step_that_does_not_come(
    upstream: UpstreamFront,
) -> None:
    take(upstream, "r1").state = RequestState.RUNNING
    upstream.send(generate("HEALTH_CHECK_1", "x"))
    receive(upstream)
    upstream.front.answer_health_checks()
    assert upstream.front._waiting_health_checks


def test_a_health_check_does_not_wait_for_a_grammar(upstream: UpstreamFront) -> None:
    upstream.send(generate("r1", "x", sampling={"regex": "a+"}))
    (constrained,) = receive(upstream)
    assert constrained.grammar == GrammarSpec("regex", "a+")
    assert upstream.front.live_requests == [constrained.request]
    assert take(upstream, "HEALTH_CHECK_1").request_id == "HEALTH_CHECK_1"


def test_two_grammars_are_a_400_and_no_request(upstream: UpstreamFront) -> None:
    upstream.send(generate("r1", "x", sampling={"regex": "a+", "json_schema": "{}"}))
    assert receive(upstream) == []
    status_code, message = abort_reason(upstream.output())
    assert (status_code, message[:11]) == (400, "only one of")


# Tokens out


def test_cached_tokens_are_told_by_where_they_were(upstream: UpstreamFront) -> None:
    """In upstream's form, which its OpenAI routes read."""

    def details() -> Any:
        emit(upstream, request, "x")
        return upstream.output().cached_tokens_details[0]

    request = take(upstream, text="abcdefgh", stream=True)
    assert details() is None
    request.cached_tokens, request.loaded_tokens = 7, 0
    assert details() == {"device": 7, "host": 0}
    upstream.front.storage_backend = "file"
    assert details() == {"device": 7, "host": 0, "storage": 0, "storage_backend": "file"}
    request.loaded_tokens = 3
    told = cached_tokens_details_from_dict(details())
    assert (told.device, told.host, told.storage, told.storage_backend) == (4, 0, 3, "file")
    upstream.front.storage_backend = None
    assert details() == {"device": 4, "host": 0, "storage": 3}
    upstream.front.storage_backend = HOST_BACKEND
    assert details() == {"device": 4, "host": 3}


def test_drafts_of_a_request_are_counted_in_upstreams_fields(upstream: UpstreamFront) -> None:
    request = take(upstream, stream=True)
    for drafted, right in ((3, 0), (2, 2), (4, 2)):
        request.drafts.note(drafted, right)
    emit(upstream, request, "x")
    told = upstream.output()
    assert (told.spec_verify_ct, told.spec_num_correct_drafts) == ([3], [4])
    assert told.spec_num_cap_tokens == [3 + 9]
    assert told.spec_correct_drafts_histogram == [[1, 0, 2]]


def test_a_stream_gets_each_step_and_the_prompt_tail_once(upstream: UpstreamFront) -> None:
    request = take(upstream, text="abcdefgh")
    request.cached_tokens, request.num_retractions = 4, 1
    emit(upstream, request, "x")
    first = upstream.output()
    assert TOKENIZER.decode(list(first.decode_ids[0])) == "defghx"
    assert first.read_offsets == [5]
    assert (first.prompt_tokens, first.completion_tokens) == ([8], [1])
    assert (first.cached_tokens, first.retraction_counts) == ([4], [1])
    emit(upstream, request, "y", FinishReason("length"))
    last = upstream.output()
    assert TOKENIZER.decode(list(last.decode_ids[0])) == "y"
    assert TOKENIZER.decode(list(last.output_ids[0])) == "y"
    assert last.finished_reasons == [{"type": "length", "length": 2}]
    assert upstream.front.live_requests == []


def test_a_request_that_does_not_stream_is_sent_at_its_end(upstream: UpstreamFront) -> None:
    request = take(upstream, stream=False)
    emit(upstream, request, "a")
    assert upstream.is_silent
    emit(upstream, request, "b", FinishReason("stop", matched=2))
    assert TOKENIZER.decode(list(upstream.output().output_ids[0])) == "ab"


def test_a_long_silent_request_shows_now_and_then_that_it_lives(upstream: UpstreamFront) -> None:
    request = take(upstream, stream=False)
    for _ in range(49):
        emit(upstream, request, "a")
    assert upstream.is_silent
    emit(upstream, request, "a")
    assert upstream.output().completion_tokens == [50]


def test_the_stream_interval_holds_after_the_first_token(upstream: UpstreamFront) -> None:
    request = take(upstream, sampling={"stream_interval": 3})
    sizes = []
    for _ in range(7):
        emit(upstream, request, "a")
        if not upstream.is_silent:
            sizes.append(len(upstream.output().output_ids[0]))
    assert sizes == [1, 3, 3]


def test_a_stream_waits_while_a_stop_string_may_be_beginning(upstream: UpstreamFront) -> None:
    request = take(upstream, sampling={"stop": ["end"]})
    emit(upstream, request, "a")
    assert TOKENIZER.decode(list(upstream.output().output_ids[0])) == "a"
    for letter in "en":
        emit(upstream, request, letter)
        assert upstream.is_silent
    emit(upstream, request, "x")
    assert TOKENIZER.decode(list(upstream.output().output_ids[0])) == "enx"


def test_the_rows_of_one_step_share_a_message(upstream: UpstreamFront) -> None:
    requests = [take(upstream, rid) for rid in "abc"]
    for request in requests:
        request.output_ids.append(50)
    upstream.front.send_events([TokenEvent(request, (50,), None) for request in requests])
    assert upstream.output().rids == ["a", "b", "c"]
    assert upstream.is_silent


def test_a_request_of_no_tokens_finishes_after_its_prompt(upstream: UpstreamFront) -> None:
    request = take(upstream, sampling={"max_new_tokens": 0})
    emit(upstream, request, "", FinishReason("length"))
    output = upstream.output()
    assert output.finished_reasons == [{"type": "length", "length": 0}]
    assert list(output.output_ids[0]) == []


def test_a_request_that_the_scheduler_refuses_gets_the_errors_status(
    upstream: UpstreamFront,
) -> None:
    request = take(upstream)
    upstream.front.refuse(request, QueueFullError("2 requests wait; --max-queued-requests is 2"))
    assert abort_reason(upstream.output()) == (503, "2 requests wait; --max-queued-requests is 2")


def test_an_ended_request_is_ended_once(upstream: UpstreamFront) -> None:
    request = take(upstream)
    upstream.front.send_finish(request, FinishReason("abort", message="gone"))
    assert abort_reason(upstream.output()) == (None, "gone")
    upstream.front.send_finish(request, FinishReason("abort", message="gone again"))
    emit(upstream, request, "late")
    assert upstream.is_silent


# What upstream's Detokenizer makes of it


def texts(upstream: UpstreamFront, detokenizer: DetokenizerManager) -> list[str]:
    return detokenizer.handle_batch_token_id_out(upstream.output()).output_strs


@pytest.fixture
def detokenizer() -> DetokenizerManager:
    """Upstream's, without its sockets."""
    manager = DetokenizerManager.__new__(DetokenizerManager)
    manager.tokenizer = TOKENIZER
    manager.vocab_size = len(TOKENIZER)
    manager.decode_status = {}
    manager.disable_tokenizer_batch_decode = False
    manager.is_tool_call_parser_gpt_oss = False
    manager.tool_close_token_ids = set()
    return manager


def test_a_stream_reads_right_through_characters_split_over_tokens(
    upstream: UpstreamFront, detokenizer: DetokenizerManager
) -> None:
    request = take(upstream, text="é")
    text = ""
    for token in TOKENIZER.encode("a→ö b"):
        request.output_ids.append(token)
        upstream.front.send_events([TokenEvent(request, (token,), None)])
        text += texts(upstream, detokenizer)[0]
    upstream.front.send_finish(request, FinishReason("length"))
    assert text + texts(upstream, detokenizer)[0] == "a→ö b"


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_and_what_follows_never_reach_the_user(
    upstream: UpstreamFront, detokenizer: DetokenizerManager, stream: bool
) -> None:
    request = take(upstream, stream=stream, sampling={"stop": ["end"]})
    text = ""
    for letter in "the end":
        emit(upstream, request, letter)
        if not upstream.is_silent:
            text += texts(upstream, detokenizer)[0]
    assert text == "the "


def test_a_matched_stop_token_is_trimmed(
    upstream: UpstreamFront, detokenizer: DetokenizerManager
) -> None:
    request = take(upstream, sampling={"skip_special_tokens": False})
    emit(upstream, request, "ok")
    text = texts(upstream, detokenizer)[0]
    request.output_ids.append(2)
    upstream.front.send_events([TokenEvent(request, (2,), FinishReason("stop", matched=2))])
    assert text + texts(upstream, detokenizer)[0] == "ok"


def test_a_refusal_passes_the_detokenizer_without_text(
    upstream: UpstreamFront, detokenizer: DetokenizerManager
) -> None:
    upstream.send(generate("r1", []))
    assert receive(upstream) == []
    assert texts(upstream, detokenizer) == [""]
