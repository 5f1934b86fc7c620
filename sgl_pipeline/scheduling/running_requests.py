"""The admitted requests, sorted by what the next step can do with them.

Others read its sets; only its methods change them. It never changes a request.
"""

from collections.abc import Iterator

from sgl_pipeline.requests import Request, RequestState


class RunningRequests:
    """Ordered sets (dicts without values, so that every order is deterministic).

    `prefilling`: some of the prompt is not scheduled yet. `decoding`: prompt computed, in flight or
    not, with the number of output tokens that it may still draw and of tokens that the next one
    attends to. `ready`: decoding and not in flight, the longest ready first. A request whose last
    prefill chunk is in flight is in none of these sets.
    """

    def __init__(self) -> None:
        self._admitted: dict[Request, None] = {}
        self.prefilling: dict[Request, None] = {}
        self.decoding: dict[Request, tuple[int, int]] = {}
        self.ready: dict[Request, None] = {}
        # Sums over `decoding`; a request with a lease adds nothing, its keys are elsewhere.
        self.remaining_output_tokens = 0
        self.attended_tokens = 0
        self._num_leased = 0

    def __len__(self) -> int:
        return len(self._admitted)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._admitted)

    @property
    def num_growing(self) -> int:
        """Requests that may need further pages: those without a lease."""
        return len(self._admitted) - self._num_leased

    def admit(self, request: Request) -> None:
        """A request has left the queue."""
        self._admitted[request] = None
        self._num_leased += request.lease is not None
        self.prefilling[request] = None

    def start_last_prefill(self, request: Request) -> None:
        """The step being put together takes the rest of the prompt."""
        del self.prefilling[request]

    def make_ready(self, request: Request) -> None:
        """The request has a new token to decode from, and no step in flight."""
        remaining = request.stops.max_new_tokens - len(request.output_ids)
        attended = len(request.prompt_ids) + len(request.output_ids)
        if request.lease is not None:
            remaining = attended = 0
        old_remaining, old_attended = self.decoding.get(request, (0, 0))
        self.remaining_output_tokens += remaining - old_remaining
        self.attended_tokens += attended - old_attended
        self.decoding[request] = (remaining, attended)
        self.ready[request] = None

    def start_decode(self, request: Request) -> None:
        """The step being put together takes the ready request."""
        del self.ready[request]

    def take_back(self, request: Request) -> None:
        """Undoes what the steps in flight took of the request."""
        members = self.ready if request in self.decoding else self.prefilling
        members[request] = None

    def stop_prefill(self, request: Request) -> None:
        """Takes no further chunk of its prompt."""
        self.prefilling.pop(request, None)

    def drop(self, request: Request) -> None:
        """The request ended or was retracted."""
        self._num_leased -= request in self._admitted and request.lease is not None
        remaining, attended = self.decoding.pop(request, (0, 0))
        self.remaining_output_tokens -= remaining
        self.attended_tokens -= attended
        for members in (self._admitted, self.prefilling, self.ready):
            members.pop(request, None)

    def check_invariants(self) -> None:
        """Asserts what must hold between two steps; for tests."""
        for request in self:
            assert request.state is RequestState.RUNNING
            assert request.loaded_tokens <= request.cached_tokens
            assert request.num_computed <= request.num_scheduled <= request.num_tokens
            if request.logprobs is not None:
                assert request.num_computed <= request.first_logits_position
        assert all(request.is_prefilling for request in self.prefilling)
        for request in self.decoding:
            assert request.steps_in_flight == (request not in self.ready)
        here = [one for one in self.decoding if one.lease is None]
        assert self.remaining_output_tokens == sum(
            one.stops.max_new_tokens - len(one.output_ids) for one in here
        )
        assert self.attended_tokens == sum(one.num_tokens for one in here)
        assert self._num_leased == sum(one.lease is not None for one in self._admitted)
