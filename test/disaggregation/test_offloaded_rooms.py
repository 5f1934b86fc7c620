"""Requests whose prompts stay on the prefill server, which lends its pages for their attention."""

from random import Random

import pytest
from support.paired_servers import DecodeServer, PrefillServer, RoomWorld, room_request
from support.stored_pipeline import PAGE_SIZE, right_output

from sgl_pipeline.disaggregation.room_limits import RoomLimits
from sgl_pipeline.requests import Request, RequestState, Room

PROMPT = [token % 7 for token in range(3, 40)]
WHOLE_PAGES = len(PROMPT) // PAGE_SIZE
LENDS = RoomLimits(bootstrap_timeout_s=20.0, waiting_timeout_s=20.0, reserved_tokens=4, lends=True)
Pair = tuple[RoomWorld, PrefillServer, DecodeServer]


def pair(
    limits: RoomLimits = LENDS,
    prefill_layers: tuple[int, ...] = (3, 3),
    decode_layers: tuple[int, ...] = (2, 4),
    prefill_pages: int = 64,
    decode_pages: int = 32,
    log_pages: int | None = None,
    ratio: float | None = float("inf"),
) -> Pair:
    world = RoomWorld(Random(0), limits, offload_ratio=ratio)
    prefill = world.add(PrefillServer, "p:1", prefill_layers, prefill_pages, log_pages)
    decode = world.add(DecodeServer, "d", decode_layers, decode_pages, log_pages)
    return world, prefill, decode


def both(world: RoomWorld, prompt: list[int] = PROMPT, tokens: int = 9) -> Request:
    """The half of the decode server."""
    number = world.new_room()
    first = room_request(f"p{number}", prompt, 1, Room(number))
    second = room_request(f"d{number}", prompt, tokens, Room(number, "p:1"))
    world.submit(world.prefills()[0], first)
    world.submit(world.decodes()[0], second)
    return second


def until_it_decodes(world: RoomWorld, request: Request, tokens: int = 2) -> None:
    for _ in range(200):
        world.step()
        if len(request.output_ids) >= tokens:
            return
    raise AssertionError("it never decodes")


@pytest.mark.parametrize(
    "layers", [((6,), (6,)), ((3, 3), (6,)), ((6,), (2, 4)), ((1, 5), (2, 1, 3))]
)
def test_the_keys_and_values_stay_where_the_prompt_was_computed(
    layers: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    world, prefill, decode = pair(prefill_layers=layers[0], decode_layers=layers[1])
    second = both(world)
    until_it_decodes(world, second)
    assert second.lease is not None and len(second.pages) == 1
    in_all = -(-(len(PROMPT) + 9 - 1) // PAGE_SIZE)
    assert prefill.tier.lent.num_pages == in_all
    assert prefill.tier.held.num_pages == 0, "they are not waited for"
    world.run()
    world.check()
    assert second.output_ids == right_output(PROMPT, 9)
    assert decode.tier.arrivals.counts.loaded_pages == 0
    assert decode.core.history.prefill_tokens == len(PROMPT) - WHOLE_PAGES * PAGE_SIZE
    assert decode.rooms.offloading.num_offloaded == 1
    assert decode.rooms.offloading.num_ended_early == 0


def test_a_prompt_of_whole_pages_computes_its_last_page_here() -> None:
    world, _, _ = pair()
    second = both(world, PROMPT[: 3 * PAGE_SIZE])
    until_it_decodes(world, second)
    assert second.leased_tokens == 2 * PAGE_SIZE
    world.run()
    world.check()


def test_a_lost_stage_of_the_prefill_server_costs_time_only() -> None:
    world, prefill, decode = pair()
    second = both(world)
    until_it_decodes(world, second)
    prefill.lose(0)
    world.run()
    world.check()
    assert second.output_ids == right_output(PROMPT, 9) and second.num_retractions == 1
    assert second.lease is None and second.state is RequestState.FINISHED
    assert decode.rooms.offloading.num_ended_early == 1
