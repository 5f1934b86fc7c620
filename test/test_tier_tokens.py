"""Tokens do not depend on a store: after eviction, a restart, at another depth or split, under
chunks, retraction, layer moves and losses, they are those of a pipeline without one.

The whole runtime but its processes, with real files. The first pipeline computes and saves; those
after it load, in part with a pool that holds a fraction of what the requests need.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.forced_drafts import ForcedDrafts
from support.local_pipeline import FASTEST, LocalPipeline
from support.tiered_pipeline import RULES, TieredPipeline
from support.tiny_models import VOCAB_SIZE, tiny_model

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.args.tier_args import WRITE_POLICIES, WritePolicy
from sgl_pipeline.kv_store.object_files import ObjectFiles
from sgl_pipeline.requests import GREEDY, Request, StopRules

pytestmark = pytest.mark.slow

SPLITS = [(6,), (3, 3), (1, 5), (2, 1, 1, 2)]
CHUNKED = ThrottleArgs(max_prefill_tokens=24, min_prefill_tokens=4, prefill_spread_steps=3)
PAGES = SchedulingArgs(page_size=4)
NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 6, 60, 12
TOKENS_PER_REQUEST = PROMPT_TOKENS + OUTPUT_TOKENS
CODED = ("auto", "int8", "fp8_e4m3")


def conversations(turn: int = 0) -> list[Request]:
    """Prompts with nothing in common; those of the next `turn` begin with the last one's."""
    requests = []
    for number in range(NUM_REQUESTS):
        tokens = random.Random(number)
        prompt = [tokens.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS + 8 * turn)]
        stops = StopRules(max_new_tokens=OUTPUT_TOKENS)
        requests.append(Request(f"{number} of {turn}", prompt, GREEDY, stops))
    return requests


@cache
def without_store(turn: int, kv_cache_dtype: str = "auto") -> list[list[int]]:
    pipeline = LocalPipeline(tiny_model("qwen3"), (6,), kv_cache_dtype=kv_cache_dtype, **FASTEST)
    return pipeline.run(conversations(turn))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


class Servers:
    """Pipelines on one folder, closed in the end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.all = folder, list[TieredPipeline]()

    def start(self, layer_counts: tuple[int, ...] = (3, 3), **arguments: Any) -> TieredPipeline:
        arguments = FASTEST | {"scheduling": PAGES} | arguments
        model = tiny_model("qwen3")
        self.all.append(TieredPipeline(model, layer_counts, self.folder, **arguments))
        return self.all[-1]


@pytest.fixture
def servers(folder: Path) -> Iterator[Servers]:
    servers = Servers(folder)
    yield servers
    for server in servers.all:
        server.close()


def assert_loaded(server: TieredPipeline, least_share: float = 0.95) -> None:
    """Most of the prompts' whole pages came from the store."""
    counts = server.tier.counts
    whole = NUM_REQUESTS * (PROMPT_TOKENS - PROMPT_TOKENS % PAGES.page_size - PAGES.page_size)
    assert counts.loaded_tokens >= least_share * whole, counts


# Where layers are cut is nothing to a page's format: all splits with one, two with each.
@pytest.mark.parametrize(
    ("layer_counts", "kv_cache_dtype"),
    [
        *((split, "auto") for split in SPLITS),
        *((split, coded) for split in (SPLITS[0], SPLITS[-1]) for coded in CODED[1:]),
    ],
    ids=str,
)
def test_a_restart_at_any_depth_loads_what_another_split_has_saved(
    servers: Servers, layer_counts: tuple[int, ...], kv_cache_dtype: str
) -> None:
    first = servers.start((2, 4), kv_cache_dtype=kv_cache_dtype)
    assert first.serve(conversations()) == without_store(0, kv_cache_dtype)
    second = servers.start(layer_counts, kv_cache_dtype=kv_cache_dtype, throttle=CHUNKED)
    assert second.serve(conversations(turn=1)) == without_store(1, kv_cache_dtype)
    assert_loaded(second)


@pytest.mark.parametrize("kv_cache_dtype", CODED)
def test_servers_with_drafts_save_and_load_right_rows_only(
    servers: Servers, kv_cache_dtype: str
) -> None:
    """Half of the draft tokens are wrong. The second server's prompts begin with the prompts and
    answers of the first."""
    answers = without_store(0, kv_cache_dtype)
    first = servers.start((2, 4), kv_cache_dtype=kv_cache_dtype)
    drafts = half_wrong_drafts(first, conversations(), answers)
    assert first.serve(conversations()) == answers
    assert 0 < drafts.num_accepted < drafts.num_drafted

    plain = LocalPipeline(tiny_model("qwen3"), (6,), kv_cache_dtype=kv_cache_dtype, **FASTEST)
    expected = plain.run(next_turns(answers))
    second = servers.start((1, 5), kv_cache_dtype=kv_cache_dtype, throttle=CHUNKED)
    drafts = half_wrong_drafts(second, next_turns(answers), expected)
    assert second.serve(next_turns(answers)) == expected
    assert 0 < drafts.num_accepted < drafts.num_drafted
    # The last token of an answer has no row, and only whole pages are saved.
    pages = (TOKENS_PER_REQUEST - 1) // PAGES.page_size
    assert second.tier.counts.loaded_tokens == NUM_REQUESTS * pages * PAGES.page_size


