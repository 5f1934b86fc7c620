"""Pages that are lent to other servers: which, when they come back, and what is declined."""

import re

import pytest
from support.paired_servers import PrefillServer, RoomStage, RoomWorld, room_request
from support.stored_pipeline import PAGE_SIZE

from sgl_pipeline.disaggregation.room_limits import RoomLimits
from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.requests import Room
from sgl_pipeline.scheduling.lent_pages import LentPages
from sgl_pipeline.wire.lease_orders import PagesLent

PROMPT = [token % 7 for token in range(18)]
HELD = len(PROMPT) // PAGE_SIZE
# The prompt's last page, and two more.
TOKENS = 26
IN_ALL = -(-TOKENS // PAGE_SIZE)


def holding(num_pages: int = 32, *, lends: bool = True, rooms: int = 1) -> PrefillServer:
    """A prefill server of two stages that holds the same prompt for each of these rooms."""
    world = RoomWorld(RoomLimits(lends=lends))
    server: PrefillServer = world.add(PrefillServer, "p:1", num_pages=num_pages)
    for number in range(1, rooms + 1):
        world.submit(server, room_request(f"r{number}", PROMPT, 1, Room(number)))
    for _ in range(6):
        world.step()
    assert server.tier.held.num_rooms == rooms
    return server


def free_pages(server: PrefillServer) -> int:
    server.core.scheduler.check_invariants()
    return server.core.scheduler.load().free_pages


def obey(server: PrefillServer) -> None:
    """The stages are told, and do it."""
    server.fill()
    for stage in server.stages:
        while stage.inbox:
            server.run_order(stage.stage)


def stages_of(server: PrefillServer) -> list[RoomStage]:
    return [stage for stage in server.stages if isinstance(stage, RoomStage)]


def test_a_lease_is_told_when_all_stages_know_of_it_and_its_pages_come_back() -> None:
    server = holding()
    lent, before = server.tier.lent, free_pages(server)
    assert lent.lend(1, HELD, TOKENS) is None
    assert free_pages(server) == before - (IN_ALL - HELD)
    assert (lent.num_leases, lent.num_pages) == (1, IN_ALL)
    server.fill()
    server.run_order(0)
    assert lent.lent == []
    obey(server)
    assert lent.lent == [1]
    for stage in stages_of(server):
        pages, first_own = stage.leases[1]
        assert len(set(pages)) == IN_ALL and first_own == HELD
    lent.end(1)
    assert free_pages(server) == before - (IN_ALL - HELD), "the stages may still touch them"
    server.fill()
    assert free_pages(server) == before
    obey(server)
    assert not any(stage.leases for stage in stages_of(server))
    lent.check_end()


def test_a_lease_outlives_the_hold_of_its_prompt() -> None:
    server = holding()
    lent, held = server.tier.lent, server.tier.held
    assert lent.lend(1, HELD, TOKENS) is None
    obey(server)
    held.let_go(1)
    obey(server)
    assert server.core.scheduler.flush_cache()  # which is an interrupt, too
    lent.check_end()
    assert free_pages(server) == 32


def test_a_lease_that_was_not_told_ends_without_a_word() -> None:
    server = holding()
    lent, before = server.tier.lent, free_pages(server)
    assert lent.lend(1, HELD, TOKENS) is None
    lent.end(1)
    assert free_pages(server) == before
    server.fill()
    assert not any(stage.inbox for stage in server.stages)
    lent.end(1)  # there is none any more
    lent.check_end()


@pytest.mark.parametrize(
    ("room", "num_pages", "num_tokens", "named"),
    [
        (2, HELD, TOKENS, "holds no such pages"),
        (1, HELD + 1, TOKENS, "holds no such pages"),
        (1, 0, TOKENS, "holds no such pages"),
        (1, HELD, HELD * PAGE_SIZE, "16 tokens has no page to write into"),
        (1, HELD, 17 * PAGE_SIZE, "0 pages are lent, with 17 more .* more than 16"),
    ],
)
def test_what_cannot_be_lent_is_declined_in_words(
    room: int, num_pages: int, num_tokens: int, named: str
) -> None:
    server = holding()
    before, reason = free_pages(server), server.tier.lent.lend(room, num_pages, num_tokens)
    assert reason is not None and re.search(named, reason), reason
    assert free_pages(server) == before
    server.tier.lent.check_end()


def test_a_server_without_the_flag_lends_nothing() -> None:
    server = holding(lends=False)
    reason = server.tier.lent.lend(1, HELD, TOKENS)
    assert reason is not None and "--enable-attention-offload" in reason
    assert not server.tier.lent.is_on and server.tier.lent.most_tokens == 0


def test_a_room_is_lent_once_and_half_of_the_pool_at_most() -> None:
    server = holding(num_pages=20, rooms=2)
    lent = server.tier.lent
    assert lent.most_tokens == 10 * PAGE_SIZE
    assert lent.lend(1, HELD, TOKENS) is None
    assert lent.lend(1, HELD, TOKENS) == "it holds no such pages that it could lend"
    # The prompt's pages are shared, and count for each.
    assert lent.lend(2, HELD, TOKENS) == (
        "7 pages are lent, with 7 more they would be more than 10"
    )


def test_pages_that_running_requests_may_need_are_not_lent() -> None:
    server = holding(num_pages=20, rooms=1)
    scheduler = server.core.scheduler
    scheduler._pages.lend(scheduler._pages.storage._tree.root, free_pages(server) - 3)
    assert server.tier.lent.lend(1, HELD, (HELD + 4) * PAGE_SIZE) == (
        "4 free pages are needed, it has 3"
    )
    assert server.tier.lent.lend(1, HELD, (HELD + 3) * PAGE_SIZE) is None


def test_lent_prompts_do_not_keep_others_out() -> None:
    server = holding(rooms=2)
    held, lent = server.tier.held, server.tier.lent
    assert held.num_pages == HELD
    assert lent.lend(1, HELD, TOKENS) is None
    assert held.num_pages == HELD, "the other room waits for a reader"
    assert lent.lend(2, HELD, TOKENS) is None
    assert held.num_pages == 0
    held.let_go(1)
    lent.end(2)
    assert held.num_pages == HELD
    lent.end(1)
    assert held.num_pages == HELD
    held.let_go(2)
    assert held.num_pages == 0


def test_an_interrupt_ends_all_leases_and_no_hold() -> None:
    server = holding(rooms=2)
    lent, held, before = server.tier.lent, server.tier.held, free_pages(server)
    assert lent.lend(1, HELD, TOKENS) is None
    obey(server)
    assert lent.lend(2, HELD, TOKENS) is None
    server.tier.interrupt()
    assert lent.over == [1, 2] and lent.lent == [] and held.num_rooms == 2
    lent.check_end()
    assert free_pages(server) == before
    obey(server)
    assert not any(stage.leases for stage in stages_of(server))


def test_layers_move_with_nothing_lent() -> None:
    server = holding()
    lent = server.tier.lent
    assert lent.lend(1, HELD, TOKENS) is None
    obey(server)
    server.tier.held.let_go(1)
    server.core.is_held = True
    obey(server)
    assert lent.over == [1] and not any(stage.leases for stage in stages_of(server))
    assert free_pages(server) == 32


def test_a_lost_stage_ends_all_leases() -> None:
    server = holding()
    lent = server.tier.lent
    assert lent.lend(1, HELD, TOKENS) is None
    obey(server)
    server.lose(1)
    assert lent.over == [1] and server.tier.held.lost == [1]
    lent.check_end()
    obey(server)
    assert free_pages(server) == 32


def refuses(lent: LentPages, report: PagesLent) -> bool:
    try:
        lent.take(report, 2)
    except ProtocolError as error:
        return f"stage {report.stage} may not report lease 1 now" in str(error)
    return False


def test_reports_that_no_stage_could_send_are_refused() -> None:
    server = holding()
    lent = server.tier.lent
    assert lent.lend(1, HELD, TOKENS) is None
    assert refuses(lent, PagesLent(0, 1)), "its order has not been sent"
    server.fill()
    assert refuses(lent, PagesLent(2, 1))
    lent.take(PagesLent(0, 1), 2)
    assert refuses(lent, PagesLent(0, 1))
    lent.take(PagesLent(1, 1), 2)
    assert lent.lent == [1]
    lent.end(1)
    assert not refuses(lent, PagesLent(5, 1)), "late: of a lease that is over"
