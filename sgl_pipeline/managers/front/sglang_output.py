"""Tokens and endings of requests, in the form that upstream's Detokenizer takes.

A malformed output message ends the TokenizerManager and the server with it, so messages are built
here from whole rows only: every list has one entry per row, and no request has two rows in one
message.
"""

from array import array
from dataclasses import dataclass
from typing import Any

from sglang.srt.managers.io_struct import BatchTokenIDOutput

from sgl_pipeline.args import HOST_BACKEND
from sgl_pipeline.managers.front.logprob_output import LogprobCursor, LogprobFields, logprob_columns
from sgl_pipeline.managers.front.reasoning_tokens import ReasoningCounter
from sgl_pipeline.managers.upstream.stop_text import StopTextCheck
from sgl_pipeline.managers.upstream.upstream_messages import GenerateMessage
from sgl_pipeline.requests import FinishReason, Request

# Prompt tokens that are decoded with the first output tokens, for spaces and split characters
# (upstream: schedule_batch.py, INIT_INCREMENTAL_DETOKENIZATION_OFFSET).
_CONTEXT_TOKENS = 5
# A request that does not stream still reports progress, each time after this many tokens (upstream:
# SGLANG_FORCE_STREAM_INTERVAL); the front counts on it for /health.
_SILENT_INTERVAL_TOKENS = 50
_TOKEN_IDS = "q"  # array typecode that upstream's decoder expects


@dataclass(frozen=True, slots=True)
class OutputRow:
    """One request's part of an output message. Token ids are those not sent before."""

    request_id: str
    finish: dict[str, Any] | None
    decode_ids: "array[int]"
    read_offset: int
    output_ids: "array[int]"
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    loaded_tokens: int = 0
    num_retractions: int = 0
    draft_steps_by_right: tuple[int, ...] = ()
    drafted_tokens: int = 0
    logprobs: LogprobFields | None = None


class OutputCursor:
    """The part of a request's output that has been sent, and how its user wants it sent."""

    def __init__(
        self,
        request: Request,
        message: GenerateMessage,
        default_interval: int,
        reasoning: ReasoningCounter,
    ) -> None:
        sampling = message.sampling_params
        self.request = request
        self._reasoning = reasoning
        self._interval = (
            (sampling.stream_interval or default_interval)
            if message.stream
            else _SILENT_INTERVAL_TOKENS
        )
        self._streams = message.stream
        self._skip_special_tokens = sampling.skip_special_tokens
        self._spaces = sampling.spaces_between_special_tokens
        self._no_stop_trim = sampling.no_stop_trim
        self._logprobs = None if request.logprobs is None else LogprobCursor(request)
        self._num_sent = 0
        self._has_sent = False

    def next_row(self, finish: FinishReason | None) -> OutputRow | None:
        """The row to send now; None when it is better to wait for more tokens."""
        if finish is None and not self._is_due():
            return None
        request = self.request
        new_ids = array(_TOKEN_IDS, request.output_ids[self._num_sent :])
        self._reasoning.add(new_ids)
        # Upstream's Req.init_incremental_detokenize: the first time, the prompt's last tokens lead.
        context = array(_TOKEN_IDS)
        if not self._has_sent:
            context.extend(request.prompt_ids[-_CONTEXT_TOKENS:])
        self._has_sent = True
        self._num_sent = len(request.output_ids)
        return OutputRow(
            request_id=request.request_id,
            finish=None if finish is None else finish_dict(finish, self._num_sent),
            decode_ids=context + new_ids,
            read_offset=min(_CONTEXT_TOKENS, len(request.prompt_ids)),
            output_ids=new_ids,
            skip_special_tokens=self._skip_special_tokens,
            spaces_between_special_tokens=self._spaces,
            no_stop_trim=self._no_stop_trim,
            prompt_tokens=len(request.prompt_ids),
            completion_tokens=self._num_sent,
            reasoning_tokens=self._reasoning.count,
            cached_tokens=request.cached_tokens,
            loaded_tokens=request.loaded_tokens,
            num_retractions=request.num_retractions,
            draft_steps_by_right=tuple(request.drafts.steps_by_right),
            drafted_tokens=request.drafts.drafted_tokens,
            logprobs=None if self._logprobs is None else self._logprobs.next_fields(new_ids),
        )

    def _is_due(self) -> bool:
        num_unsent = len(self.request.output_ids) - self._num_sent
        if num_unsent == 0:
            return False
        # The first token of a stream goes out at once.
        if num_unsent < self._interval and not (self._streams and not self._has_sent):
            return False
        check = self.request.stops.check_text
        return not (isinstance(check, StopTextCheck) and check.ends_in_partial_match)


