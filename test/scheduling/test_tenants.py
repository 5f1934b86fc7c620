"""Virtual times: who is lifted, who is next, and who is forgotten."""

import pytest
from support.pipelines import make_request

from sgl_pipeline.microbatch import Chunk, work_of
from sgl_pipeline.scheduling.tenant_totals import MOST_NAMED_TENANTS, OTHER_TENANTS, TenantTotals
from sgl_pipeline.scheduling.tenants import Tenant, Tenants


def serve(tenants: Tenants, name: str, tokens: int) -> None:
    """A step of that many prompt tokens, of one tenant."""
    request = make_request(name, [1] * tokens, tenant=name)
    chunks = [Chunk(request, 0, tokens, is_decode=False, samples=True)]
    tenants.charge(chunks, work_of(chunks), None)


def without_burst(weights: dict[str, float] | None = None) -> Tenants:
    return Tenants(weights or {}, burst_ms=0.0, burst_tokens=0.0)


def waits(tenants: Tenants, name: str) -> Tenant:
    return tenants.begins_to_wait(name)


def test_service_counts_by_weight() -> None:
    tenants = without_burst({"heavy": 4.0})
    waits(tenants, "heavy")
    waits(tenants, "light")
    serve(tenants, "heavy", 100)
    serve(tenants, "light", 50)
    assert tenants.get("heavy").virtual_time == 25.0
    assert tenants.get("light").virtual_time == 50.0
    assert tenants.totals.service == {"heavy": 100.0, "light": 50.0}


def test_who_comes_back_is_lifted_to_the_least_that_waits() -> None:
    tenants = without_burst()
    waits(tenants, "flood")
    for _ in range(10):
        serve(tenants, "flood", 100)
    late = waits(tenants, "late")
    assert late.virtual_time == tenants.get("flood").virtual_time == 1000.0
    assert late.rank < tenants.get("flood").rank, "it is first: it was not served just now"


def test_who_waits_all_the_time_is_not_lifted() -> None:
    tenants = without_burst()
    waits(tenants, "a")
    waits(tenants, "b")
    serve(tenants, "a", 100)
    assert waits(tenants, "b").virtual_time == 0.0


def test_who_had_more_than_the_others_keeps_it() -> None:
    tenants = without_burst()
    waits(tenants, "a")
    b = waits(tenants, "b")
    serve(tenants, "b", 300)
    tenants.ends_to_wait(b)
    serve(tenants, "a", 100)
    assert waits(tenants, "b").virtual_time == 300.0


def test_when_none_waits_nothing_is_owed() -> None:
    tenants = without_burst()
    a = waits(tenants, "a")
    serve(tenants, "a", 500)
    tenants.ends_to_wait(a)
    serve(tenants, "a", 100)
    assert waits(tenants, "b").virtual_time == 600.0
    assert waits(tenants, "a").virtual_time == 600.0


def test_new_tenants_without_end_do_not_keep_an_old_one_from_its_turn() -> None:
    tenants = without_burst()
    old = waits(tenants, "old")
    served_old = 0
    waiting = [old]
    for number in range(100):
        waiting.append(waits(tenants, f"new {number}"))
        first = min(waiting, key=lambda one: one.rank)
        served_old += first is old
        serve(tenants, first.name, 10)
        if first is not old:
            waiting.remove(first)
            tenants.ends_to_wait(first)
    # At least half as often as of all who wait by turns: as it is served, more of them wait.
    assert served_old >= 7


def test_idle_tenants_are_forgotten_once_nothing_is_owed() -> None:
    tenants = without_burst()
    waits(tenants, "flood")
    for number in range(2000):
        name = f"tenant {number}"
        once = waits(tenants, name)
        serve(tenants, name, 5)
        tenants.ends_to_wait(once)
        serve(tenants, "flood", 20)
    assert len(tenants._known) < 10


def test_a_lone_user_after_the_other_leaves_nothing_behind() -> None:
    tenants = without_burst()
    for number in range(500):
        once = waits(tenants, f"tenant {number}")
        tenants.ends_to_wait(once)
        serve(tenants, once.name, 5)
    assert len(tenants._known) <= 2


