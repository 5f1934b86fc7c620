import asyncio
import copy
import threading
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import tokenizer_manager
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager

from sgl_pipeline.managers.entrance import front_guard
from sgl_pipeline.managers.entrance.front_guard import GuardedTokenizerManager
from sgl_pipeline.managers.upstream.request_checks import RefusedRequestError


def request(text: Any = "x", **sampling: Any) -> GenerateReqInput:
    return GenerateReqInput(text=text, sampling_params=sampling)


def aborted(status_code: int | None) -> dict[str, Any]:
    finish = {"type": "abort", "message": "too long", "status_code": status_code}
    return {"text": "", "meta_info": {"finish_reason": finish}}


def replies_of(*replies: dict[str, Any] | Exception, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the guarded manager passes on when upstream's yields `replies`."""

    async def scripted(self: Any, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
            yield reply

    monkeypatch.setattr(TokenizerManager, "generate_request", scripted)
    manager = GuardedTokenizerManager.__new__(GuardedTokenizerManager)
    manager.context_len = 100

    async def collect() -> list[Any]:
        return [reply async for reply in manager.generate_request(request())]

    return asyncio.run(collect())


def test_a_request_that_upstream_trips_over_is_refused_and_a_late_error_is_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RefusedRequestError, match="cannot be read: wibble"):
        replies_of(TypeError("wibble"), monkeypatch=monkeypatch)
    with pytest.raises(TypeError):
        replies_of({"text": "a"}, TypeError("wibble"), monkeypatch=monkeypatch)


def test_a_refusal_before_any_token_is_an_error_even_for_a_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="too long") as caught:
        replies_of(aborted(503), monkeypatch=monkeypatch)
    assert getattr(caught.value, "status_code", None) == 503


def test_an_error_in_mid_stream_carries_the_status_that_upstream_looks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token = {"text": "a", "meta_info": {"finish_reason": None}}
    passed = replies_of(token, aborted(500), monkeypatch=monkeypatch)
    assert passed[0] is token
    status = passed[1]["meta_info"]["finish_reason"]["status_code"]
    assert isinstance(status, HTTPStatus) and status == 500


def test_an_abort_by_the_client_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(replies_of(aborted(None), monkeypatch=monkeypatch)) == 1


def test_upstreams_bootstrap_server_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        TokenizerManager, "__init__", lambda self, *arguments, **more: asked.update(more)
    )
    GuardedTokenizerManager(None, None)
    assert asked == {"start_pd_bootstrap_service": False}


