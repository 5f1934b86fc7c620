"""Sends a prefill and a decode server all sorts of requests at a steady rate, for an hour.

    python -m benchmark.disaggregation.soak --minutes 60 --requests-per-s 1
    python -m benchmark.disaggregation.soak --nice 19    # beside other work

Run by hand; servers (two stages of prefill, one of decode) and SGLang's router serve the demo
model. Requests are streamed or not, of one or several answers, with and without grammars and
log-probabilities; some of the clients leave before the end. Each minute prints the counts of
requests, rooms and pages, and memory (PSS) and open descriptors of each process. In the end no
request may have failed, no page may be kept for the other server, and since the warm-up the
memory of each process of ours must have stayed flat; otherwise the exit code is 1.
"""

import asyncio
import os
import sys

from benchmark.disaggregation.pair import Pair, log_path, serving_pair
from benchmark.disaggregation.soak_report import (
    Limits,
    Minute,
    one_line,
    record_of,
    router_line,
    verdict_table,
    verdicts,
)
from benchmark.robustness.soak_clients import SoakClients
from benchmark.support.command import Command, Options, Report, at_least_one
from benchmark.support.dated_result import markdown_table
from sgl_pipeline.args import require

CLIENTS = 8
BOTH_FLAGS = "--cpu-threads-per-stage 1 --enable-priority-scheduling --default-priority-value 0"
_REST_TIMEOUT_S = 30.0


class PairSoak:
    """The soak of a pair that is up."""

    def __init__(self, pair: Pair, clients: SoakClients) -> None:
        self._pair = pair
        self._clients = clients
        self._next_s = 0.0
        self.minutes: list[Minute] = []

    def run(self, duration_s: float) -> None:
        """Returns when the last request has ended, and both servers are at rest or are not after a
        while; prints a line a minute."""
        asyncio.run(self._clients.run(duration_s, self._every_second))
        self._pair.servers_at_rest(_REST_TIMEOUT_S)
        self._look(max(duration_s, self.minutes[-1].elapsed_s))

    def _every_second(self, elapsed_s: float) -> None:
        if elapsed_s >= self._next_s:
            self._next_s += 60.0
            self._look(elapsed_s)

    def _look(self, elapsed_s: float) -> None:
        outcomes = dict(self._clients.tally.outcomes)
        minute = Minute(elapsed_s, outcomes, self._pair.servers(), self._pair.processes())
        self.minutes.append(minute)
        print(one_line(minute), flush=True)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, port=31960)
    add = command.add
    add("--minutes", type=float, default=60.0, help="of load (default: 60)")
    add("--requests-per-s", type=float, default=1.0, help="(default: 1)")
    add("--departing-share", type=float, default=0.2, help="of the requests (default: 0.2)")
    add("--warm-up-minutes", type=float, default=10.0, help="before memory is judged (default: 10)")
    add("--most-growth", type=float, default=0.05, help="share of memory since (default: 0.05)")
    add("--most-descriptors", type=at_least_one, default=16, help="more since (default: 16)")
    add("--nice", type=int, default=0, help="added to the niceness of all that runs (default: 0)")
    add("--seed", type=int, default=1, help="of the requests (default: 1)")
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    require(
        options.minutes >= options.warm_up_minutes + 1.0,
        "--minutes must be one more than --warm-up-minutes, or memory is not judged",
    )
    os.nice(options.nice)
    period_s = CLIENTS / options.requests_per_s
    path = log_path("pair_soak", options.port)
    with serving_pair(
        options.port, path, prefill="--pp 2", decode="--pp 1", both=BOTH_FLAGS
    ) as pair:
        clients = SoakClients(
            pair.url,
            num_clients=CLIENTS,
            departing_share=options.departing_share,
            seed=options.seed,
            ramp_s=period_s,
            period_s=period_s,
            # The router has no /abort_request.
            departures=("leaves",),
        )
        soak = PairSoak(pair, clients)
        soak.run(options.minutes * 60.0)
    limits = Limits(
        warm_up_s=options.warm_up_minutes * 60.0,
        memory_share=options.most_growth,
        descriptors=options.most_descriptors,
    )
    found = verdicts(soak.minutes, limits)
    tally = clients.tally
    counts = markdown_table(list(tally.outcomes), [[str(n) for n in tally.outcomes.values()]])
    load = ("minutes", "requests_per_s", "departing_share", "warm_up_minutes", "nice", "seed")
    return Report(
        name="pair_soak",
        texts=[
            counts,
            verdict_table(found),
            router_line(soak.minutes, limits),
            "\n".join(f"- {one}" for one in tally.failures),
        ],
        facts={
            "servers": {"prefill": "--pp 2", "decode": "--pp 1", "both": BOTH_FLAGS},
            "load": {name: str(getattr(options, name)) for name in load},
            "optional features asked for": {"are": ", ".join(clients.features) or "none"},
        },
        record={"failures": tally.failures, **record_of(soak.minutes)},
        problems=[f"{one.what}: {one.seen}" for one in found if not one.passed],
    )


if __name__ == "__main__":
    sys.exit(main())
