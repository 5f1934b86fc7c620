"""Tokens do not depend on host memory beyond the pool: they are those of a pipeline without.

The whole runtime except its processes, on a CPU: plain memory stands in for a GPU's, and copies
are over as late as a GPU's may be. Not run on hardware.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.late_pages import LatePages
from support.local_pipeline import FASTEST
from support.tiered_pipeline import TieredPipeline, host_place
from support.tiny_models import tiny_model
from test_tier_tokens import PAGES, TOKENS_PER_REQUEST, conversations, without_store

from sgl_pipeline.kv_store import host_objects
from sgl_pipeline.pp_runner.page_store import page_transfers

pytestmark = pytest.mark.slow

PAGES_PER_REQUEST = TOKENS_PER_REQUEST // PAGES.page_size
Start = Callable[..., TieredPipeline]


@pytest.fixture(autouse=True)
def _a_device_in_no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_transfers, "PageBytes", LatePages)
    monkeypatch.setattr(host_objects, "MIN_FREE_BYTES", 0)  # on any machine


@pytest.fixture
def start() -> Iterator[Start]:
    servers = []

    def start(host_pages: int, **arguments: Any) -> TieredPipeline:
        servers.append(
            TieredPipeline(
                tiny_model("qwen3"),
                (2, 4),
                host_place(host_pages),
                scheduling=PAGES,
                **FASTEST | arguments,
            )
        )
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_conversations_outlive_a_pool_that_holds_two_of_them(start: Start) -> None:
    server = start(1000, num_pages=2 * PAGES_PER_REQUEST + 4)
    for turn in range(3):
        for request, expected in zip(conversations(turn), without_store(turn), strict=True):
            assert server.serve([request]) == [expected]
    assert server.tier.counts.loaded_tokens > 2 * 5 * TOKENS_PER_REQUEST * 0.7
    assert server.tier.counts.num_broken_pages == 0


def test_memory_that_holds_two_conversations_forgets_and_is_never_wrong(start: Start) -> None:
    server = start(4 * PAGES_PER_REQUEST, num_pages=2 * PAGES_PER_REQUEST)
    for turn in range(3):
        assert server.serve(conversations(turn)) == without_store(turn)
    assert server.pages.counts().evicted_pages > 0


def test_a_worker_that_replaces_another_has_nothing_and_is_filled_again(start: Start) -> None:
    server = start(1000, num_pages=2 * PAGES_PER_REQUEST + 4)
    assert server.serve(conversations(0)) == without_store(0)
    server.lose(1)
    for turn in (1, 2):
        for request, expected in zip(conversations(turn), without_store(turn), strict=True):
            assert server.serve([request]) == [expected]
    counts = server.tier.counts
    assert 0 < counts.num_broken_pages <= 6
    assert counts.loaded_tokens > 0


def test_layers_that_move_leave_their_pages_behind(start: Start) -> None:
    server = start(1000, num_pages=2 * PAGES_PER_REQUEST + 4)
    assert server.serve(conversations(0)) == without_store(0)
    plans = iter([(3, 3), (4, 2)])

    def move(step: int) -> None:
        is_free = step % 4 == 1 and not server.core.migration.is_moving
        if is_free and (plan := next(plans, None)) is not None:
            server.core.migration.move_to(plan, 0.0)

    for turn in (1, 2):
        assert server.serve(conversations(turn), move) == without_store(turn)
    assert server.core.plan.layer_counts == (4, 2)
