"""Tenants in `/metrics`."""

from typing import Literal

from prometheus_client import REGISTRY

from sgl_pipeline.managers.reports.tenant_metrics import TenantMetrics
from sgl_pipeline.scheduling.tenant_state import TenantState


def value(name: str, tenant: str) -> float | None:
    labels = {"model_name": "m", "tenant": tenant}
    return REGISTRY.get_sample_value(f"sgl_pipeline_tenant_{name}", labels)


def state(name: str, service: float, unit: Literal["ms", "tokens"] = "ms") -> TenantState:
    return TenantState(
        name=name, weight=2.0, unit=unit, service=service, waiting=3, running=4, pages=5
    )


def test_service_grows_once_times_are_known_and_counts_nothing_twice() -> None:
    """One test: a name can be registered once in a process."""
    metrics = TenantMetrics("m")
    metrics.publish([state("a", 900.0, "tokens")])
    assert value("service_seconds_total", "a") is None
    metrics.publish([state("a", 1500.0), state("b", 500.0)])
    metrics.publish([state("a", 2500.0)])
    assert value("service_seconds_total", "a") == 2.5
    assert value("service_seconds_total", "b") == 0.5
    assert value("weight", "a") == 2.0
    assert value("waiting_requests", "a") == 3
    assert value("running_requests", "b") == 4
    assert value("pages", "b") == 5
