"""The part of `/metrics` about tenants that share the server: a bounded number of labels
(`scheduling/tenant_totals.py`), and never a key."""

from collections.abc import Sequence

from prometheus_client import Counter, Gauge

from sgl_pipeline.scheduling.tenant_state import TenantState

_PREFIX = "sgl_pipeline_tenant_"


class TenantMetrics:
    """Made when there is a tenant.

    Args:
        model: its served name, the label of our metrics.
    """

    def __init__(self, model: str) -> None:
        self._own = {"model_name": model}
        labels = [*self._own, "tenant"]
        self._service = Counter(
            f"{_PREFIX}service_seconds",
            "Predicted time of the steps of a tenant's requests, since step times are known.",
            labelnames=labels,
        )
        self._gauges = {
            name: Gauge(_PREFIX + name, text, labelnames=labels, multiprocess_mode="mostrecent")
            for name, text in (
                ("weight", "Weight of a tenant."),
                ("waiting_requests", "Requests of a tenant that may be served and wait."),
                ("running_requests", "Requests of a tenant that run."),
                ("pages", "Pages that the running requests of a tenant hold."),
            )
        }
        self._before_s: dict[str, float] = {}

    def publish(self, tenants: Sequence[TenantState]) -> None:
        """Writes `tenants`; the service grows by what has been added since the last ones."""
        for one in tenants:
            labels = {**self._own, "tenant": one.name}
            if one.unit == "ms":
                seconds = one.service * 1e-3
                self._service.labels(**labels).inc(seconds - self._before_s.get(one.name, 0.0))
                self._before_s[one.name] = seconds
            values = {
                "weight": one.weight,
                "waiting_requests": one.waiting,
                "running_requests": one.running,
                "pages": one.pages,
            }
            for name, gauge in self._gauges.items():
                gauge.labels(**labels).set(values[name])