def test_what_a_step_is_expected_to_add_counts_until_the_step_is_known() -> None:
    tenants = without_burst({"a": 2.0})
    a = waits(tenants, "a")
    tenants.expect("a", 0, 30)
    assert (a.level, a.virtual_time) == (15.0, 0.0)
    serve(tenants, "a", 20)
    assert a.level == a.virtual_time == 10.0


def test_in_another_unit_all_begin_anew() -> None:
    class OneMs:
        def step_ms(self, work: object) -> float:
            return 1.0

    tenants = without_burst()
    waits(tenants, "a")
    serve(tenants, "a", 100)
    assert tenants.unit == "tokens"
    request = make_request("b", [1], tenant="b")
    chunks = [Chunk(request, 0, 1, is_decode=False, samples=True)]
    tenants.charge(chunks, work_of(chunks), OneMs())
    assert tenants.unit == "ms"
    assert tenants.get("a").virtual_time == 0.0
    assert tenants.get("b").virtual_time == pytest.approx(1.0)
    assert tenants.totals.service == {"b": pytest.approx(1.0)}


def test_a_bounded_number_of_tenants_is_counted_by_name() -> None:
    totals = TenantTotals({"named": 1.0})
    for number in range(100):
        totals.add(f"tenant {number}", 1.0)
    totals.add("named", 7.0)
    assert len(totals.service) == MOST_NAMED_TENANTS + 1
    assert totals.service["named"] == 7.0
    assert totals.service[OTHER_TENANTS] == 100.0 - (MOST_NAMED_TENANTS - 1)


def test_who_asks_for_less_than_its_share_saves_up_a_burst_and_no_more() -> None:
    tenants = Tenants({}, burst_tokens=100.0)
    waits(tenants, "flood")
    for _ in range(20):
        serve(tenants, "flood", 50)
    flood = tenants.get("flood")
    late = waits(tenants, "late")
    assert late.virtual_time == flood.virtual_time - 100.0
    serve(tenants, "late", 60)
    tenants.ends_to_wait(late)
    again = waits(tenants, "late")
    assert again is late and late.virtual_time == flood.virtual_time - 40.0
    assert late.rank < flood.rank, "the rest of the burst is left"
    tenants.ends_to_wait(late)
    for _ in range(20):
        serve(tenants, "flood", 50)
    assert waits(tenants, "late").virtual_time == flood.virtual_time - 100.0


def test_a_flood_is_not_first_for_a_burst_where_others_had_all_they_wanted() -> None:
    tenants = Tenants({}, burst_tokens=100.0)
    light = waits(tenants, "light")
    tenants.ends_to_wait(light)
    serve(tenants, "light", 500)
    assert waits(tenants, "flood").virtual_time == light.virtual_time == 400.0
    serve(tenants, "flood", 10)
    assert waits(tenants, "light").rank < tenants.get("flood").rank


def test_a_flood_that_comes_while_another_waits_is_owed_half_of_what_that_has_had_since() -> None:
    tenants = Tenants({}, burst_tokens=100.0)
    tenants.ends_to_wait(waits(tenants, "light"))
    serve(tenants, "light", 500)
    light = waits(tenants, "light")
    serve(tenants, "light", 30)
    assert light.virtual_time == 530.0 - 100.0
    assert waits(tenants, "flood").virtual_time == 515.0 - 100.0


@pytest.mark.parametrize("burst", [100.0, 0.1, 1234.567])
def test_who_comes_where_none_waits_is_before_who_runs(burst: float) -> None:
    """Whatever their names."""
    tenants = Tenants({}, burst_tokens=burst)
    tenants.ends_to_wait(waits(tenants, "a"))
    for _ in range(9):
        serve(tenants, "a", 50)
    assert waits(tenants, "b").virtual_time == tenants.get("a").virtual_time
    assert tenants.get("b").rank < tenants.get("a").rank


def test_a_tenant_has_saved_while_half_of_its_burst_is_left() -> None:
    tenants = Tenants({}, burst_tokens=100.0)
    waits(tenants, "flood")
    for _ in range(20):
        serve(tenants, "flood", 50)
    late = waits(tenants, "late")
    serve(tenants, "late", 40)
    assert tenants.has_saved("late")
    assert not tenants.has_saved("flood")
    serve(tenants, "late", 40)
    assert late.rank < tenants.get("flood").rank
    assert not tenants.has_saved("late"), "though it is still first"
