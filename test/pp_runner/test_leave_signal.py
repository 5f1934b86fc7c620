"""The first SIGTERM of a worker that serves is a wish, noted once; the second one ends it."""

import os
import signal

from sgl_pipeline.pp_runner.leave_signal import LeaveSignal


def test_the_first_is_noted_and_the_second_is_not_caught() -> None:
    before = signal.getsignal(signal.SIGTERM)
    leave = LeaveSignal()
    try:
        assert signal.getsignal(signal.SIGTERM) == before  # nothing to hand over yet
        leave.listen()
        assert not leave.take()
        os.kill(os.getpid(), signal.SIGTERM)
        assert leave.take() and not leave.take()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        leave.listen()  # for another stage
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
