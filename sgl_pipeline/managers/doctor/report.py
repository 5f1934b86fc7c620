"""The doctor's findings as text for people, and as JSON types for programs. Pure."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from sgl_pipeline.managers.doctor.doctor_messages import HostFacts
from sgl_pipeline.managers.doctor.findings import Findings

if TYPE_CHECKING:
    # It imports torch, which is of no use without a model.
    from sgl_pipeline.managers.doctor.pipeline_forecast import PipelineForecast

_UNKNOWN = "-"


def as_text(findings: Findings, forecast: "PipelineForecast | str", faults: Sequence[str]) -> str:
    """Tables of hosts and links, the forecast or why there is none, and what is wrong."""
    lines = [*_table(_host_rows(findings)), ""]
    lines += [f"host {rank}: {_address(facts)}" for rank, facts in findings.hosts.items()]
    if findings.links:
        lines += ["", *_table(_link_rows(findings))]
    lines += ["", *([forecast] if isinstance(forecast, str) else forecast.lines()), ""]
    if not faults:
        return "\n".join([*lines, "nothing is wrong"])
    return "\n".join([*lines, "wrong:", *(f"  {fault}" for fault in faults)])


def as_facts(
    findings: Findings, forecast: "PipelineForecast | str", faults: Sequence[str]
) -> dict[str, Any]:
    """The same for programs."""
    return {
        "is_well": not faults,
        "faults": list(faults),
        "hosts": [_host_facts(findings, rank) for rank in findings.hosts],
        "links": [_by_name(link) | {"gbit_per_s": link.gbit_per_s} for link in findings.links],
        "forecast": None if isinstance(forecast, str) else forecast.facts(),
        "forecast_missing": forecast if isinstance(forecast, str) else "",
    }


def _host_facts(findings: Findings, rank: int) -> dict[str, Any]:
    clock, facts = findings.clock(rank), findings.hosts[rank]
    own = _by_name(facts)
    hello = own.pop("hello")
    del own["type"], own["wall_s"], hello["type"]
    return hello | own | {"clock": None if clock is None else _by_name(clock)}


def _by_name(value: Any) -> dict[str, Any]:
    """The fields of a struct or dataclass; JSON types only."""
    fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    return fields


def _host_rows(findings: Findings) -> Iterator[Sequence[str]]:
    names = [*findings.hosts[0].versions]
    memory = "memory GiB (free)"
    clock = "clock ms"
    yield ["host", "name", "cores", "GPUs", memory, clock, "sgl_pipeline", *names, "model"]
    for rank, facts in findings.hosts.items():
        hello, reading = facts.hello, findings.clock(rank)
        ahead = _UNKNOWN
        if reading is not None:
            ahead = f"{reading.wall_ms:+.2f} +-{reading.error_ms:.2f}"
        yield [
            str(rank),
            hello.name,
            str(len(hello.cores)),
            str(hello.num_gpus),
            f"{hello.memory_bytes / 2**30:.1f} ({facts.available_bytes / 2**30:.1f})",
            "head's" if rank == 0 else ahead,
            hello.version,
            *(facts.versions.get(name) or _UNKNOWN for name in names),
            hello.model_digest or _UNKNOWN,
        ]


def _link_rows(findings: Findings) -> Iterator[Sequence[str]]:
    yield ["link", "Gbit/s there", "back", "round trip ms", "worst"]
    for link in findings.links:
        yield [
            f"{link.one} - {link.other}",
            f"{link.gbit_per_s_there:.3g}",
            f"{link.gbit_per_s_back:.3g}",
            f"{link.median_ms:.2f}",
            f"{link.worst_ms:.2f}",
        ]


def _address(facts: HostFacts) -> str:
    hello = facts.hello
    if not hello.address:
        return facts.address_reason
    return f"{hello.address} on interface {hello.interface}, because {facts.address_reason}"


def _table(rows: Iterator[Sequence[str]]) -> list[str]:
    """Columns as wide as they must be."""
    cells = [*rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
