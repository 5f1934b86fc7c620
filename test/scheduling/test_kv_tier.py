"""What a store gives back is what a step would have computed, whatever happens on the way."""

from random import Random

import pytest
from support.stored_pipeline import (
    PAGE_SIZE,
    PLACE,
    RULES,
    MemoryStore,
    StoredPipeline,
    shared_prompt,
)

from sgl_pipeline.args.tier_args import WRITE_POLICIES
from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.requests import FinishReason
from sgl_pipeline.scheduling.kv_tier import REST_S
from sgl_pipeline.scheduling.tier_rules import TierRules
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.store_orders import PagesLoaded

PROMPT = [token % 7 for token in range(3, 40)]
ABORT = FinishReason("abort", message="gone", status_code=499)


def served(store: MemoryStore, layer_counts: tuple[int, ...] = (3, 3)) -> StoredPipeline:
    """A pipeline that has served PROMPT once."""
    pipeline = StoredPipeline(store, layer_counts)
    pipeline.add(PROMPT)
    pipeline.run()
    return pipeline


@pytest.mark.parametrize("groups_layers", [False, True])
@pytest.mark.parametrize("layer_counts", [(6,), (3, 3), (1, 2, 3)])
def test_another_server_of_another_depth_loads_what_the_first_one_saved(
    layer_counts: tuple[int, ...], groups_layers: bool
) -> None:
    store = MemoryStore(groups_layers=groups_layers)
    served(store)
    assert {record.cuts for record in store.records.values()} == {(0, 3) if groups_layers else ()}
    assert len(store.objects) == len(store.records) * (2 if groups_layers else 6)
    other = StoredPipeline(store, layer_counts)
    request = other.add([*PROMPT, 1, 2])
    other.run()
    other.check_outputs()
    assert request.loaded_tokens == request.cached_tokens == len(PROMPT) // PAGE_SIZE * PAGE_SIZE
    assert other.tier.counts.loaded_tokens == request.loaded_tokens


def test_one_load_has_pages_that_servers_of_unlike_splits_have_saved() -> None:
    store = MemoryStore()
    served(store)
    second = StoredPipeline(store, (1, 2, 3))
    second.add([*PROMPT, *([6] * 8)])
    second.run()
    assert {record.cuts for record in store.records.values()} == {(0, 3), (0, 1, 3)}
    third = StoredPipeline(store, (5, 1))
    request = third.add([*PROMPT, *([6] * 8), 1])
    third.run()
    third.check_outputs()
    assert request.loaded_tokens == (len(PROMPT) + 8) // PAGE_SIZE * PAGE_SIZE
    assert third.tier.counts.num_broken_pages == 0


def test_output_tokens_are_saved_too() -> None:
    store = MemoryStore()
    first = StoredPipeline(store)
    answer = first.add(PROMPT, 13)
    first.run()
    other = StoredPipeline(store)
    request = other.add([*PROMPT, *answer.output_ids, 5])
    other.run()
    # The last token of an answer is never fed back.
    assert request.loaded_tokens == (len(PROMPT) + 12) // PAGE_SIZE * PAGE_SIZE


def test_namespaces_share_nothing() -> None:
    store = MemoryStore()
    served(store)
    other = StoredPipeline(store)
    request = other.add(PROMPT, namespace="00" * 32)
    other.run()
    assert request.loaded_tokens == 0


def test_what_is_loaded_is_not_saved_again() -> None:
    store = MemoryStore()
    served(store)
    other = served(store)
    assert other.tier.counts.saved_tokens == 0


def test_requests_that_want_one_prefix_wait_for_one_load() -> None:
    store = MemoryStore()
    served(store)
    other = StoredPipeline(store)
    requests = [other.add([*PROMPT, last]) for last in (1, 2, 3)]
    other.run()
    other.check_outputs()
    assert other.tier.counts.loaded_tokens == 36
    assert [one.cached_tokens for one in requests] == [36, 36, 36]


