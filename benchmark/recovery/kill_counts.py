"""The kills of `kill_apart.py`, and the requests that each of them met."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmark.recovery.apart_clients import Ending, Outcome
from benchmark.recovery.kill_stages import share
from benchmark.support.dated_result import markdown_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill. A request that came after it was answered rightly at `served_s`; all was as before
    at `healthy_s`; of the requests that tried it, `faults` went wrong or hung. `rooms` is what
    requests had of both servers right before."""

    kind: str
    killed_s: float
    served_s: float
    healthy_s: float
    faults: list[str] = field(default_factory=list)
    rooms: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Met:
    """The requests of one kill: those in flight at its moment, and those that came while it was
    not mended."""

    in_flight: list[Ending] = field(default_factory=list)
    later: list[Ending] = field(default_factory=list)


def meetings(kills: Sequence[Kill], endings: Sequence[Ending]) -> tuple[list[Met], list[Ending]]:
    """The requests that each kill met, and those that ended badly though none had.

    A request that outlived several kills counts for each; one that ended badly for the last alone.
    """
    found, others = [Met() for _ in kills], []
    for ending in endings:
        met = [
            (one.in_flight if ending.began_s < kill.killed_s else one.later)
            for kill, one in zip(kills, found, strict=True)
            if ending.began_s < kill.healthy_s and ending.ended_s > kill.killed_s
        ]
        is_right = ending.outcome is Outcome.RIGHT
        for requests in met if is_right else met[-1:]:
            requests.append(ending)
        if not (met or is_right):
            others.append(ending)
    return found, others


def count_table(kills: Sequence[Kill], endings: Sequence[Ending]) -> str:
    """Markdown: two rows a kind, of requests in flight and of those that came until it was over."""
    heads = ["killed", "times", "requests", "in all", *Outcome]
    heads += ["longest, s", "served again after, s: p50", "most"]
    rows = []
    for kind, of_kind in _by_kind(kills, endings).items():
        waits = [kill.served_s - kill.killed_s for kill, _ in of_kind]
        first = [kind, str(len(of_kind))], [f"{share(waits, 50):.1f}", f"{max(waits):.1f}"]
        in_flight = [one for _, met in of_kind for one in met.in_flight]
        later = [one for _, met in of_kind for one in met.later]
        rows.append([*first[0], "in flight", *_counts(in_flight), *first[1]])
        rows.append(["", "", "while it was mended", *_counts(later), "", ""])
    return markdown_table(heads, rows)


def _counts(endings: Sequence[Ending]) -> list[str]:
    counts = Counter(one.outcome for one in endings)
    longest_s = max((one.ended_s - one.began_s for one in endings), default=0.0)
    numbers = [len(endings), *(counts[outcome] for outcome in Outcome)]
    return [*map(str, numbers), f"{longest_s:.1f}"]


def reason_table(kills: Sequence[Kill], endings: Sequence[Ending]) -> str:
    """Markdown: how often each reason ended a request of a kind's kills."""
    rows = []
    for kind, of_kind in _by_kind(kills, endings).items():
        counts = Counter(
            (one.outcome, one.reason)
            for _, met in of_kind
            for one in (*met.in_flight, *met.later)
            if one.outcome is not Outcome.RIGHT
        )
        rows += [
            [kind, outcome, str(number), reason]
            for (outcome, reason), number in counts.most_common()
        ]
    return markdown_table(["killed", "outcome", "requests", "with"], rows)


def room_table(kills: Sequence[Kill]) -> str:
    """Markdown: sums over the kills of a kind of what was between the servers right before."""
    names = [*dict.fromkeys(name for kill in kills for name in kill.rooms)]
    rows = [
        [kind, *(str(sum(kill.rooms.get(name, 0) for kill, _ in of_kind)) for name in names)]
        for kind, of_kind in _by_kind(kills, []).items()
    ]
    return markdown_table(["killed", *names], rows)


def _by_kind(kills: Sequence[Kill], endings: Sequence[Ending]) -> dict[str, list[tuple[Kill, Met]]]:
    pairs = [*zip(kills, meetings(kills, endings)[0], strict=True)]
    kinds = sorted({kill.kind for kill in kills})
    return {kind: [one for one in pairs if one[0].kind == kind] for kind in kinds}