def next_turns(answers: list[list[int]]) -> list[Request]:
    """Prompts that begin with those of `conversations` and their answers."""
    turns = zip(conversations(), answers, strict=True)
    return [
        Request(one.request_id, [*one.prompt_ids, *answer, 1, 2, 3], GREEDY, one.stops)
        for one, answer in turns
    ]


def half_wrong_drafts(
    server: TieredPipeline, requests: list[Request], answers: list[list[int]]
) -> ForcedDrafts:
    names = [one.request_id for one in requests]
    return ForcedDrafts(server.scheduler, dict(zip(names, answers, strict=True)), 0.5)


@pytest.mark.parametrize("layer_counts", SPLITS, ids=str)
def test_stages_find_their_layers_in_files_of_any_other_split(
    servers: Servers, folder: Path, layer_counts: tuple[int, ...]
) -> None:
    servers.start(layer_counts).serve(conversations())
    records = [*folder.glob("records/*/*")]
    assert len([*folder.glob("*.bin")]) == len(layer_counts) * len(records) > 0
    for others in SPLITS:
        server = servers.start(others)
        assert server.serve(conversations()) == without_store(0)
        assert_loaded(server)
        assert server.tier.counts.num_broken_pages == 0


def test_files_of_one_layer_each_are_read_as_before(
    servers: Servers, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ObjectFiles, "groups_layers", False)
        servers.start((2, 4)).serve(conversations())
    assert [*folder.glob("*_L5-6_H0.bin")]
    server = servers.start((1, 5))
    assert server.serve(conversations(turn=1)) == without_store(1)
    assert_loaded(server)
    assert [*folder.glob("*_L1-6_H0.bin")]


@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
def test_conversations_outlive_a_pool_that_holds_two_of_them(
    servers: Servers, write_policy: WritePolicy
) -> None:
    num_pages = 2 * TOKENS_PER_REQUEST // PAGES.page_size + 4
    rules = replace(RULES, write_policy=write_policy, load_share=1.0, save_share=0.5)
    server = servers.start(num_pages=num_pages, rules=rules)
    for turn in range(3):
        for request, expected in zip(conversations(turn), without_store(turn), strict=True):
            assert server.serve([request]) == [expected]
    loaded = server.tier.counts.loaded_tokens
    # A page is saved at its second use only by one policy, which never sees one here.
    assert (loaded == 0) is (write_policy == "write_through_selective")


def test_retracted_requests_find_their_pages_in_the_store(servers: Servers) -> None:
    num_pages = 2 * TOKENS_PER_REQUEST // PAGES.page_size
    server = servers.start(num_pages=num_pages, throttle=CHUNKED)
    for turn in range(2):
        assert server.serve(conversations(turn)) == without_store(turn)
    assert server.scheduler.num_retractions and server.tier.counts.loaded_tokens


def test_layers_move_while_pages_are_saved_and_loaded(servers: Servers) -> None:
    servers.start((6,)).serve(conversations())
    server = servers.start((3, 3), throttle=CHUNKED)
    plans = iter([(4, 2), (1, 5), (3, 3)])

    def move(step: int) -> None:
        is_free = step % 4 == 1 and not server.core.migration.is_moving
        if is_free and (plan := next(plans, None)) is not None:
            server.core.migration.move_to(plan, 0.0)

    outputs = []
    for request in conversations(turn=1):
        outputs += server.serve([request], move)
    assert outputs == without_store(1)
    assert server.core.plan.epoch == 3 and server.tier.counts.loaded_tokens


@pytest.mark.parametrize("log_pages", [None, 64])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_is_lost_among_loaded_pages(
    servers: Servers, stage: int, log_pages: int | None
) -> None:
    servers.start((6,)).serve(conversations())
    server = servers.start((3, 3), throttle=CHUNKED, log_pages=log_pages)
    for _ in range(2):
        outputs = server.serve(
            conversations(turn=1), lambda step: server.lose(stage) if step in (3, 9) else None
        )
        assert outputs == without_store(1)
    assert server.tier.counts.loaded_tokens


DAMAGE = {
    "missing": lambda path: path.unlink(),
    "short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "flipped": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x55"),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_objects_are_noticed_computed_and_saved_again(
    servers: Servers, folder: Path, damage: str
) -> None:
    servers.start((6,)).serve(conversations())
    objects = sorted(folder.glob("*_L0-6_H0.bin"))
    for path in objects[::5]:
        DAMAGE[damage](path)
    server = servers.start()
    assert server.serve(conversations()) == without_store(0)
    assert server.tier.counts.num_broken_pages > 0
    mended = servers.start()
    assert mended.serve(conversations()) == without_store(0)
    assert mended.tier.counts.num_broken_pages < server.tier.counts.num_broken_pages