def test_so_many_prefixes_are_looked_up_at_a_time() -> None:
    pipeline = StoredPipeline(MemoryStore(), rules=TierRules(least_tokens=8, look_ahead=2))
    for shift in range(5):
        pipeline.add([(token + shift) % 7 for token in PROMPT])
    pipeline.fill()
    assert len(pipeline.lookups) == 2
    pipeline.answer()
    pipeline.fill()
    assert len(pipeline.lookups) == 2


def test_a_load_leaves_what_waiting_requests_have_had_loaded() -> None:
    store = MemoryStore()
    prompts = [[(token + shift) % 7 for token in PROMPT] for shift in (0, 2, 3)]
    for prompt in prompts:
        first = StoredPipeline(store)
        first.add(prompt)
        first.run()
    other = StoredPipeline(store, num_pages=20)  # two prompts and answers at most
    other.core.scheduler.pausing.pause(retract=False)
    requests = [other.add([*prompt, 1]) for prompt in prompts]
    with pytest.raises(AssertionError, match="never ended"):
        other.run(turns=50)
    assert [one.loaded_tokens for one in requests] == [36, 0, 0]
    other.core.scheduler.pausing.resume()
    other.run()
    other.check_outputs()
    assert [one.cached_tokens for one in requests] == [36, 36, 36]
    assert other.tier.counts.loaded_tokens == 3 * 36


def test_a_request_is_explained_while_the_store_is_asked_and_while_pages_come() -> None:
    store = MemoryStore()
    served(store)
    other = StoredPipeline(store)
    request = other.add([*PROMPT, 1])
    other.fill()
    explanation = other.core.explain(request.request_id)
    assert explanation is not None and explanation.rule == "loading"
    assert "asked" in explanation.text
    other.answer()
    other.fill()
    explanation = other.core.explain(request.request_id)
    assert explanation is not None and explanation.rule == "loading"
    assert "36 tokens" in explanation.text


@pytest.mark.parametrize("silent", ["lookup", "load"])
def test_a_request_waits_no_longer_than_its_time(silent: str) -> None:
    store = MemoryStore()
    served(store)
    other = StoredPipeline(store)
    other.add([*PROMPT, 1])
    other.fill()
    if silent == "load":
        other.answer()
    other.run(turns=40, transfers=False)
    other.check_outputs()
    assert other.tier.counts.loaded_tokens == 0


def test_nothing_is_loaded_behind_pages_that_a_stage_owes() -> None:
    store = MemoryStore()
    served(store)
    other = StoredPipeline(store, log_pages=32)
    other.add(PROMPT[:7])  # too short for the store: computed, so that the first stage keeps rows
    other.run()
    other.lose(1)
    request = other.add([*PROMPT, 1])
    other.run()
    other.check_outputs()
    assert request.cached_tokens == PAGE_SIZE and request.loaded_tokens == 0
    assert other.tier.counts.unfulfilled == {"owed": 8 * PAGE_SIZE}


def test_a_late_load_serves_the_next_request() -> None:
    store = MemoryStore()
    served(store)
    other = StoredPipeline(store)
    first = other.add([*PROMPT, 1])
    other.fill()
    other.answer()
    other.run(turns=40, transfers=False)
    other.run()
    assert first.cached_tokens == 0
    second = other.add([*PROMPT, 2])
    other.run()
    assert second.cached_tokens == 36
    # The first one has computed all, and the second one found it in the pool.
    assert first.loaded_tokens == second.loaded_tokens == 0
    other.check_outputs()


def test_a_store_that_hangs_keeps_no_pages_that_a_request_needs() -> None:
    store = MemoryStore()
    served(store)
    other = StoredPipeline(store, num_pages=16)
    request = other.add([*PROMPT, 1])
    other.fill()
    other.answer()
    other.fill()
    assert other.tier.loads.loading_pages == 8  # it needs ten
    other.run(turns=80, transfers=False)
    other.check_outputs()
    assert request.loaded_tokens == 0 and other.tier.loads.loading_pages == 0
    # A while later the store is used again.
    other.now_s += REST_S
    again = other.add([*PROMPT[:20], *([6] * 12)])
    other.run()
    assert again.finish is not None and other.tier.counts.saved_tokens > 0


