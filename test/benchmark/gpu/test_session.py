"""How a run of the GPU benchmark keeps to its time and survives what goes wrong."""

import pytest
import torch

from benchmark.gpu.checks import Check
from benchmark.gpu.session import Budget, Session, missing_kernel


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def session_of(seconds: float, clock: Clock) -> Session:
    return Session(
        device=torch.device("cpu"),
        models=["tiny"],
        depths=[1],
        extra_steps=[0],
        budget=Budget(seconds, clock),
        part="stages",
    )


def test_a_piece_begins_only_if_the_longest_of_its_kind_would_fit() -> None:
    clock = Clock()
    session = session_of(100.0, clock)

    def work(seconds: float) -> None:
        clock.now_s += seconds

    assert session.attempt("first", lambda: work(30), kind="stage", guess_s=60)
    assert session.attempt("second", lambda: work(20), kind="stage", guess_s=60)
    assert session.attempt("third", lambda: work(25), kind="stage", guess_s=60)
    assert not session.attempt("fourth", lambda: work(1), kind="stage", guess_s=60)
    assert session.attempt("another kind", lambda: work(1), kind="check", guess_s=20)
    (missed,) = session.not_measured
    assert (missed.what, missed.why) == ("fourth", "no time: 25 s left, about 30 needed")
    assert session.is_sound


def test_an_error_ends_its_piece_alone_and_is_kept_with_its_trace() -> None:
    session = session_of(100.0, Clock())

    def fail() -> None:
        raise ValueError("two\nlines")

    assert not session.attempt("bad", fail)
    assert session.attempt("good", lambda: None)
    (missed,) = session.not_measured
    assert missed.is_failure and missed.why == "ValueError: two lines"
    assert "in fail" in missed.trace
    assert not session.is_sound


def test_after_a_lost_gpu_nothing_else_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(100.0, Clock())

    def lose_the_gpu() -> None:
        monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
        monkeypatch.setattr("torch.cuda.synchronize", fail)
        fail()

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert not session.attempt("bad", lose_the_gpu)
    assert not session.attempt("later", lambda: None)
    assert [missed.what for missed in session.not_measured] == ["bad", "the GPU after bad", "later"]
    assert "lost" not in session.not_measured[0].why
    assert not session.is_sound


def test_everything_is_saved_as_soon_as_it_is_there() -> None:
    session = session_of(100.0, Clock())
    saved: list[tuple[int, int]] = []
    session.save = lambda one: saved.append((len(one.table("stages")), len(one.checks)))

    def work() -> None:
        session.book_row("stages", {"step_ms": 1.0})
        session.book_checks(Check("tokens", 0.0, 0.1))

    session.attempt("all of it", work)
    assert saved == [(1, 0), (1, 1), (1, 1)]


def test_what_there_was_no_time_for_is_saved_though_nothing_comes_after_it() -> None:
    session = session_of(10.0, Clock())
    saved: list[list[str]] = []
    session.save = lambda one: saved.append([missed.what for missed in one.not_measured])
    assert not session.attempt("long", lambda: None, guess_s=60)
    session.skip("what needs it", "it is missing")
    assert saved == [["long"], ["long", "what needs it"]]


def test_a_failed_check_makes_a_run_unsound() -> None:
    session = session_of(100.0, Clock())
    session.book_checks(Check("fine", 0.0, 0.1))
    assert session.is_sound
    session.book_checks(Check("wrong", 0.2, 0.1))
    assert not session.is_sound


class MissingJITCacheError(RuntimeError):
    def __init__(self) -> None:
        super().__init__("the required module is not found in the JIT cache")
        self.spec = type("Spec", (), {"name": "page"})


def test_a_missing_kernel_is_named_through_the_errors_it_became() -> None:
    def planned() -> None:
        try:
            raise MissingJITCacheError
        except RuntimeError as error:
            raise ValueError("FlashInfer cannot be used: FLASHINFER_DISABLE_JIT") from error

    with pytest.raises(ValueError, match="cannot be used") as caught:
        planned()
    assert missing_kernel(caught.value) == "page"
    # What a stage process reports is text alone.
    assert missing_kernel(RuntimeError("stage 0: MissingJITCacheError: no")) == "(not named)"
    assert missing_kernel(RuntimeError("out of memory")) == ""
