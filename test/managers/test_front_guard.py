import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.load_snapshot import (
    LoadSnapshot,
    ShmLoadSnapshotReader,
    ShmLoadSnapshotWriter,
)
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sgl_pipeline.managers.front_guard import (
    MAX_SAMPLES_PER_PROMPT,
    GuardedTokenizerManager,
    RefusedRequestError,
    check_sequences,
)


def request(text: Any = "x", **sampling: Any) -> GenerateReqInput:
    return GenerateReqInput(text=text, sampling_params=sampling)


@pytest.mark.parametrize("samples", [0, -1, MAX_SAMPLES_PER_PROMPT + 1, 10**9, "3", 1.5])
def test_the_number_of_samples_is_bounded(samples: Any) -> None:
    with pytest.raises(RefusedRequestError, match="n must be between"):
        check_sequences(request(n=samples))


def test_prompts_times_samples_are_bounded_together() -> None:
    with pytest.raises(RefusedRequestError, match="sequences"):
        check_sequences(request(["x"] * 200, n=100))
    check_sequences(request(["x"] * 100, n=100))


def test_the_token_ids_of_one_prompt_are_not_many_prompts() -> None:
    check_sequences(GenerateReqInput(input_ids=[1] * 20_000, sampling_params={"n": 2}))


def test_a_stop_regex_is_refused_before_upstream_compiles_it() -> None:
    with pytest.raises(RefusedRequestError, match="stop_regex"):
        check_sequences(request(stop_regex="("))


def test_a_client_cannot_claim_that_its_parameters_were_checked() -> None:
    unchecked = {"is_normalized": True, "temperature": 1e-60, "stop_regex_strs": "("}
    with pytest.raises(RefusedRequestError, match="is_normalized"):
        check_sequences(GenerateReqInput(text="a", sampling_params=unchecked))


def test_sampling_params_per_prompt_are_all_checked() -> None:
    several = GenerateReqInput(text=["a", "b"], sampling_params=[{}, {"n": 10**6}])
    with pytest.raises(RefusedRequestError):
        check_sequences(several)
    with pytest.raises(RefusedRequestError, match="object"):
        check_sequences(GenerateReqInput(text="a", sampling_params=["n"]))  # type: ignore[list-item]


def aborted(status_code: int | None) -> dict[str, Any]:
    finish = {"type": "abort", "message": "too long", "status_code": status_code}
    return {"text": "", "meta_info": {"finish_reason": finish}}


def replies_of(*replies: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the guarded manager passes on when upstream's yields `replies`."""

    async def scripted(self: Any, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        for reply in replies:
            yield reply

    monkeypatch.setattr(TokenizerManager, "generate_request", scripted)
    manager = GuardedTokenizerManager.__new__(GuardedTokenizerManager)

    async def collect() -> list[Any]:
        return [reply async for reply in manager.generate_request(request())]

    return asyncio.run(collect())


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


def test_loads_are_read_and_an_unknown_section_is_an_error_in_time(tmp_path: Path) -> None:
    path = str(tmp_path / "loads")
    manager = GuardedTokenizerManager.__new__(GuardedTokenizerManager)
    manager.auto_create_handle_loop = lambda: None
    manager.load_snapshot_reader = ShmLoadSnapshotReader(path, dp_size=1)
    assert asyncio.run(manager.get_loads()) == []
    writer = ShmLoadSnapshotWriter(path, dp_size=1, dp_rank=0)
    writer.write(LoadSnapshot(num_waiting_reqs=3))
    (load,) = asyncio.run(manager.get_loads(["core"]))
    assert load.num_waiting_reqs == 3
    with pytest.raises(ValueError, match="include: everything"):
        asyncio.run(manager.get_loads(["everything"]))
    writer.close()
