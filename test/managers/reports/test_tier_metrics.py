"""A store's metrics under SGLang's names: counts grow by what has happened since the last state."""

from prometheus_client import REGISTRY
from support.step_records import tier_state

from sgl_pipeline.managers.reports.tier_metrics import TierMetrics


def value(name: str, **labels: str) -> float | None:
    """The one sample of that name that has these labels, if there is one."""
    found = [
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) <= 1, found
    return found[0] if found else None


def test_a_store_is_counted_by_its_backend_and_by_reason() -> None:
    """One test: upstream's names can be registered once in a process."""
    metrics = TierMetrics("file", "m", 2, {"zone": "a"})
    metrics.publish(tier_state())
    of_file = {"storage_backend": "file", "pp_size": "2", "zone": "a"}
    missed = "sglang:storage_prefetch_unfulfilled_tokens_total"
    counts = {
        "sglang:prefetched_tokens_total": 800,
        "sglang:backuped_tokens_total": 700,
        "sglang:storage_prefetch_hit_tokens_total": 900,
        "sglang:hicache_backup_dropped_tokens_total": 56,
        "sglang:prefetch_bandwidth_count": 1,
        "sglang:prefetch_bandwidth_sum": 2.0,
        "sglang:backup_bandwidth_sum": 0.25,
    }
    assert {name: value(name, **of_file) for name in counts} == counts
    assert value(missed, reason="deadline", **of_file) == 60
    assert value(missed, reason="slower_than_compute", **of_file) == 40
    assert value(missed, reason="host_capacity", **of_file) == 0
    for source, tokens in (("pool", 10), ("store", 20), ("compute", 30)):
        assert value("sgl_pipeline_store_waiting_tokens", source=source) == tokens
    assert value("sgl_pipeline_store_lookups_total", model_name="m") == 8
    assert value("sgl_pipeline_store_hits_total", model_name="m") == 6
    assert value("sgl_pipeline_store_pages_under_way", direction="save") == 5
    assert value("sgl_pipeline_store_dropped_tokens_total", reason="pressure") == 50

    grown = {"deadline": 61, "dropped": 4}
    metrics.publish(tier_state(backend=None, loaded_tokens=810, missed_tokens=grown))
    assert value("sglang:prefetched_tokens_total", **of_file) == 810, "nothing is counted twice"
    assert value(missed, reason="deadline", **of_file) == 61
    assert value("sglang:prefetch_bandwidth_count", **of_file) == 1, "no pages came meanwhile"
    assert value("sgl_pipeline_store_hits_total") == 6

    metrics.publish(tier_state(backend="nixl", loaded_tokens=815, missed_tokens=grown))
    assert value("sglang:prefetched_tokens_total", storage_backend="nixl") == 5
    assert value("sglang:prefetched_tokens_total", **of_file) == 810
