"""Our cache-aware orders against SGLang's: the same queue over the same tree, sorted alike."""

import random
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.pipelines import make_request
from support.radix import Radix

from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.cache_order import CacheOrder, CacheOrders

UNBOUNDED = 10**6


@pytest.fixture(scope="module")
def upstream() -> Iterator[Any]:
    """SGLang's names, which take some seconds to import. It puts requests off whose prefix an
    earlier one will compute, which is `WaitingQueue`'s work here: switched off."""
    install_torchvision_shim()
    from sglang.srt.managers import schedule_policy
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache import radix_cache
    from sglang.srt.sampling.sampling_params import SamplingParams

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule_policy, "IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD", -1)
        yield SimpleNamespace(
            radix=radix_cache,
            SchedulePolicy=schedule_policy.SchedulePolicy,
            req=lambda *args, **kwargs: Req(*args, SamplingParams(), **kwargs),
        )


class BothQueues:
    """The same requests and cached prefixes on both sides."""

    def __init__(self, upstream: Any, policy: str, page_size: int) -> None:
        self.upstream = upstream
        self.page_size = page_size
        self.radix = Radix(page_size)
        depth_first = policy == "dfs-weight"
        orders = CacheOrders(
            self.radix.tree, self.radix.demand, depth_first=depth_first, max_overtakes=UNBOUNDED
        )
        # Another one over the same tree, whose requests the first must not see.
        self.order, self.other = orders.new(), orders.new()
        self.waiting: list[Request] = []
        self.cache = upstream.radix.RadixCache.create_simulated(page_size=page_size)
        self.policy = upstream.SchedulePolicy(policy, self.cache, False, False, False)
        self.num_added = 0

    def add(self, tokens: list[int], namespace: str) -> None:
        # The last token is nobody else's: upstream finds it, a request here does not ask for it.
        for order in (self.order, self.other):
            prompt = [*tokens, 1000 + self.num_added]
            request = make_request(str(self.num_added), prompt, namespace=namespace)
            request.order = (0, 0, self.num_added)
            self.num_added += 1
            self.radix.demand.paths[request] = self.radix.demand.want(prompt[:-1], namespace)
            order.add(request)
            if order is self.order:
                self.waiting.append(request)

    def discard(self, request: Request) -> None:
        self.waiting.remove(request)
        self.order.discard(request)
        self.radix.demand.unwant(self.radix.demand.paths.pop(request))

    def cache_prefix(self, tokens: list[int], namespace: str) -> None:
        tokens = tokens[: len(tokens) // self.page_size * self.page_size]
        self.radix.put(tokens, 0, namespace)
        key = self.upstream.radix.RadixKey(array("q", tokens), namespace or None)
        self.cache.insert(self.upstream.radix.InsertParams(key=key))

    def theirs(self, ours: list[Request]) -> list[str]:
        """The queue as SGLang sorts it. Of children with equal weights it takes the one first that
        was cached first: they are put into the order of `ours`, which must then be a valid one."""
        queue = [
            self.upstream.req(
                one.request_id,
                "",
                array("q", one.prompt_ids),
                extra_key=one.cache_namespace or None,
            )
            for one in self.waiting
        ]
        self.policy.calc_priority(queue)
        places = {request.request_id: place for place, request in enumerate(ours)}
        first: dict[Any, int] = {}
        for one in queue:
            node = one.last_node
            while node is not None:
                first[node] = min(first.get(node, len(ours)), places[one.rid])
                node = node.parent
        for node in first:
            children = sorted(node.children.items(), key=lambda one: first.get(one[1], len(ours)))
            node.children.clear()
            node.children.update(children)
        queue.sort(key=lambda one: int(one.rid))
        self.policy.calc_priority(queue)
        return [one.rid for one in queue]

    def drained(self, order: CacheOrder) -> list[str]:
        served = []
        while (request := order.first()) is not None:
            order.serve(request)
            served.append(request.request_id)
        return served


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(10))
def test_a_queue_is_sorted_as_upstream_does_and_leaves_in_that_order(
    upstream: Any, policy: str, page_size: int, seed: int
) -> None:
    rng = random.Random(seed)
    both = BothQueues(upstream, policy, page_size)
    prompts: list[list[int]] = []
    num_sorted = 0
    for _ in range(60):
        old = rng.choice(prompts) if prompts else []
        more = [token for _ in range(3) for token in [rng.randrange(3)] * page_size]
        tokens = old[: rng.randrange(len(old) + 1)] + more
        namespace = rng.choice(["", "", "", "salt"])
        kind = rng.choice(["add", "add", "add", "cache", "discard"])
        if kind == "add":
            both.add(tokens, namespace)
            prompts.append(tokens)
        elif kind == "cache":
            both.cache_prefix(tokens, namespace)
        elif both.waiting:
            both.discard(rng.choice(both.waiting))
        ours = both.order.ranked(both.waiting)
        ids = [request.request_id for request in ours]
        assert ids == both.theirs(ours)
        num_sorted += ids != [request.request_id for request in both.waiting]
    assert num_sorted > 10
    ours = both.order.ranked(both.waiting)
    assert both.drained(both.order) == [request.request_id for request in ours]
