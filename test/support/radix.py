"""The three parts of the radix tree put together, without requests."""

from collections.abc import Iterator

from sgl_pipeline.scheduling.radix_demand import RadixDemand
from sgl_pipeline.scheduling.radix_storage import RadixStorage
from sgl_pipeline.scheduling.radix_tree import RadixNode, RadixTree


class Radix:
    """A tree with demand and storage."""

    def __init__(self, page_size: int, *, enabled: bool = True) -> None:
        self.tree = RadixTree(page_size, enabled=enabled)
        self.demand = RadixDemand(self.tree)
        self.storage = RadixStorage(self.tree, self.demand)

    def matched(self, tokens: list[int], namespace: str = "") -> RadixNode:
        """The cached part of `tokens`, by the way the scheduler takes."""
        path = self.demand.want(tokens, namespace)
        node = self.storage.match(path)
        self.demand.unwant(path)
        return node

    def put(self, tokens: list[int], first_page: int, namespace: str = "") -> list[int]:
        """Inserts `tokens` with consecutive page ids; returns the declined ones."""
        pages = list(range(first_page, first_page + len(tokens) // self.tree.page_size))
        return self.storage.insert(self.tree.root, tokens, pages, namespace).declined

    def nodes(self) -> Iterator[RadixNode]:
        """All but the root, parents first."""
        nodes = list(self.tree.root.children.values())
        while nodes:
            node = nodes.pop()
            yield node
            nodes += node.children.values()

    def check_nodes(self) -> None:
        """Asserts what the docstrings of node, run and storage say is always true, and that the
        sums which are kept are those over all nodes."""
        nodes, page_size = list(self.nodes()), self.tree.page_size
        for node in nodes:
            parent = node.parent
            assert parent is not None
            assert parent.children[node.key] is node
            assert node.end == parent.end + len(node.tokens)
            assert node.tokens and len(node.tokens) % page_size == 0
            assert node.is_cached or node.num_waiting or node.num_prefilling
            assert node.num_waiting >= sum(child.num_waiting for child in node.children.values())
            assert node.num_prefilling >= sum(c.num_prefilling for c in node.children.values())
            assert not node.parked or (node.num_prefilling and not node.is_cached)
            if node.run is not None:
                assert len(node.run.pages) * page_size == len(node.tokens)
                cached = [child for child in node.children.values() if child.run is not None]
                assert node.run.num_cached_children == len(cached)
                assert node.run.lock_count >= max((c.run.lock_count for c in cached), default=0)
                assert node.run.is_offered or node.run.lock_count or cached
                assert parent.is_cached
        missing = [node for node in nodes if not node.is_cached]
        assert self.demand.missing_tokens == sum(len(n.tokens) * n.num_waiting for n in missing)
        assert self.demand.pending_tokens == sum(
            len(node.tokens) for node in missing if node.num_waiting and not node.num_prefilling
        )
        attended = {
            node: sum(range(node.end - len(node.tokens) + 1, node.end + 1)) for node in missing
        }
        assert self.demand.missing_attended == sum(
            attended[node] * node.num_waiting for node in missing
        )
        assert self.demand.pending_attended == sum(
            attended[node] for node in missing if node.num_waiting and not node.num_prefilling
        )
        runs = [node.run for node in nodes if node.run is not None]
        locked = sum(len(run.pages) for run in runs if run.lock_count)
        assert self.storage.locked_pages == locked
        assert self.storage.cached_pages == sum(len(run.pages) for run in runs)