def refusal_row(request_id: str, message: str, status_code: int | None) -> OutputRow:
    """The only row of a request that was never taken in."""
    finish = FinishReason("abort", message=message, status_code=status_code)
    return OutputRow(request_id, finish_dict(finish, 0), array(_TOKEN_IDS), 0, array(_TOKEN_IDS))


def finish_dict(finish: FinishReason, num_output_tokens: int) -> dict[str, Any]:
    """Upstream's form of a finish reason (schedule_batch.py, BaseFinishReason.to_json)."""
    if finish.kind == "length":
        return {"type": "length", "length": num_output_tokens}
    if finish.kind == "stop":
        # The Detokenizer cuts the last token for a matched id: there must be one.
        trimmable = not isinstance(finish.matched, int) or num_output_tokens > 0
        return {"type": "stop", "matched": finish.matched if trimmable else None}
    return {
        "type": "abort",
        "message": finish.message or "Aborted",
        "status_code": finish.status_code,
        "err_type": None,
    }


def output_message(rows: list[OutputRow], storage_backend: str | None = None) -> BatchTokenIDOutput:
    """One message of all `rows`, which must be of different requests.

    Args:
        storage_backend: the store that is attached, if any.
    """
    assert len({row.request_id for row in rows}) == len(rows), "one row per request and message"
    return BatchTokenIDOutput(
        rids=[row.request_id for row in rows],
        http_worker_ipcs=[None] * len(rows),
        finished_reasons=[row.finish for row in rows],
        decoded_texts=[""] * len(rows),
        decode_ids=[row.decode_ids for row in rows],
        read_offsets=[row.read_offset for row in rows],
        output_ids=[row.output_ids for row in rows],
        skip_special_tokens=[row.skip_special_tokens for row in rows],
        spaces_between_special_tokens=[row.spaces_between_special_tokens for row in rows],
        no_stop_trim=[row.no_stop_trim for row in rows],
        prompt_tokens=[row.prompt_tokens for row in rows],
        reasoning_tokens=[row.reasoning_tokens for row in rows],
        completion_tokens=[row.completion_tokens for row in rows],
        cached_tokens=[row.cached_tokens for row in rows],
        cached_tokens_details=[cached_tokens_details(row, storage_backend) for row in rows],
        retraction_counts=[row.num_retractions for row in rows],
        **draft_columns(rows),
        **logprob_columns([row.logprobs for row in rows]),
        output_token_entropy_val=None,
        output_token_sampling_mask=None,
        output_hidden_states=None,
        routed_experts=None,
        indexer_topk=None,
        placeholder_tokens_idx=None,
        placeholder_tokens_val=None,
    )


def draft_columns(rows: list[OutputRow]) -> dict[str, list[Any]]:
    """Upstream's counts of drafts (batch_result_processor.py, _resolve_spec_v2_tokens). A step that
    checked a draft is a verification, its rows are the window."""
    histograms = [[*row.draft_steps_by_right] for row in rows]
    steps = [sum(histogram) for histogram in histograms]
    return {
        "spec_verify_ct": steps,
        "spec_num_correct_drafts": [
            sum(right * number for right, number in enumerate(one)) for one in histograms
        ],
        "spec_num_cap_tokens": [
            number + row.drafted_tokens for number, row in zip(steps, rows, strict=True)
        ],
        "spec_correct_drafts_histogram": histograms,
    }


def cached_tokens_details(
    row: OutputRow, storage_backend: str | None
) -> dict[str, int | str] | None:
    """Upstream's breakdown by tier (output_streamer.py, get_cached_tokens_details): tokens that the
    stages' pools had, and those that host memory or a store had."""
    if not row.cached_tokens:
        return None
    in_pools = row.cached_tokens - row.loaded_tokens
    if storage_backend == HOST_BACKEND:
        return {"device": in_pools, "host": row.loaded_tokens}
    details: dict[str, int | str] = {"device": in_pools, "host": 0}
    if row.loaded_tokens or storage_backend is not None:
        details["storage"] = row.loaded_tokens
    if storage_backend is not None:
        details["storage_backend"] = storage_backend
    return details
