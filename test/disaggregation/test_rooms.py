"""A request's prompt is computed on one server and its tokens drawn on another."""

from random import Random

import pytest
from support.paired_servers import DecodeServer, PrefillServer, RoomWorld, room_request
from support.stored_pipeline import PAGE_SIZE

from sgl_pipeline.disaggregation.room_rules import RoomRules
from sgl_pipeline.requests import Request, Room

PROMPT = [token % 7 for token in range(3, 40)]
WHOLE_PAGES = len(PROMPT) // PAGE_SIZE
RULES = RoomRules(bootstrap_timeout_s=20.0, waiting_timeout_s=20.0, reserved_tokens=4)


def pair(
    rules: RoomRules = RULES,
    prefill_layers: tuple[int, ...] = (3, 3),
    decode_layers: tuple[int, ...] = (2, 4),
    **pages: int,
) -> tuple[RoomWorld, PrefillServer, DecodeServer]:
    world = RoomWorld(Random(0), rules)
    prefill = world.add(PrefillServer, "p:1", prefill_layers, **pages)
    return world, prefill, world.add(DecodeServer, "d", decode_layers, **pages)


def submit(
    world: RoomWorld, prefill: PrefillServer, decode: DecodeServer, prompt: list[int] = PROMPT
) -> tuple[Request, Request]:
    """Both halves of a request, the prefill server's first."""
    number = world.new_room()
    first = room_request(f"p{number}", prompt, 1, Room(number))
    second = room_request(f"d{number}", prompt, 5, Room(number, prefill.name))
    world.submit(prefill, first)
    world.submit(decode, second)
    return first, second


@pytest.mark.parametrize(
    "layers", [((6,), (6,)), ((3, 3), (6,)), ((6,), (2, 4)), ((1, 5), (2, 1, 3))]
)
def test_any_depth_reads_the_pages_of_any_other(
    layers: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    world, prefill, decode = pair(prefill_layers=layers[0], decode_layers=layers[1])
    first, second = submit(world, prefill, decode)
    world.run()
    world.check()
    assert first.finish is not None and first.finish.kind == "length"
    assert len(second.output_ids) == 5
    assert decode.core.history.prefill_tokens == len(PROMPT) - WHOLE_PAGES * PAGE_SIZE
    assert decode.tier.arrivals.counts.loaded_pages == WHOLE_PAGES
    assert decode.rooms.counts.num_transferred == prefill.rooms.counts.num_transferred == 1
