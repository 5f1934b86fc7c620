"""The queue's order, its parked requests, and its token count against a brute-force count."""

from hypothesis import given
from hypothesis import strategies as st
from support.pipelines import make_request
from support.radix import Radix

from sgl_pipeline.args import ACCOUNTINGS
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.page_pool import PagePool
from sgl_pipeline.scheduling.queue_order import FixedOrder
from sgl_pipeline.scheduling.radix_tree import RadixNode
from sgl_pipeline.scheduling.request_pages import RequestPages
from sgl_pipeline.scheduling.state_slots import StateSlots
from sgl_pipeline.scheduling.waiting_queue import MAX_PARKED_PER_CALL, WaitingQueue

Prefix = tuple[str, tuple[int, ...]]


class QueueAndPages:
    """A queue and the pages of what left it, without a scheduler."""

    def __init__(
        self,
        page_size: int,
        num_pages: int = 60,
        *,
        radix_cache: bool = True,
        parks: bool = True,
    ) -> None:
        self.page_size = page_size
        self.radix = Radix(page_size, enabled=radix_cache)
        self.queue = WaitingQueue(self.radix.demand, parks=parks)
        self.pages = RequestPages(
            PagePool(num_pages), self.radix.storage, self.radix.demand, StateSlots(0)
        )
        self.waiting: list[Request] = []
        self.prefilling: list[Request] = []
        self.num_added = 0

    def add(
        self,
        tokens: list[int],
        priority: int = 0,
        namespace: str = "",
        logprob_start: int | None = None,
    ) -> Request:
        request = make_request(
            str(self.num_added), tokens, namespace=namespace, logprob_start=logprob_start
        )
        request.order = (-priority, 0, self.num_added)
        self.num_added += 1
        self.queue.add(request)
        self.waiting.append(request)
        return request

    def admit(self) -> Request | None:
        request = self.queue.head()
        if request is None:
            return None
        if not self.pages.try_open(request, self.queue.path_of(request), num_reserved=0):
            return None
        self.queue.pop_head()
        self.waiting.remove(request)
        self.prefilling.append(request)
        return request

    def advance(self, request: Request, length: int) -> None:
        """Computes and commits a chunk; a prompt that is done leaves."""
        end = min(request.prefill_end, request.num_computed + length)
        if not self.pages.extend(request, end):
            return
        request.num_scheduled = request.num_computed = end
        self.pages.commit(request)
        if end == request.prefill_end:
            self.drop(request)

    def drop(self, request: Request) -> None:
        self.prefilling.remove(request)
        self.pages.release(request)

    def discard(self, request: Request) -> None:
        self.waiting.remove(request)
        self.queue.discard(request)

    def wanted(self, request: Request) -> set[Prefix]:
        """Each page that the request can share, as the prefix that it ends."""
        tokens = tuple(request.prompt_ids)
        ends = range(self.page_size, self.longest_hit(request) + 1, self.page_size)
        return {(request.cache_namespace, tokens[:end]) for end in ends}

    def longest_hit(self, request: Request) -> int:
        """A hit leaves the last token, and all whose log-probabilities are wanted."""
        longest = len(request.prompt_ids) - 1
        if request.logprobs is not None:
            longest = min(longest, request.logprobs.prompt_start)
        return longest // self.page_size * self.page_size

    def cached(self) -> set[Prefix]:
        found: set[Prefix] = set()

        def visit(node: RadixNode, namespace: str, tokens: tuple[int, ...]) -> None:
            for key, child in node.children.items():
                name = key[0] if node is self.radix.tree.root else namespace
                whole = tokens + tuple(child.tokens)
                if child.is_cached:
                    ends = range(len(tokens) + self.page_size, len(whole) + 1, self.page_size)
                    found.update((name, whole[:end]) for end in ends)
                visit(child, name, whole)

        visit(self.radix.tree.root, "", ())
        return found

    def pending_tokens(self, accounting: str = "radix") -> int:
        return self.queue.tokens_to_compute(ACCOUNTINGS[accounting])

    def brute_force_pending(self, accounting: str) -> int:
        if accounting in ("gllm", "naive"):
            return sum(len(request.prompt_ids) for request in self.waiting)
        cached = self.cached()
        claimed = set().union(*(self.wanted(request) for request in self.prefilling))
        shared = set().union(*(self.wanted(request) for request in self.waiting))
        tails = sum(len(r.prompt_ids) - self.longest_hit(r) for r in self.waiting)
        if accounting == "radix-unshared":
            missing = sum(len(self.wanted(request) - cached) for request in self.waiting)
            return missing * self.page_size + tails
        return len(shared - cached - claimed) * self.page_size + tails

    def brute_force_attended(self, accounting: str) -> int:
        """Position by position: a row at position p attends to p + 1 tokens."""
        whole = sum(sum(range(1, len(r.prompt_ids) + 1)) for r in self.waiting)
        if accounting in ("gllm", "naive"):
            return whole
        cached = self.cached()
        claimed = set().union(*(self.wanted(request) for request in self.prefilling))
        shared = set().union(*(self.wanted(request) for request in self.waiting))
        tails = sum(
            sum(range(self.longest_hit(r) + 1, len(r.prompt_ids) + 1)) for r in self.waiting
        )
        wanted = [self.wanted(request) - cached for request in self.waiting]
        if accounting != "radix-unshared":
            wanted = [shared - cached - claimed]
        ends = [len(tokens) for one in wanted for _, tokens in one]
        return tails + sum(sum(range(end - self.page_size + 1, end + 1)) for end in ends)

    def brute_force_head(self) -> Request | None:
        in_work = set().union(*(self.wanted(request) for request in self.prefilling))
        in_work -= self.cached()
        free = [request for request in self.waiting if not self.wanted(request) & in_work]
        return min(free, key=lambda request: request.order, default=None)


