"""Which transfer comes next, in virtual time. Numbers are powers of two, so sums are exact."""

import re
from array import array
from random import Random
from typing import Any

import msgspec
import pytest
from support.page_transfers import load_order, save_order

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.object_layers import Cuts
from sgl_pipeline.pp_runner.page_store import transfer_jobs
from sgl_pipeline.pp_runner.page_store.transfer_jobs import (
    CATCH_UP_S,
    MAX_YIELD_S,
    TransferJobs,
    page_transfer,
)
from sgl_pipeline.wire.store_orders import LoadPages, SavePages

RATE = 2.0**20


def load(transfer: int) -> Any:
    return page_transfer(load_order(transfer, [1], [1], [7, 8]), 4, 2)


def save(transfer: int) -> Any:
    return page_transfer(save_order(transfer, [1], [1]), 4, 2)


def test_an_order_names_pages_hashes_and_checksums() -> None:
    job = page_transfer(load_order(9, [3, 0], [5, 6], [10, 11, 20, 21]), 4, 2)
    assert (job.transfer, [*job.pages], job.is_load) == (9, [3, 0], True)
    assert [job.hash_of(index)[-1] for index in range(2)] == [5, 6]
    assert [*job.checksums_of(0, range(2))] == [10, 11]
    assert [*job.checksums_of(1, range(1, 2))] == [21]
    assert job.cuts == ((), ())
    assert not save(1).is_load


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pages": b""}, "names 0 pages"),
        ({"pages": b"\1\0\0"}, "cannot be read"),
        ({"pages": array("i", [1, 4]).tobytes()}, "names pages 1 to 4, the pool has 4"),
        ({"pages": array("i", [-1, 2]).tobytes()}, "names pages -1 to 2"),
        ({"hashes": bytes(63)}, "names 2 pages, with 63 bytes of hashes"),
        ({"checksums": bytes(12)}, "3 checksums for 2 layers"),
    ],
)
def test_an_order_that_does_not_fit_is_refused(change: dict[str, bytes], reason: str) -> None:
    whole: LoadPages | SavePages = load_order(9, [3, 0], [5, 6], [10, 11, 20, 21])
    if "checksums" not in change:
        with pytest.raises(ProtocolError, match=re.escape(reason)):
            page_transfer(msgspec.structs.replace(save_order(9, [3, 0], [5, 6]), **change), 4, 2)
    with pytest.raises(ProtocolError, match=re.escape(reason)):
        page_transfer(msgspec.structs.replace(whole, **change), 4, 2)


@pytest.mark.parametrize(
    "cuts", [((0,),), ((0,), (0,), (0,)), ((0,), (1,)), ((0, 2), ()), ((0, 1, 1), ())]
)
def test_a_load_whose_pages_are_cut_as_no_page_is_refused(cuts: tuple[Cuts, ...]) -> None:
    whole = load_order(9, [3, 0], [5, 6], [10, 11, 20, 21], (0, 1))
    assert page_transfer(whole, 4, 2).cuts == ((0, 1), (0, 1))
    with pytest.raises(ProtocolError, match=re.escape(f"whose 2 layers are cut {cuts}")):
        page_transfer(msgspec.structs.replace(whole, cuts=cuts), 4, 2)


def test_transfers_of_a_kind_keep_their_sequence() -> None:
    jobs = TransferJobs(RATE)
    for job in (save(1), load(2), save(3), load(4)):
        jobs.add(job)
    loads = [jobs.next_load(), jobs.next_load(), jobs.next_load()]
    saves = [jobs.next_save(0.0), jobs.next_save(0.0), jobs.next_save(0.0)]
    assert [job and job.transfer for job in (*loads, *saves)] == [2, 4, None, 1, 3, None]


def test_a_save_lets_queued_and_running_loads_go_first() -> None:
    jobs = TransferJobs(RATE)
    jobs.add(save(1))
    jobs.next_save(4.0)
    assert jobs.save_wait_s(4.0) == 0.0
    jobs.add(load(2))
    assert jobs.save_wait_s(4.0) == pytest.approx(MAX_YIELD_S)
    jobs.next_load()
    assert jobs.save_wait_s(4.0) == pytest.approx(MAX_YIELD_S)
    jobs.load_ended()
    assert jobs.save_wait_s(4.0) == 0.0


def test_loads_without_end_hold_a_save_up_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer_jobs, "MAX_YIELD_S", 2.0**-6)
    jobs, now_s = TransferJobs(RATE), 4.0
    jobs.add(save(1))
    jobs.next_save(now_s)
    for transfer in range(100):
        jobs.add(load(transfer))
    written_s = []
    for _ in range(5):
        jobs.next_load()
        now_s += jobs.save_wait_s(now_s)
        assert jobs.save_wait_s(now_s) == 0.0
        jobs.save_begins(0, now_s)
        written_s.append(now_s)
    assert written_s == [4.0 + count * 2.0**-6 for count in range(1, 6)]


@pytest.mark.parametrize("seed", range(20))
def test_no_window_has_more_bytes_than_the_rate_allows(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of objects that begin in a window, all but the last fit into it at the rate."""
    catch_up_s = 2.0**-7
    monkeypatch.setattr(transfer_jobs, "CATCH_UP_S", catch_up_s)
    random = Random(seed)
    jobs, now_s = TransferJobs(RATE), 1.0
    begun: list[tuple[float, int]] = []
    for _ in range(200):
        # Threads wake late, and now and then a store takes long.
        now_s += jobs.save_wait_s(now_s) + random.choice([0.0, 0.0, 2.0**-9, 2.0**-4])
        num_bytes = 2 ** random.randrange(10, 16)
        jobs.save_begins(num_bytes, now_s)
        begun.append((now_s, num_bytes))
    for first in range(0, 200, 7):
        total = 0
        for at_s, num_bytes in begun[first:]:
            assert total <= RATE * (at_s - begun[first][0] + catch_up_s)
            total += num_bytes


def test_a_save_keeps_up_with_its_rate() -> None:
    jobs, now_s = TransferJobs(RATE), 8.0
    for _ in range(64):
        now_s += jobs.save_wait_s(now_s)
        jobs.save_begins(2**14, now_s)
    # 2**20 bytes take a second; the last object begins before its own time, the first ones catch
    # up with what came before.
    assert now_s - 8.0 == pytest.approx(63 / 64 - CATCH_UP_S)
