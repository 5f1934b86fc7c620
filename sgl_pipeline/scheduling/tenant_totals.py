"""The service of tenants since the start, of a bounded number of them by name."""

from collections.abc import Iterable

# Names that a counter may have as a label; the rest are counted together.
MOST_NAMED_TENANTS = 20
OTHER_TENANTS = "other"


class TenantTotals:
    """Sums by tenant. Those of `named` and the first others that came, `MOST_NAMED_TENANTS` in all
    or as many as are in `named`, are told apart for good, so that no sum ever falls."""

    def __init__(self, named: Iterable[str]) -> None:
        self._named = dict.fromkeys(named)
        self.service: dict[str, float] = {}

    def label_of(self, name: str) -> str:
        """The name under which the tenant is counted."""
        if name in self._named:
            return name
        if len(self._named) < MOST_NAMED_TENANTS:
            self._named[name] = None
            return name
        return OTHER_TENANTS

    def is_named(self, label: str) -> bool:
        """True if `label` is one tenant's name."""
        return label in self._named

    def add(self, name: str, service: float) -> None:
        """The tenant has had `service`."""
        label = self.label_of(name)
        self.service[label] = self.service.get(label, 0.0) + service

    def begin_anew(self) -> None:
        """Counts in another unit from now on."""
        self.service.clear()
