"""Whole queues by what the radix tree has of them: what `CacheOrder` keeps the first of.

For explanations and forecasts, which may look at all that wait. Pure functions.
"""

import heapq
from collections.abc import Container, Mapping, Sequence

from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.radix_tree import RadixNode


def by_longest_prefix(paths: Mapping[Request, RadixNode]) -> list[Request]:
    """The most cached tokens first, then by `Request.order`.

    Args:
        paths: the end of what each request wants.
    """
    ends = {request: path.last_cached.end for request, path in paths.items()}
    return sorted(ends, key=lambda request: (-ends[request], request.order))


def depth_first(
    paths: Mapping[Request, RadixNode], walked: Container[RadixNode] = ()
) -> list[Request]:
    """The cached nodes below a node, those of most requests first, then its own requests.

    Args:
        paths: the end of what each request wants.
        walked: nodes that the walk is in: they come before others.
    """
    # The requests of each node, in the order in which they will be served.
    served: dict[RadixNode, list[Request]] = {}
    for request in sorted(paths, key=lambda request: request.order):
        served.setdefault(paths[request].last_cached, []).append(request)
    below: dict[RadixNode, list[RadixNode]] = {}
    # The deepest first: a node is looked at when all below it are done.
    queue = [(-node.end, number, node) for number, node in enumerate(served)]
    heapq.heapify(queue)
    num_nodes = len(queue)
    while queue:
        _, _, node = heapq.heappop(queue)
        children = [(child, served.pop(child)) for child in below.pop(node, [])]
        children.sort(key=lambda one: (one[0] not in walked, -len(one[1]), one[1][0].order))
        whole = [request for _, requests in children for request in requests]
        served[node] = whole + served.get(node, [])
        if node.parent is None:
            return served[node]
        if node.parent not in below and node.parent not in served:
            num_nodes += 1
            heapq.heappush(queue, (-node.parent.end, num_nodes, node.parent))
        below.setdefault(node.parent, []).append(node)
    return []


def bounded(
    requests: Sequence[Request],
    overtakers: Sequence[tuple[int, int, int]],
    max_overtakes: int,
) -> list[Request]:
    """`requests`, but with none overtaken more than `max_overtakes` times.

    Args:
        overtakers: a heap, the order of each request that was served before the oldest of these
            though it came later.
    """
    before = list(overtakers)
    arrivals = sorted(requests, key=lambda request: request.order)
    left = dict.fromkeys(requests)
    served: list[Request] = []
    # Their places in the two sequences.
    oldest = best = 0
    while left:
        while arrivals[oldest] not in left:
            oldest += 1
        while before and before[0] < arrivals[oldest].order:
            heapq.heappop(before)
        while requests[best] not in left:
            best += 1
        is_overdue = len(before) >= max_overtakes
        following = arrivals[oldest] if is_overdue else requests[best]
        if following is not arrivals[oldest]:
            heapq.heappush(before, following.order)
        del left[following]
        served.append(following)
    return served
