"""The way of pages between two stages, over real sockets."""

import errno
from pathlib import Path

import pytest
import torch

from sgl_pipeline.pp_runner.layer_moves.move_site import Parcel, StageGone
from sgl_pipeline.pp_runner.links.host_link import SharedMemory
from sgl_pipeline.pp_runner.links.page_link import MAX_UNREAD, StagePageLinks

ROW_BYTES = 48


def rows_of(value: int, count: int = 5) -> Parcel[torch.Tensor]:
    rows = torch.full((count, ROW_BYTES), value, dtype=torch.uint8)
    return Parcel(rows, rows.nbytes, is_last=False)


def both_ends(directory: Path):  # type: ignore[no-untyped-def]
    source, target = (
        StagePageLinks((f"unix:{directory}",) * 2, stage, ROW_BYTES, "") for stage in (0, 1)
    )
    return source.sender(4, 1), lambda: target.receiver(4, 0)


def test_parcels_arrive_in_order_and_the_last_says_so(tmp_path: Path) -> None:
    sender, open_receiver = both_ends(tmp_path)
    receiver = open_receiver()
    assert receiver.receive(0.0) is None
    for value in (1, 2):
        sender.send(rows_of(value, count=value))
    sender.send(Parcel(None, 0, is_last=True))
    for value in (1, 2):
        parcel = receiver.receive(1.0)
        assert torch.equal(parcel.rows, rows_of(value, count=value).rows)
        assert not parcel.is_last
    assert receiver.receive(1.0) == Parcel(None, 0, is_last=True)
    # The source may close now or after what its socket still holds was read.
    sender.close()
    with pytest.raises(StageGone):
        receiver.receive(1.0)
    receiver.close()


def test_a_source_waits_for_a_target_that_does_not_listen_yet(tmp_path: Path) -> None:
    sender, open_receiver = both_ends(tmp_path)
    assert not sender.can_send()
    receiver = open_receiver()
    assert sender.can_send()
    sender.send(rows_of(3))
    assert receiver.receive(1.0) is not None
    sender.close()
    receiver.close()


def test_a_source_does_not_run_ahead_of_its_target(tmp_path: Path) -> None:
    sender, open_receiver = both_ends(tmp_path)
    receiver = open_receiver()
    for value in range(MAX_UNREAD):
        assert sender.can_send()
        sender.send(rows_of(value))
    assert not sender.can_send()
    # A buffer comes back when the next one is asked for.
    assert receiver.receive(1.0) is not None
    assert not sender.can_send()
    assert receiver.receive(1.0) is not None
    assert sender.can_send()
    sender.close()
    receiver.close()


def test_what_is_sent_to_a_target_that_has_gone_is_dropped(tmp_path: Path) -> None:
    sender, open_receiver = both_ends(tmp_path)
    receiver = open_receiver()
    sender.send(rows_of(1))
    assert receiver.receive(1.0) is not None
    receiver.close()
    for _ in range(3):
        sender.send(rows_of(2))
    sender.close()


def test_a_target_has_room_again_when_it_has_taken_parcels(tmp_path: Path) -> None:
    sender, open_receiver = both_ends(tmp_path)
    receiver = open_receiver()
    for value in range(MAX_UNREAD):
        assert sender.has_room()
        sender.send(rows_of(value))
    assert receiver.receive(1.0) is not None
    assert not sender.has_room()
    # A buffer comes back when the next one is asked for.
    assert receiver.receive(1.0) is not None
    assert sender.has_room()
    sender.close()
    receiver.close()


def test_a_target_that_has_gone_has_room(tmp_path: Path) -> None:
    sender, open_receiver = both_ends(tmp_path)
    receiver = open_receiver()
    for value in range(MAX_UNREAD):
        sender.send(rows_of(value))
    receiver.close()
    for _ in range(2):  # the system reports the loss of unread parcels once
        assert sender.has_room()
    sender.close()


def test_a_parcel_for_which_there_is_no_memory_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: SharedMemory, num_rows: int) -> tuple[torch.Tensor, int]:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(SharedMemory, "make", fail)
    sender, open_receiver = both_ends(tmp_path)
    receiver = open_receiver()
    with pytest.raises(OSError, match="too many open files"):
        sender.send(rows_of(1))
    sender.close()
    receiver.close()
