"""As `test_random_rooms.py`, with prefill servers that lend pages, and faults meanwhile."""

from collections.abc import Callable
from typing import Any

import pytest
from disaggregation.test_random_rooms import RandomRooms

from sgl_pipeline.disaggregation.lent_rooms import LentRooms
from sgl_pipeline.scheduling.lent_pages import LentPages
from sgl_pipeline.scheduling.offloaded_requests import OffloadedRequests

SEEDS = 200


class RandomLeases(RandomRooms):
    """One run, in which servers do what is due more often than anything happens to them."""

    lends = True
    most_tokens = 24

    def operations(self) -> list[Callable[[], None]]:
        faults = self.faults()
        return [
            *([self.submit] * 4),
            *([self.submit_half] * 6),
            *([self.world.step] * 16),
            *([self.turn] * 12),
            *([self.run_orders] * 12),
            *([self.end_transfer] * 4),
            *self.random.sample(faults, self.random.randrange(len(faults))),
        ]


def test_every_request_ends_and_nothing_is_lent_for_ever() -> None:
    num_offloaded = num_ended_early = 0
    for seed in range(SEEDS):
        one = RandomLeases(seed)
        one.run()
        for decode in one.world.decodes():
            num_offloaded += decode.rooms.offloading.num_offloaded
            num_ended_early += decode.rooms.offloading.num_ended_early
    assert num_offloaded > 2 * SEEDS and num_ended_early > SEEDS // 4


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In place of what must be done."""


def _return_at_once(lent: LentPages, room: int) -> None:
    lease = lent._forget(room)
    if lease is not None:
        lent._to_lend.pop(room, None)
        lent._pages.take_back(lease.end, lease.own)


MUTATIONS: dict[str, tuple[type, str, Any]] = {
    "pages are given out before the lease is over": (LentPages, "end", _return_at_once),
    "a lease outlives what makes the stages forget it": (LentPages, "forget", _nothing),
    "a lease outlives its room": (LentRooms, "end", _nothing),
    "what a lost lease has drawn is kept": (OffloadedRequests, "lose", _nothing),
    "a request whose lease is over goes on with it": (OffloadedRequests, "retract_lost", _nothing),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_rule_is_noticed(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, instead = MUTATIONS[mutation]
    monkeypatch.setattr(owner, name, instead)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(SEEDS):
            RandomLeases(seed).run()