def test_what_was_asked_while_no_page_moves_is_not_asked_again() -> None:
    store = MemoryStore()
    served(store)
    other = StoredPipeline(store)
    other.core.is_held = True
    request = other.add([*PROMPT, 1])
    other.fill()
    other.answer()
    other.fill()
    assert other.tier.loads.loading_pages == 0
    other.core.is_held = False
    other.run()
    assert other.tier.counts.num_lookups == 1 and request.loaded_tokens == 36


def test_records_that_no_driver_took_are_not_those_of_another_store() -> None:
    pipeline = StoredPipeline(MemoryStore())
    pipeline.add(PROMPT)
    while not pipeline.tier.commits:
        pipeline.now_s += 0.05
        pipeline.fill()
        for stage in pipeline.stages:
            while stage.inbox:
                pipeline.run_order(stage.stage)
            while stage.transfers:
                pipeline.end_transfer(stage.stage)
    pipeline.tier.use(PLACE, RULES)
    assert not pipeline.tier.commits


@pytest.mark.parametrize("damage", ["missing", "altered"])
def test_a_damaged_object_ends_the_hit_before_it_and_costs_its_record(damage: str) -> None:
    store = MemoryStore()
    first = served(store)
    hashes = [record.page_hash for record in first.store.records.values()]
    if damage == "missing":
        del store.objects[hashes[4], range(3)]
    else:
        store.objects[hashes[4], range(3)][2][0] = (9,)
    other = StoredPipeline(store)
    request = other.add([*PROMPT, 1])
    other.run()
    other.check_outputs()
    assert request.loaded_tokens == 16
    assert other.tier.counts.num_broken_pages == 1
    assert other.tier.counts.saved_tokens > 0  # it is in the store again
    assert hashes[4] in store.records


def test_a_prefix_below_the_threshold_is_computed() -> None:
    store = MemoryStore()
    served(store)
    other = StoredPipeline(store, rules=TierRules(least_tokens=256))
    request = other.add([*PROMPT, 1])
    other.run()
    assert request.loaded_tokens == 0 and other.tier.counts.num_lookups == 0


def test_selective_writing_waits_for_the_second_request() -> None:
    store = MemoryStore()
    pipeline = StoredPipeline(
        store, rules=TierRules(least_tokens=8, write_policy="write_through_selective")
    )
    pipeline.add(PROMPT)
    pipeline.run()
    assert not store.records
    pipeline.add([*PROMPT, 1])
    pipeline.run()
    assert len(store.records) == 9


def test_writing_back_saves_what_is_about_to_be_evicted() -> None:
    store = MemoryStore()
    rules = TierRules(least_tokens=8, write_policy="write_back", save_share=0.5)
    pipeline = StoredPipeline(store, num_pages=16, rules=rules)
    pipeline.add(PROMPT)
    pipeline.run()
    assert len(store.records) == 9
    pipeline.add([(token + 1) % 7 for token in PROMPT])
    pipeline.run()
    again = pipeline.add([*PROMPT, 1])
    pipeline.run()
    assert again.cached_tokens == 36 and again.loaded_tokens > 0
    pipeline.check_outputs()


def test_a_failed_save_commits_the_pages_before_it() -> None:
    store = MemoryStore()
    pipeline = StoredPipeline(store)
    pipeline.add(PROMPT)
    for _ in range(60):
        pipeline.now_s += 0.05
        pipeline.fill()
        for stage in pipeline.stages:
            while stage.inbox:
                pipeline.run_order(stage.stage)
            while stage.transfers:
                pipeline.end_transfer(stage.stage, can_write=stage.stage == 0)
    assert 0 < len(store.records) < 9
    assert pipeline.tier.saves.last_message == "no space"
    assert pipeline.tier.counts.num_failed_saves > 0


def test_a_detached_store_lets_all_requests_go() -> None:
    store = MemoryStore()
    served(store)
    other = StoredPipeline(store)
    for last in (1, 2):
        other.add([*PROMPT, last])
    other.fill()
    other.answer()
    other.tier.use(None, RULES)
    other.run()
    other.check_outputs()
    assert other.tier.counts.loaded_tokens == 0
    other.tier.use(PLACE, RULES)
    request = other.add([*([6] * 20), 1])
    other.run()
    assert request.finish is not None and other.tier.counts.saved_tokens > 0


