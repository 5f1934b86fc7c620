import asyncio
import threading
from collections.abc import AsyncIterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

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
