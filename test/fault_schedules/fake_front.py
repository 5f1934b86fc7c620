"""Clients of a virtual server: what they ask, when they leave, and what each must have got.

The real front holds a request back while its grammar is compiled, and so does this one.
"""

from dataclasses import dataclass, field
from random import Random

from fault_schedules.fake_model import VOCABULARY, NoRepeats, Oracle, logprobs_of
from fault_schedules.virtual_time import EventLoop

from sgl_pipeline.page_hash import namespace_hash
from sgl_pipeline.requests import (
    GREEDY,
    FinishReason,
    LogprobSpec,
    Request,
    StopRules,
    TokenEvent,
)

MAX_NEW_TOKENS = 40
OTHER_NAMESPACE = namespace_hash(["other"]).hex()

BY_CLIENT = FinishReason("abort", message="the client has left")


@dataclass(slots=True)
class Client:
    """One request from outside: what arrived of its tokens, and every end that it was told."""

    request: Request
    arrives_s: float
    leaves_after_s: float | None
    compile_s: float
    tokens: list[int] = field(default_factory=list)
    ends: list[FinishReason] = field(default_factory=list)
    ended_s: float = 0.0


def make_clients(
    rng: Random,
    num_clients: int,
    span_s: float,
    max_tokens: int,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[Client]:
    """Clients that arrive within `span_s`. Half of the prompts begin with one of two prefixes."""
    prefixes = [_tokens(rng, rng.randint(1, max_tokens)) for _ in range(2)]
    clients = []
    for number in range(num_clients):
        prompt = list(rng.choice(prefixes)) if rng.random() < 0.5 else []
        prompt += _tokens(rng, rng.randint(1, max_tokens))
        is_constrained = rng.random() < 0.2
        wants_logprobs = rng.random() < 0.2
        request = Request(
            request_id=str(number),
            prompt_ids=prompt,
            sampling=GREEDY,
            stops=StopRules(
                max_new_tokens=rng.choice((0, 1, 2, *[rng.randint(1, max_new_tokens)] * 5)),
                stop_token_ids=frozenset({0} if rng.random() < 0.2 else ()),
            ),
            priority=rng.choice((0, 0, 0, 1, 2)),
            cache_namespace=rng.choice(("", "", "", OTHER_NAMESPACE)),
            tenant="abc"[number % 3],
            constraint=NoRepeats() if is_constrained else None,
            logprobs=LogprobSpec(rng.randint(0, len(prompt))) if wants_logprobs else None,
        )
        clients.append(
            Client(
                request,
                arrives_s=rng.random() * span_s,
                leaves_after_s=rng.expovariate(2.0) if rng.random() < 0.2 else None,
                compile_s=rng.expovariate(2.0) if is_constrained else 0.0,
            )
        )
    return clients


def returning_clients(
    rng: Random, clients: list[Client], num_layers: int, max_tokens: int
) -> list[Client]:
    """Clients that go on, later, where some of `clients` have ended or before: with at most
    `max_tokens` tokens of prompt."""
    found: list[Client] = []
    for earlier in rng.sample(clients, rng.randint(0, len(clients))):
        request = earlier.request
        known = [*request.prompt_ids, *Oracle(request, num_layers).output]
        prompt = known[: rng.randint(max(1, len(known) // 2), len(known))][: max_tokens - 1]
        prompt += _tokens(rng, min(max_tokens - len(prompt), rng.randint(1, 3)))
        again = Request(
            request_id=str(len(clients) + len(found)),
            prompt_ids=prompt,
            sampling=GREEDY,
            stops=StopRules(max_new_tokens=rng.randint(1, MAX_NEW_TOKENS)),
            cache_namespace=request.cache_namespace,
        )
        arrives_s = earlier.arrives_s + rng.random() * 4.0
        found.append(Client(again, arrives_s, leaves_after_s=None, compile_s=0.0))
    return found


def _tokens(rng: Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


class FakeFront:
    """Keeps what each client got, by the clock of `loop`, and judges it."""

    def __init__(self, clients: list[Client], num_layers: int, loop: EventLoop) -> None:
        self.clients = clients
        self._loop = loop
        self._num_layers = num_layers
        self._client_of = {client.request: client for client in clients}

    def add(self, client: Client) -> None:
        """Another client has come."""
        self.clients.append(client)
        self._client_of[client.request] = client

    def send_events(self, events: list[TokenEvent]) -> None:
        for event in events:
            client = self._client_of[event.request]
            assert not client.ends, f"request {event.request.request_id} got a token after its end"
            client.tokens += event.token_ids
            if event.finish is not None:
                self.end(event.request, event.finish)

    def end(self, request: Request, finish: FinishReason) -> None:
        """A request has ended by itself, or was refused, aborted, displaced or overdue."""
        client = self._client_of[request]
        client.ends.append(finish)
        client.ended_s = self._loop.now_s

    def has_ended(self, client: Client) -> bool:
        return bool(client.ends)

    def check(self) -> None:
        """Every request ended once; what it got is what it gets alone, or the beginning of it."""
        for client in self.clients:
            request = client.request
            name = f"request {request.request_id}"
            assert len(client.ends) == 1, f"{name} ended {len(client.ends)} times"
            alone = Oracle(request, self._num_layers)
            rows = logprobs_of(request)
            if client.ends[0].kind == "abort":
                assert client.tokens == alone.output[: len(client.tokens)], f"{name}: other tokens"
                assert rows == alone.rows[: len(rows)], f"{name}: other log-probabilities"
            else:
                assert client.tokens == alone.output, f"{name}: other tokens"
                assert rows == alone.rows, f"{name}: other log-probabilities"