@given(
    page_size=st.sampled_from([1, 2]),
    num_pages=st.integers(6, 40),
    operations=st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "admit", "advance", "advance", "drop", "discard"]),
            st.lists(st.integers(0, 1), min_size=1, max_size=9),
            st.integers(0, 4),
        ),
        max_size=40,
    ),
)
def test_pending_tokens_and_head_equal_a_brute_force_count(
    page_size: int, num_pages: int, operations: list[tuple[str, list[int], int]]
) -> None:
    both = QueueAndPages(page_size, num_pages)
    for kind, tokens, number in operations:
        if kind == "add":
            both.add(
                tokens,
                priority=number == 2,
                namespace="salt" if number == 1 else "",
                logprob_start={3: 0, 4: 2}.get(number),
            )
        elif kind == "admit":
            both.admit()
        elif kind == "discard" and both.waiting:
            both.discard(both.waiting[number % len(both.waiting)])
        elif both.prefilling and kind in ("advance", "drop"):
            request = both.prefilling[number % len(both.prefilling)]
            if kind == "drop":
                both.drop(request)
            else:
                both.advance(request, number + 1)
        for accounting in ACCOUNTINGS:
            assert both.pending_tokens(accounting) == both.brute_force_pending(accounting)
            attended = both.queue.attended_to_compute(ACCOUNTINGS[accounting])
            assert attended == both.brute_force_attended(accounting)
        assert both.queue.head() is both.brute_force_head()
        assert len(both.queue) == len(both.waiting)
        both.pages.check_conservation()


def test_requests_leave_by_priority_then_arrival() -> None:
    both = QueueAndPages(1)
    low, first, second = both.add([1]), both.add([2], priority=1), both.add([3], priority=1)
    assert [both.admit() for _ in range(4)] == [first, second, low, None]


def test_every_waiting_request_counts_for_one_token_even_when_fully_cached() -> None:
    both = QueueAndPages(1)
    first = both.add([1, 2, 3])
    both.admit()
    both.advance(first, 3)
    both.add([1, 2, 3])
    assert both.pending_tokens() == 1


