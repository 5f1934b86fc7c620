"""Clients whose requests have two halves, one for each server, as a router sends them; and those
that err: they send one half, use a number twice, or name a host that is none."""

from dataclasses import dataclass, field
from random import Random

from fault_schedules.fake_front import Client, make_clients
from fault_schedules.fake_model import NoRepeats
from fault_schedules.room_streams import NO_HOST

from sgl_pipeline.requests import GREEDY, Request, Room, StopRules

# Rooms that no decode server asks for end after five seconds, where other requests need the pages.
LONGEST_COMPILE_S = 1.0
LEAVES = ("leave", "leave", "leave together")
ERRORS = ("half", "number", "host")


@dataclass(slots=True, eq=False)
class Half:
    """The half of a request that goes to `server`; `was_sent` once it has been."""

    client: Client
    server: str
    was_sent: bool = False


@dataclass(slots=True)
class Pair:
    """A request. A half that is None is never sent. If it `is_alone`, no other one has its number,
    and its decode server can reach its prefill server."""

    prefill: Half | None
    decode: Half | None
    is_alone: bool = True
    halves: list[Half] = field(init=False)

    def __post_init__(self) -> None:
        self.halves = [half for half in (self.prefill, self.decode) if half is not None]


def make_pairs(
    rng: Random,
    num_pairs: int,
    prefills: list[str],
    decodes: list[str],
    max_tokens: int,
    max_new_tokens: int,
    *,
    may_leave: bool,
    may_err: bool,
) -> list[Pair]:
    """Requests that come within some seconds."""
    span_s, gap_s = rng.choice((0.0, 1.0, 5.0)), rng.choice((0.0, 0.1, 2.0))
    pairs: list[Pair] = []
    for number, client in enumerate(
        make_clients(rng, num_pairs, span_s, max_tokens, max_new_tokens)
    ):
        prefill, request = rng.choice(prefills), client.request
        client.compile_s = min(client.compile_s, LONGEST_COMPILE_S)
        request.request_id = f"d{number}"
        request.room = Room(number, prefill)
        first = Client(
            _prefill_half(request, number),
            client.arrives_s + rng.random() * gap_s,
            leaves_after_s=None,
            compile_s=client.compile_s * rng.random(),
        )
        client.arrives_s += rng.random() * gap_s
        if not may_leave:
            client.leaves_after_s = None
        pairs.append(Pair(Half(first, prefill), Half(client, rng.choice(decodes))))
    kinds = [*(LEAVES if may_leave else ()), *(ERRORS if may_err else ())]
    for pair in pairs:
        if rng.random() < 0.06 * len(kinds):
            _spoil(rng, pair, pairs, rng.choice(kinds))
    return pairs


def _prefill_half(request: Request, number: int) -> Request:
    """As the front of a prefill server makes it: it draws one token."""
    return Request(
        request_id=f"p{number}",
        prompt_ids=[*request.prompt_ids],
        sampling=GREEDY,
        stops=StopRules(max_new_tokens=1, stop_token_ids=request.stops.stop_token_ids),
        priority=request.priority,
        cache_namespace=request.cache_namespace,
        tenant=request.tenant,
        constraint=None if request.constraint is None else NoRepeats(),
        logprobs=request.logprobs,
        room=Room(number),
    )


def _spoil(rng: Random, pair: Pair, pairs: list[Pair], kind: str) -> None:
    """Something is wrong with a request."""
    first, second = pair.halves[0].client, pair.halves[-1].client
    if kind == "leave":
        first.leaves_after_s = rng.expovariate(10.0)
    elif kind == "leave together" and second.leaves_after_s is not None:
        leaves_s = second.arrives_s + second.leaves_after_s + 0.01 * rng.random()
        first.leaves_after_s = max(0.0, leaves_s - first.arrives_s)
    elif kind == "half":
        pair.halves = [rng.choice(pair.halves)]
        if pair.prefill not in pair.halves:
            pair.prefill = None
        else:
            pair.decode = None
    elif kind == "number":
        other = rng.choice(pairs)
        number = other.halves[0].client.request.room
        assert number is not None and second.request.room is not None
        first.request.room = Room(number.number)
        second.request.room = Room(number.number, second.request.room.peer)
        pair.is_alone = other.is_alone = False
    elif kind == "host":
        assert second.request.room is not None
        second.request.room = Room(second.request.room.number, NO_HOST)
        pair.is_alone = False
