"""Events as a Chrome trace, which chrome://tracing and ui.perfetto.dev show: a track for the
scheduler, one for each stage, one for layer moves and one for recoveries; a change of the throttle
is a mark.

The format is the JSON array of "Trace Event Format" (Google, 2016): ph X is a span, ts and dur in
microseconds; ph i of scope p is an instant, drawn across all tracks.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from sgl_pipeline.records.event import Event
from sgl_pipeline.records.move_record import MoveRecord
from sgl_pipeline.records.recovery_record import RecoveryRecord
from sgl_pipeline.records.throttle_change import ThrottleChange
from sgl_pipeline.records.trace import StepRecord

_PROCESS = 1
_SCHEDULER_TRACK = 0
_MOVES_TRACK = 1_000_000  # below those of all stages
_RECOVERIES_TRACK = 1_000_001
_END = b"\n]\n"


class ChromeTraceWriter:
    """A `trace.EventWriter`. After each `flush` the file is whole, whatever ends the process."""

    def __init__(self, path: str | Path) -> None:
        self._file: IO[bytes] = Path(path).open("wb")  # noqa: SIM115 - closed by `close`
        self._encoder = msgspec.json.Encoder()
        self._num_tracks = 0
        self._has_moves_track = False
        self._has_recoveries_track = False
        self._drawn: dict[type, Callable[[Any], Iterable[dict[str, Any]]]] = {
            StepRecord: self._step,
            MoveRecord: self._move,
            ThrottleChange: _change,
            RecoveryRecord: self._recovery,
        }
        self._file.write(b"[" + self._encoder.encode(_name("process_name", "sgl_pipeline", 0)))
        self._file.write(_END)

    def write(self, event: Event) -> None:
        """Draws `event`, if its kind is drawn."""
        if (draw := self._drawn.get(type(event))) is not None:
            self._append(draw(event))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _append(self, drawing: Iterable[dict[str, Any]]) -> None:
        self._file.seek(-len(_END), 2)
        for one in drawing:
            self._file.write(b",\n" + self._encoder.encode(one))
        self._file.write(_END)

    def _step(self, record: StepRecord) -> Iterator[dict[str, Any]]:
        yield from self._new_tracks(record)
        yield from _step_spans(record)

    def _move(self, record: MoveRecord) -> Iterator[dict[str, Any]]:
        if not self._has_moves_track:
            self._has_moves_track = True
            yield _name("thread_name", "layer moves", _MOVES_TRACK)
        yield from _move_spans(record)

    def _recovery(self, record: RecoveryRecord) -> Iterator[dict[str, Any]]:
        if not self._has_recoveries_track:
            self._has_recoveries_track = True
            yield _name("thread_name", "recoveries", _RECOVERIES_TRACK)
        yield from _recovery_spans(record)

    def _new_tracks(self, record: StepRecord) -> Iterator[dict[str, Any]]:
        """Names for the tracks that appear for the first time: all, in the first record."""
        tracks = ["scheduler", *(f"stage {stage}" for stage in range(len(record.stages)))]
        for track in range(self._num_tracks, len(tracks)):
            yield _name("thread_name", tracks[track], track)
        self._num_tracks = max(self._num_tracks, len(tracks))


def _step_spans(record: StepRecord) -> Iterator[dict[str, Any]]:
    """The spans of one step. The spans before a stage computes are its bubbles; one that takes no
    time is left out."""
    carried = {
        "prefill_tokens": record.prefill_tokens,
        "decodes": record.decodes,
        "draft_tokens": record.draft_tokens,
        "accepted_draft_tokens": record.accepted_draft_tokens,
    }
    decided = {
        "waiting_tokens": record.waiting_tokens,
        "free_page_share": record.free_page_share,
        "prefill_budget": record.prefill_budget,
        "decode_budget": record.decode_budget,
        "bound_by": record.bound_by,
    }
    step = f"step {record.step_id}"
    schedule_end_s = record.scheduled_s + record.schedule_ms * 1e-3
    result_end_s = record.finished_s + record.result_ms * 1e-3
    yield _span(f"schedule {step}", 0, record.scheduled_s, schedule_end_s, carried | decided)
    yield _span(f"book {step}", 0, record.finished_s, result_end_s, {"ended": len(record.ended)})
    for track, timing in enumerate(record.stages, 1):
        decided_s = max(timing.free_s, record.scheduled_s)
        spans = (
            ("metadata", decided_s, timing.inputs_s),
            ("activations", timing.inputs_s, timing.activations_s),
            (step, timing.activations_s, timing.done_s),
            ("send", timing.done_s, timing.sent_s),
        )
        for name, start_s, end_s in spans:
            if end_s > start_s:
                yield _span(name, track, start_s, end_s, carried if name == step else {})


def _change(record: ThrottleChange) -> Iterator[dict[str, Any]]:
    """A change of the throttle across all tracks."""
    knobs = ", ".join(f"{name} {value}" for name, value in record.after.items())
    args = {
        "cause": record.cause,
        "first_step": record.first_step,
        "before": record.before,
        "after": record.after,
    }
    yield _instant(f"throttle: {knobs}", record.changed_s, args, _SCHEDULER_TRACK)


def _move_spans(record: MoveRecord) -> Iterator[dict[str, Any]]:
    """A move that is over: its preparation, the switch across all tracks, and what followed."""
    assert record.ended_s is not None
    args = {
        "wanted_by": record.wanted_by,
        "before": record.before,
        "after": record.after,
        "outcome": record.outcome.value,
        "reason": record.reason,
        "copied_bytes": record.copied_bytes,
        "patched_bytes": record.patched_bytes,
    }
    after = ",".join(map(str, record.after))
    switched_s, ended_s = record.switched_s, record.ended_s
    prepared_s = ended_s if switched_s is None else switched_s
    yield _span(f"prepare {after}", _MOVES_TRACK, record.began_s, prepared_s, args)
    if switched_s is None:
        yield _instant(f"abandon {after}", ended_s, args)
    else:
        yield _instant(f"switch to {after}", switched_s, args)
        yield _span(f"patch {after}", _MOVES_TRACK, switched_s, ended_s, args)


def _recovery_spans(record: RecoveryRecord) -> Iterator[dict[str, Any]]:
    """A recovery that is over: the loss across all tracks, and the time without a step."""
    assert record.ended_s is not None
    args = {
        "lost": [msgspec.to_builtins(lost) for lost in record.lost],
        "incarnation": record.incarnation,
        "requests": record.num_requests,
        "tokens": record.num_tokens,
        "stages_before": record.stages_before,
        "num_stages": record.num_stages,
        "replay_tokens": record.num_replay_tokens,
    }
    yield _instant(record.what_happened, record.began_s, args)
    name = f"recovery: {record.what_happened}"
    yield _span(name, _RECOVERIES_TRACK, record.began_s, record.ended_s, args)


def _instant(
    name: str, moment_s: float, args: dict[str, Any], track: int = _MOVES_TRACK
) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "i",
        "s": "p",
        "ts": moment_s * 1e6,
        "pid": _PROCESS,
        "tid": track,
        "args": args,
    }


def _span(
    name: str, track: int, start_s: float, end_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    start_us, end_us = start_s * 1e6, end_s * 1e6
    return {
        "name": name,
        "ph": "X",
        "ts": start_us,
        "dur": end_us - start_us,
        "pid": _PROCESS,
        "tid": track,
        "args": args,
    }


def _name(kind: str, name: str, track: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": _PROCESS, "tid": track, "args": {"name": name}}
