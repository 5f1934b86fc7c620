"""The figures of a soak of two servers: a line for each minute, and what must hold at the end.

Pure functions of what was seen of processes, servers and requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmark.disaggregation.pair import ProcessFacts, ServerFacts
from benchmark.robustness.process_memory import Growth, MemorySeries
from benchmark.robustness.soak import Verdict
from benchmark.robustness.soak_clients import Outcome
from benchmark.support.dated_result import markdown_table
from benchmark.support.process_kinds import ROUTER


@dataclass(frozen=True, slots=True)
class Minute:
    """The counts of requests by their end since the beginning, and the state of all that runs."""

    elapsed_s: float
    outcomes: Mapping[Outcome, int]
    servers: Mapping[str, ServerFacts]
    processes: Mapping[str, ProcessFacts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of a soak: since `warm_up_s`, a process may grow by `memory_share` of its memory
    (without the pages of files), and open as many `descriptors` more."""

    warm_up_s: float
    memory_share: float
    descriptors: int


def one_line(minute: Minute) -> str:
    outcomes = ", ".join(f"{number} {what}" for what, number in minute.outcomes.items() if number)
    servers = "; ".join(
        f"{role}: {one.running} running, {one.rooms} rooms, {one.pages} pages kept, "
        f"{one.transferred} rooms ended well, {one.failed} not"
        for role, one in minute.servers.items()
    )
    processes = ", ".join(
        f"{name} {one.pss_mib:.0f} ({one.descriptors})" for name, one in minute.processes.items()
    )
    cpu_s = sum(one.cpu_s for one in minute.processes.values())
    return (
        f"{minute.elapsed_s / 60:4.0f} min: {outcomes or 'none ended'}; {servers}; "
        f"CPU {cpu_s:.0f} s; MiB (descriptors): {processes}"
    )


def verdicts(minutes: Sequence[Minute], limits: Limits) -> list[Verdict]:
    """The verdicts on a soak whose last minute was after the load, from two minutes after warm-up.

    Raises ValueError where there are fewer.
    """
    judged = [one for one in minutes if one.elapsed_s >= limits.warm_up_s]
    if len(judged) < 2:
        raise ValueError("nothing was seen twice after the warm-up")
    first, last = judged[0], judged[-1]
    failed, stuck = last.outcomes["failed"], last.outcomes["stuck"]
    found = [
        Verdict("requests that failed", str(failed), not failed),
        Verdict("requests stuck at the client", str(stuck), not stuck),
    ]
    for role, server in last.servers.items():
        seen = (
            f"{server.running + server.waiting} requests, {server.rooms} rooms, {server.pages} "
            f"pages kept, {server.free_pages} of {server.total_pages} pages free"
        )
        found.append(Verdict(f"{role} server at rest", seen, server.is_at_rest))
    changed = sorted(set(first.processes) ^ set(last.processes))
    found.append(Verdict("processes that came or went", ", ".join(changed) or "none", not changed))
    return [*found, *_growth(minutes, judged, limits)]


def router_line(minutes: Sequence[Minute], limits: Limits) -> str:
    """The growth of SGLang's router, which is not ours to judge."""
    growth = _memory(minutes, [ROUTER]).growth(limits.warm_up_s)[ROUTER]
    return f"SGLang's router, not judged: {_growth_text(growth)}"


def _growth(minutes: Sequence[Minute], judged: Sequence[Minute], limits: Limits) -> list[Verdict]:
    first, last = judged[0].processes, judged[-1].processes
    names = [name for name in first if name in last and name != ROUTER]
    found = []
    for name, growth in _memory(minutes, names).growth(limits.warm_up_s).items():
        is_flat = growth.is_flat(limits.memory_share)
        found.append(Verdict(f"memory of {name}", _growth_text(growth), is_flat))
    for name in names:
        before, after = first[name].descriptors, last[name].descriptors
        is_flat = after <= before + limits.descriptors
        found.append(Verdict(f"descriptors of {name}", f"{before} -> {after}", is_flat))
    return found


def _memory(minutes: Sequence[Minute], names: Sequence[str]) -> MemorySeries:
    series = MemorySeries()
    for name in names:
        series.samples[name] = [
            (one.elapsed_s, one.processes[name].own_mib) for one in minutes if name in one.processes
        ]
    return series


def _growth_text(growth: Growth) -> str:
    return (
        f"{growth.after_warm_up_mib:.1f} -> {growth.last_mib:.1f} MiB, "
        f"{growth.slope_mib_per_minute:+.2f} MiB/min"
    )


def verdict_table(found: Sequence[Verdict]) -> str:
    """Markdown."""
    rows = [[one.what, one.seen, "ok" if one.passed else "FAILED"] for one in found]
    return markdown_table(["check", "seen", ""], rows)


def record_of(minutes: Sequence[Minute]) -> dict[str, Any]:
    """For the result's JSON file: columns of each minute, processes by name."""
    return {
        "minutes": [
            {
                "elapsed_s": round(one.elapsed_s, 1),
                "outcomes": dict(one.outcomes),
                "servers": {role: asdict(facts) for role, facts in one.servers.items()},
                "pss_mib": {name: round(x.pss_mib, 1) for name, x in one.processes.items()},
                "own_mib": {name: round(x.own_mib, 1) for name, x in one.processes.items()},
                "descriptors": {name: x.descriptors for name, x in one.processes.items()},
                "cpu_s": {name: round(x.cpu_s, 2) for name, x in one.processes.items()},
            }
            for one in minutes
        ]
    }