def test_a_request_waits_while_another_one_prefills_its_prefix() -> None:
    both = QueueAndPages(1)
    first, second = both.add([1, 2, 3, 4]), both.add([1, 2, 9])
    assert both.admit() is first
    assert both.queue.head() is None
    both.advance(first, 1)
    assert both.queue.head() is None
    both.advance(first, 1)
    assert both.admit() is second
    assert second.num_computed == 2


def test_a_parked_request_is_free_at_once_when_the_other_one_is_gone() -> None:
    both = QueueAndPages(1)
    first, second = both.add([1, 2, 3, 4]), both.add([1, 2, 9])
    both.admit()
    both.advance(first, 1)
    assert both.queue.head() is None
    both.drop(first)
    assert both.admit() is second
    assert second.num_computed == 1


def test_nobody_is_parked_when_prefixes_are_computed_by_everyone() -> None:
    both = QueueAndPages(1, parks=False)
    first, second = both.add([1, 2, 3, 4]), both.add([1, 2, 9])
    assert [both.admit(), both.admit()] == [first, second]
    for request in (first, second):
        both.advance(request, 3)
    assert both.radix.storage.cached_pages == 4
    both.pages.check_conservation()


def test_others_overtake_a_parked_request() -> None:
    both = QueueAndPages(1)
    both.add([1, 2, 3])
    both.admit()
    both.add([1, 2, 4])
    other = both.add([7, 8])
    assert both.queue.head() is other


def test_a_parked_request_can_be_discarded() -> None:
    both = QueueAndPages(1)
    first, second = both.add([1, 2, 3]), both.add([1, 2, 4])
    both.admit()
    assert both.queue.head() is None
    both.discard(second)
    both.drop(first)
    assert both.queue.head() is None
    assert both.pending_tokens() == 0
    assert both.radix.storage.cached_pages == 0
    assert not both.radix.tree.root.children


def test_one_call_parks_a_bounded_number_of_requests() -> None:
    both = QueueAndPages(1)
    both.add([1, 2, 3])
    both.admit()
    for _ in range(MAX_PARKED_PER_CALL):
        both.add([1, 2, 4])
    other = both.add([7])
    assert both.queue.head() is None
    assert both.queue.head() is other


def test_discarded_requests_do_not_pile_up() -> None:
    both = QueueAndPages(1)
    both.add([1])
    for _ in range(20 * MAX_PARKED_PER_CALL):
        both.discard(both.add([5, 6]))
    assert isinstance(both.queue._order, FixedOrder)
    assert len(both.queue._order._heap) <= 2 * MAX_PARKED_PER_CALL


def test_a_hit_ends_where_log_probabilities_begin_and_the_rest_is_pending() -> None:
    both = QueueAndPages(2)
    first = both.add([1, 2, 3, 4, 5, 6])
    both.admit()
    both.advance(first, 6)
    scored = both.add([1, 2, 3, 4, 5, 6], logprob_start=3)
    assert both.pending_tokens() == 4
    assert both.admit() is scored
    assert scored.num_computed == 2


def test_a_request_waits_for_no_prefill_beyond_where_its_log_probabilities_begin() -> None:
    both = QueueAndPages(1)
    both.add([1, 2, 3, 4])
    both.admit()
    waits, goes = both.add([1, 2, 3], logprob_start=1), both.add([1, 2, 3], logprob_start=0)
    assert both.queue.head() is goes
    assert waits in both.queue._parked


def test_without_radix_cache_whole_prompts_are_pending() -> None:
    both = QueueAndPages(1, radix_cache=False)
    both.add([1, 2, 3, 4])
    both.add([1, 2, 3, 4])
    assert both.pending_tokens() == 8
    both.admit()
    assert both.pending_tokens() == 4
    assert both.queue.head() is not None
