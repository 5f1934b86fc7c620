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


@dataclass(frozen=True, slots=True)
class Met:
    """Requests by their outcome: those in flight at a kill, and those that came while it was not
    mended."""

    in_flight: list[Ending]
    later: list[Ending]


def met_by(kill: Kill, endings: Sequence[Ending]) -> Met:
    """The requests that the kill met."""
    return Met(
        [one for one in endings if one.was_in_flight(kill.killed_s)],
        [one for one in endings if kill.killed_s <= one.began_s < kill.healthy_s],
    )


def faults_without_a_kill(kills: Sequence[Kill], endings: Sequence[Ending]) -> list[str]:
    """The requests that did not end well though no kill had met them."""
    met = [one for kill in kills for part in _parts(met_by(kill, endings)) for one in part]
    known = {id(one) for one in met}
    return [
        f"{one.outcome} without a kill: {one.reason}"
        for one in endings
        if one.outcome is not Outcome.RIGHT and id(one) not in known
    ]


def _parts(met: Met) -> tuple[list[Ending], list[Ending]]:
    return met.in_flight, met.later


def count_table(kills: Sequence[Kill], endings: Sequence[Ending]) -> str:
    """Markdown: two rows a kind, of requests in flight and of those that came until it was over."""
    heads = ["killed", "times", "requests", "in all", *Outcome]
    heads += ["longest, s", "served again after, s: p50", "most"]
    rows = []
    for kind, of_kind in _by_kind(kills).items():
        met = [met_by(kill, endings) for kill in of_kind]
        waits = [kill.served_s - kill.killed_s for kill in of_kind]
        for what, number in (("in flight", 0), ("while it was mended", 1)):
            found = [one for each in met for one in _parts(each)[number]]
            counts = Counter(one.outcome for one in found)
            longest_s = max((one.ended_s - one.began_s for one in found), default=0.0)
            row = [kind, str(len(of_kind)), what, str(len(found))]
            row += [*(str(counts[outcome]) for outcome in Outcome), f"{longest_s:.1f}"]
            row += [f"{share(waits, 50):.1f}", f"{max(waits):.1f}"]
            rows.append(row if number == 0 else ["", "", *row[2:-2], "", ""])
    return markdown_table(heads, rows)


def room_table(kills: Sequence[Kill]) -> str:
    """Markdown: sums over the kills of a kind of what was between the servers right before."""
    names = [*dict.fromkeys(name for kill in kills for name in kill.rooms)]
    rows = [
        [kind, *(str(sum(kill.rooms.get(name, 0) for kill in of_kind)) for name in names)]
        for kind, of_kind in _by_kind(kills).items()
    ]
    return markdown_table(["killed", *names], rows)


def reason_table(kills: Sequence[Kill], endings: Sequence[Ending]) -> str:
    """Markdown: how often each reason ended a request that a kill of the kind had met."""
    rows = []
    for kind, of_kind in _by_kind(kills).items():
        met = {
            id(one): one
            for kill in of_kind
            for part in _parts(met_by(kill, endings))
            for one in part
            if one.outcome is not Outcome.RIGHT
        }
        counts = Counter((one.outcome, one.reason) for one in met.values())
        rows += [
            [kind, outcome, str(number), reason]
            for (outcome, reason), number in counts.most_common()
        ]
    return markdown_table(["killed", "outcome", "requests", "with"], rows)


def _by_kind(kills: Sequence[Kill]) -> dict[str, list[Kill]]:
    kinds = sorted({kill.kind for kill in kills})
    return {kind: [kill for kill in kills if kill.kind == kind] for kind in kinds}