def test_reports_that_no_stage_could_send_are_refused() -> None:
    pipeline = StoredPipeline(MemoryStore())
    bad = PagesLoaded(stage=0, transfer=7, num_pages=0, num_bytes=0, busy_s=0.0)
    with pytest.raises(ProtocolError, match="never sent"):
        pipeline.core.take_store_report(bad)
    with pytest.raises(ProtocolError, match="stage 5 of 2"):
        pipeline.core.take_store_report(
            PagesLoaded(stage=5, transfer=7, num_pages=0, num_bytes=0, busy_s=0.0)
        )


def one_operation(pipeline: StoredPipeline, random: Random) -> None:
    """One of the things that may happen next."""
    pipeline.now_s += random.random() * 0.1
    stage = random.choice(pipeline.stages)
    kind = random.choices(
        ["add", "order", "transfer", "answer", "fill", "abort", "lose", "hold", "damage", "flush"],
        [6, 40, 12, 8, 20, 2, 1, 2, 2, 1],
    )[0]
    if kind == "add" and len(pipeline.requests) < 60:
        pipeline.add(shared_prompt(random, 50), random.randrange(1, 12))
    elif kind == "order":
        pipeline.run_order(stage.stage)
    elif kind == "transfer" and stage.transfers:
        index = random.randrange(len(stage.transfers))
        pipeline.end_transfer(stage.stage, index, can_write=random.random() < 0.9)
    elif kind == "answer" and pipeline.lookups:
        pipeline.answer(random.randrange(len(pipeline.lookups)))
    elif kind == "abort":
        live = pipeline.core.scheduler.requests()
        if live:
            pipeline.core.scheduler.abort(random.choice(live).request_id, ABORT)
    elif kind == "lose":
        pipeline.lose(stage.stage)
    elif kind == "hold":
        pipeline.core.is_held = not pipeline.core.is_held
    elif kind == "damage" and pipeline.store.objects:
        key = random.choice(list(pipeline.store.objects))
        if random.random() < 0.5:
            del pipeline.store.objects[key]
        else:
            pipeline.store.objects[key] = [[(8,)] * PAGE_SIZE for _ in key[1]]
    elif kind == "flush":
        pipeline.core.scheduler.flush_cache()
    pipeline.fill()


@pytest.mark.parametrize("seed", range(100))
def test_any_order_of_events_gives_the_right_tokens(seed: int) -> None:
    random = Random(seed)
    store = MemoryStore()
    for layer_counts in random.sample([(6,), (3, 3), (1, 2, 3), (5, 1)], 2):
        rules = TierRules(
            least_tokens=random.choice([4, 8, 16]),
            write_policy=random.choice(WRITE_POLICIES),
            wait_policy=random.choice(["timeout", "best_effort"]),
        )
        log_pages = random.choice([None, 6, 40])
        store.groups_layers = random.random() < 0.8
        pipeline = StoredPipeline(store, layer_counts, random.choice([20, 40]), rules, log_pages)
        for _ in range(400):
            one_operation(pipeline, random)
        pipeline.core.is_held = False
        pipeline.run()
        pipeline.check_outputs()


def test_a_late_report_of_another_plan_has_no_effect() -> None:
    pipeline = StoredPipeline(MemoryStore(), (1, 2, 3))
    pipeline.add(PROMPT)
    while not pipeline.stages[2].transfers:
        pipeline.now_s += 0.05
        pipeline.fill()
        for stage in pipeline.stages:
            while stage.inbox:
                pipeline.run_order(stage.stage)
    report = pipeline.stages[2].end_transfer(0)
    pipeline.core.halt([2], "lost", pipeline.now_s)
    pipeline.core.use_stages(StagePlan(1, (3, 3)), (6, 6), pipeline.now_s)
    pipeline.core.take_store_report(report)
    assert not pipeline.tier.commits
