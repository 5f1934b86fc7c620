"""Leases: what a borrower may write and read, and from when on it may not."""

import re
import threading
import time
from collections.abc import Callable
from random import Random

import pytest
import torch
from support.lent_pages import bytes_of, new_leases, plan_of, random_rows
from support.page_transfers import DIGEST, NUM_PAGES, filled_pool, pool_content, shapes_of

from sgl_pipeline.errors import MalformedData
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.base.kv_format import decode
from sgl_pipeline.pp_runner.lent_attention.leases import Leases, Planned
from sgl_pipeline.wire.attention_messages import AttendRows, PlanAttention

# Pages of 3 tokens, whose layer 1 has wider values.
DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)
PAGES, FIRST_OWN = [5, 0, 7, 2], 2
OWN_START, NUM_TOKENS = 6, 12


def lend(
    dtype: torch.dtype = torch.float32, layers: range = range(3)
) -> tuple[Leases, KvPool, Callable[[PlanAttention, AttendRows], tuple[torch.Tensor, list[str]]]]:
    """Lease 4 over PAGES, lease 9 over two pages more; the last gives outputs and refusals."""
    shapes = shapes_of(dtype)
    leases, pool = new_leases(shapes), filled_pool(layers, shapes, seed=1)
    leases.hold(layers, pool)
    leases.lend(4, DIGEST, torch.tensor(PAGES, dtype=torch.int32).numpy(), FIRST_OWN)
    leases.lend(9, DIGEST, torch.tensor([5, 6], dtype=torch.int32).numpy(), 1)

    def attend(plan: PlanAttention, rows: AttendRows) -> tuple[torch.Tensor, list[str]]:
        answer = leases.attend(Planned(plan), rows)
        assert answer.layer == rows.layer and answer.busy_s > 0
        shape = shapes[rows.layer]
        output = torch.frombuffer(bytearray(answer.output), dtype=shape.dtype)
        lost = [f"{one.lease}: {one.reason}" for one in answer.refused]
        return output.view(plan.num_rows, shape.num_query_heads, shape.value_dim), lost

    return leases, pool, attend


def attended_alone(
    pool: KvPool, layer: int, dtype: torch.dtype, query: torch.Tensor, slots: list[int]
) -> torch.Tensor:
    """The result [Hq, Dv] of one row that sees the tokens at `slots`, in plain sums."""
    shape = shapes_of(dtype)[layer]
    keys, values = (
        decode(pages.flatten(0, 1)[slots], shape.dtype).float() for pages in pool.pages(layer)
    )
    scores = torch.einsum("hd,thd->ht", query.float(), keys) * shape.scale
    return torch.einsum("ht,thd->hd", scores.softmax(-1), values).to(shape.dtype)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_written_as_they_are_and_see_all_tokens_before(
    dtype: torch.dtype, layer: int
) -> None:
    _, pool, attend = lend(dtype)
    shape = shapes_of(dtype)[layer]
    plan = plan_of((4, 6, 2), (9, 3, 1))
    rows = random_rows(layer, shape, 3)
    before = pool_content(pool)
    output, lost = attend(plan, rows)
    assert lost == []
    slots = [7 * 3, 7 * 3 + 1, 6 * 3]
    for pages, content in zip(pool.pages(layer), (rows.keys, rows.values), strict=True):
        written = pages.flatten(0, 1).view(torch.uint8)[slots]
        assert bytes(bytes_of(written)) == bytes(content)
    changed = [index for index, one in enumerate(pool_content(pool)) if one != before[index]]
    assert changed == [layer * NUM_PAGES + page for page in (6, 7)]
    query = torch.frombuffer(bytearray(rows.query), dtype=shape.dtype).view(3, 2, 6)
    of_pages = [*range(15, 18), *range(3)]  # the tokens of pages 5 and 0
    seen = [[*of_pages, 21], [*of_pages, 21, 22], [15, 16, 17, 18]]
    for row, places in enumerate(seen):
        wanted = attended_alone(pool, layer, dtype, query[row], places)
        torch.testing.assert_close(output[row], wanted, atol=2e-2, rtol=2e-2)