@pytest.mark.parametrize("mode", [*DisaggregationMode])
def test_a_decode_server_leaves_log_probabilities_of_the_prompt_to_prefill(
    mode: DisaggregationMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[GenerateReqInput] = []

    async def noted(self: Any, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        passed.append(obj)
        yield {"text": "a"}

    monkeypatch.setattr(TokenizerManager, "generate_request", noted)
    manager = GuardedTokenizerManager.__new__(GuardedTokenizerManager)
    manager.context_len, manager.disaggregation_mode = 100, mode
    route = SimpleNamespace(url=SimpleNamespace(path="/generate"))
    fields = {"bootstrap_host": "h", "bootstrap_room": 7, "logprob_start_len": 0}
    asked = GenerateReqInput(text="x", sampling_params={"n": 2}, **fields)

    async def run() -> None:
        async for _ in manager.generate_request(asked, route):
            pass

    asyncio.run(run())
    (sent,) = passed
    assert sent.bootstrap_room == [7, 8] and sent.text == ["x", "x"]
    assert sent.logprob_start_len == (None if mode is DisaggregationMode.DECODE else 0)


class _Tokenizer:
    """Notes the thread that it runs in."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def encode(self, text: str) -> list[int]:
        self.threads.append(threading.current_thread())
        return [5]


def test_a_long_text_is_tokenized_beside_the_event_loop() -> None:
    manager = GuardedTokenizerManager.__new__(GuardedTokenizerManager)
    manager.tokenizer = _Tokenizer()
    manager.async_dynamic_batch_tokenizer = None
    manager.model_config = SimpleNamespace(is_embedding_gemma=False)
    for text in ("x", "x" * front_guard.LONG_TEXT_CHARACTERS):
        assert asyncio.run(manager._tokenize_texts(text)) == ([5], None)
    short, long = manager.tokenizer.threads
    assert short is threading.main_thread() and long is not short


def manager_of_one(stream: bool) -> tuple[GuardedTokenizerManager, Any, ReqState]:
    """A manager that waits for a single request, which it also returns, with its state."""
    manager: Any = GuardedTokenizerManager.__new__(GuardedTokenizerManager)
    asked = SimpleNamespace(rid="r", stream=stream, background=False, lora_path=None)
    times = SimpleNamespace(response_sent_to_client_time=1.0)
    state = ReqState([], False, asyncio.Event(), asked, times)
    manager.rid_to_state = {"r": state}
    manager.incremental_streaming_output = False
    manager.enable_lora = False
    manager.request_logger = SimpleNamespace(
        log_requests=False, log_finished_request=lambda *_, **__: None
    )
    manager.request_metrics_exporter_manager = SimpleNamespace(exporter_enabled=lambda: False)
    return manager, asked, state


def reply(text: str, finish: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"text": text, "meta_info": {"id": "r", "finish_reason": finish}}


STOP = {"type": "stop", "matched": None}
# What comes at once, each time when the stream waits again.
ARRIVALS = {
    "one by one": [[reply("a")], [reply("b")], [reply("c", STOP)]],
    "all together": [[reply("a"), reply("b"), reply("c", STOP)]],
    "the last two together": [[reply("a")], [reply("b"), reply("c", STOP)]],
    "a single one": [[reply("a", STOP)]],
    "an error at once": [[aborted(503)]],
    "an error in the middle": [[reply("a")], [reply("b")], [aborted(500)]],
    "an abort": [[reply("a")], [aborted(None)]],
}


async def replies_to(
    wait: Callable[..., AsyncIterator[Any]], arrivals: list[list[dict[str, Any]]], at_once: bool
) -> list[Any]:
    """The replies that `wait` gives for the arrivals.

    Args:
        at_once: outputs arrive while the reply before is handled, not while the stream waits.
    """
    manager, asked, state = manager_of_one(stream=True)
    state.obj = asked
    left = copy.deepcopy(arrivals)

    def arrive() -> None:
        state.out_list += left.pop(0)
        state.finished = not left
        state.event.set()

    async def arrive_later() -> None:
        for _ in arrivals if not at_once else [()]:
            await asyncio.sleep(0.01)
            arrive()

    arriving = asyncio.create_task(arrive_later())
    replies = []
    async for one in wait(manager, asked, SimpleNamespace()):
        replies.append(copy.deepcopy(one))
        if at_once and left:
            arrive()
    await arriving
    return replies


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("name", ARRIVALS)
def test_a_streams_replies_are_upstreams(name: str, at_once: bool) -> None:
    both = [
        asyncio.run(replies_to(wait, ARRIVALS[name], at_once))
        for wait in (
            TokenizerManager._wait_one_response,
            GuardedTokenizerManager._wait_one_response,
        )
    ]
    assert both[0] == both[1] != []


@pytest.mark.parametrize("logs", [False, True])
def test_a_stream_that_has_begun_waits_without_a_timer_for_each_token(
    logs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--log-requests`, upstream's wait is kept: it knows the headers to log at the end."""

    wait_for, num_timers = asyncio.wait_for, 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal num_timers
        num_timers += 1
        return wait_for(*args, **options)

    async def timers_of_a_wait() -> int:
        manager, asked, state = manager_of_one(stream=True)
        manager.request_logger.log_requests = logs
        replies = manager._wait_one_response(asked, SimpleNamespace())
        state.out_list.append(reply("a"))
        state.event.set()
        await anext(replies)
        before = num_timers
        waiting = asyncio.ensure_future(anext(replies))
        for _ in range(3):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return num_timers - before

    monkeypatch.setattr(tokenizer_manager.asyncio, "wait_for", counted)
    assert asyncio.run(timers_of_a_wait()) == (1 if logs else 0)


def test_a_client_that_leaves_before_the_first_token_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizer_manager, "_REQUEST_STATE_WAIT_TIMEOUT", 0.01)
    aborts: list[str] = []

    async def has_left() -> bool:
        return True

    async def wait() -> None:
        manager, asked, _ = manager_of_one(stream=True)
        manager.abort_request = aborts.append
        request = SimpleNamespace(is_disconnected=has_left)
        await anext(manager._wait_one_response(asked, request))

    with pytest.raises(ValueError, match="disconnected"):
        asyncio.run(wait())
    assert aborts == ["r"]