REFUSED = {
    "before its own pages": ((4, 5, 1), 0, "rows 5 to 5 are not in its own pages, which have 6"),
    "across the beginning": ((4, 5, 2), 0, "rows 5 to 6 are not in its own pages"),
    "behind its pages": ((4, 12, 1), 0, "rows 12 to 12 are not in its own pages.* to 11"),
    "across the end": ((4, 11, 2), 0, "rows 11 to 12 are not in its own pages"),
    "far away": ((4, 2**62, 1), 0, "are not in its own pages"),
    "behind a gap": ((4, 7, 1), 0, "rows from 7 on came, when those from 6 on were due"),
    "of nobody": ((5, 6, 1), 0, "it is not lent here, or not any more"),
    "of a layer that is elsewhere": ((4, 6, 1), 2, "layer 2 is not here, but 0 to 1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_lease_does_not_allow_is_refused_and_nothing_is_touched(what: str) -> None:
    chunk, layer, reason = REFUSED[what]
    _, pool, attend = lend(layers=range(2))
    before = pool_content(pool)
    num_rows = chunk[2]
    output, (lost,) = attend(
        plan_of(chunk), random_rows(layer, shapes_of(torch.float32)[layer], num_rows)
    )
    assert pool_content(pool) == before
    assert not output.any()
    assert re.search(f"^{chunk[0]}: .*{reason}", lost)


def test_a_lease_of_another_model_is_refused() -> None:
    _, pool, attend = lend()
    before = pool_content(pool)
    rows = random_rows(0, shapes_of(torch.float32)[0], 1)
    _, (lost,) = attend(plan_of((4, 6, 1), digest="ukv1-other"), rows)
    assert lost == f"4: its pages are of another model or format, {DIGEST}, not ukv1-other"
    assert pool_content(pool) == before


def test_rows_of_a_refused_lease_are_left_out_and_the_others_are_as_without_it() -> None:
    shape = shapes_of(torch.float32)[0]
    _, _, attend = lend()
    rows = random_rows(0, shape, 4)
    output, lost = attend(plan_of((9, 3, 1), (5, 0, 2), (4, 6, 1)), rows)
    assert lost == ["5: it is not lent here, or not any more"]
    assert not output[1:3].any()
    _, _, attend = lend()
    left = AttendRows(
        0,
        *(
            bytes_of(torch.frombuffer(bytearray(part), dtype=shape.dtype).view(4, -1)[[0, 3]])
            for part in (rows.query, rows.keys, rows.values)
        ),
        rows.sinks,
    )
    others, lost = attend(plan_of((9, 3, 1), (4, 6, 1)), left)
    assert lost == []
    torch.testing.assert_close(output[[0, 3]], others)


def test_each_layer_goes_on_from_its_own_rows() -> None:
    shapes = shapes_of(torch.float32)
    _, _, attend = lend()
    for layer, start in ((0, 6), (0, 7), (1, 6), (0, 8), (1, 7)):
        assert attend(plan_of((4, start, 1)), random_rows(layer, shapes[layer], 1))[1] == []
    (lost,) = attend(plan_of((4, 9, 1)), random_rows(1, shapes[1], 1))[1]
    assert "rows from 9 on came, when those from 8 on were due" in lost
    # A step that was run again writes its rows again.
    assert attend(plan_of((4, 7, 2)), random_rows(0, shapes[0], 2))[1] == []
    (lost,) = attend(plan_of((4, 10, 1)), random_rows(0, shapes[0], 1))[1]
    assert "when those from 9 on were due" in lost


def test_a_plan_outlives_no_lease_of_its() -> None:
    leases, pool, _ = lend()
    shapes = shapes_of(torch.float32)
    planned = Planned(plan_of((4, 6, 1), (9, 3, 1)))
    assert leases.attend(planned, random_rows(0, shapes[0], 2)).refused == ()
    leases.end(9)
    (refused,) = leases.attend(planned, random_rows(1, shapes[1], 2)).refused
    assert refused.lease == 9
    leases.lend(9, DIGEST, torch.tensor([1, 3], dtype=torch.int32).numpy(), 1)  # another one
    rows = random_rows(1, shapes[1], 2)
    assert leases.attend(planned, rows).refused == ()
    (keys, _) = pool.pages(1)
    assert bytes(bytes_of(keys[3, 0])) == bytes(rows.keys[len(rows.keys) // 2 :])
    leases.forget()
    assert not leases.knows_layers
    assert len(leases.attend(planned, random_rows(2, shapes[2], 2)).refused) == 2


WRONG_SIZES = {
    "queries": {"query": torch.zeros(11)},
    "keys": {"keys": torch.zeros(13)},
    "values": {"values": torch.zeros(0)},
}


@pytest.mark.parametrize("what", WRONG_SIZES)
def test_rows_of_another_size_are_malformed(what: str) -> None:
    _, pool, attend = lend()
    before = pool_content(pool)
    rows = random_rows(0, shapes_of(torch.float32)[0], 1, **WRONG_SIZES[what])
    with pytest.raises(MalformedData, match=f"bytes of {what}"):
        attend(plan_of((4, 6, 1)), rows)
    assert pool_content(pool) == before


def test_a_layer_that_the_model_does_not_have_is_malformed() -> None:
    _, _, attend = lend()
    with pytest.raises(MalformedData, match="rows of layer 3 of 3"):
        attend(plan_of((4, 6, 1)), random_rows(3, shapes_of(torch.float32)[0], 1))


@pytest.mark.parametrize("way", ["end", "forget"])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_written_from_the_moment_that_a_lease_has_ended(way: str, seed: int) -> None:
    """A borrower under load; after each end the pages get other bytes, as from a step."""
    random, shapes = Random(seed), shapes_of(torch.float32)
    leases, pool = new_leases(shapes), filled_pool(range(3), shapes, seed=1)
    rows, is_over = [random_rows(layer, shapes[layer], 1) for layer in range(3)], threading.Event()
    answers = {"written": 0, "refused": 0}
    number = 0

    def borrow() -> None:
        while not is_over.is_set():
            planned = Planned(plan_of((number, OWN_START, 1)))
            for layer in range(3):
                answer = leases.attend(planned, rows[layer])
                answers["refused" if answer.refused else "written"] += 1

    borrower = threading.Thread(target=borrow)
    borrower.start()
    memory = [pages.view(torch.uint8) for layer in range(3) for pages in pool.pages(layer)]
    longest_s = 0.0
    for turn in range(150):
        leases.hold(range(3), pool)
        number = turn
        leases.lend(turn, DIGEST, torch.tensor(PAGES, dtype=torch.int32).numpy(), FIRST_OWN)
        time.sleep(random.random() * 2e-3)
        started_s = time.monotonic()
        if way == "end":
            leases.end(turn)
        else:
            leases.forget()
        longest_s = max(longest_s, time.monotonic() - started_s)
        for pages in memory:
            pages.fill_(turn)
        time.sleep(random.random() * 1e-3)
        assert all(bool((pages == turn).all()) for pages in memory)
    is_over.set()
    borrower.join()
    assert answers["written"] and answers["refused"], answers
    assert longest_s < 3.0


def test_an_end_waits_for_the_layer_under_way_and_comes_before_the_next() -> None:
    leases, _, _ = lend()
    shapes = shapes_of(torch.float32)
    assert leases._attention is not None
    begun, going_on = threading.Semaphore(0), threading.Semaphore(0)
    backend = leases._attention.of(0)
    attend = backend.attend

    def attend_slowly(*arguments: torch.Tensor | None) -> torch.Tensor:
        begun.release()
        going_on.acquire(timeout=20.0)
        return attend(*arguments)  # type: ignore[arg-type]

    backend.attend = attend_slowly  # type: ignore[method-assign]
    planned, rows = Planned(plan_of((4, 6, 1))), random_rows(0, shapes[0], 1)
    answers: list[bool] = []

    def borrow() -> None:
        answers.extend(bool(leases.attend(planned, rows).refused) for _ in range(2))

    borrower = threading.Thread(target=borrow)
    borrower.start()
    begun.acquire(timeout=20.0)
    end = threading.Thread(target=leases.end, args=(4,))
    end.start()
    time.sleep(0.05)
    assert end.is_alive(), "a page was given back while it was read"
    going_on.release(2)
    end.join(20.0)
    borrower.join(20.0)
    assert not end.is_alive() and answers == [False, True]


def test_no_layer_begins_while_an_end_waits_for_the_lock() -> None:
    leases, _, _ = lend()
    planned, rows = Planned(plan_of((4, 6, 1))), random_rows(0, shapes_of(torch.float32)[0], 1)
    borrower = threading.Thread(target=leases.attend, args=(planned, rows))
    with leases._turn:  # as an end holds it
        borrower.start()
        borrower.join(0.2)
        assert borrower.is_alive()
        assert leases._lock.acquire(blocking=False)
        leases._lock.release()
    borrower.join(20.0)
    assert not borrower.is_alive()
