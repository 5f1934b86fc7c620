"""Leaves a prefill and a decode server idle behind SGLang's router for an hour, then asks them.

    python -m benchmark.disaggregation.idle --minutes 60
    python -m benchmark.disaggregation.idle --nice 19    # beside other work

Run by hand. Some requests come before, so that the two servers are connected, and the same ones at
once after the idle time: they must be answered alike and soon, and nothing may be kept of them;
otherwise the exit code is 1. The processor time that each process took while idle is reported.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import requests

from benchmark.disaggregation.pair import Pair, ProcessFacts, log_path, serving_pair
from benchmark.disaggregation.soak_report import verdict_table
from benchmark.robustness.soak import Verdict
from benchmark.robustness.soak_mix import PROBES, probe, read_answer
from benchmark.support.command import Command, Options, Report, say
from benchmark.support.dated_result import markdown_table

BOTH_FLAGS = "--cpu-threads-per-stage 1"
_SETTLE_S = 20.0
_REST_TIMEOUT_S = 30.0
_TIMEOUT_S = 120.0
_LINE_EVERY_S = 600.0


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer, or what came in its place, after `took_s`."""

    text: str
    took_s: float
    is_good: bool


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, port=31970)
    add = command.add
    add("--minutes", type=float, default=60.0, help="without a request (default: 60)")
    add("--most-s", type=float, default=5.0, help="that an answer may take then (default: 5)")
    add("--nice", type=int, default=0, help="added to the niceness of all that runs (default: 0)")
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    os.nice(options.nice)
    path = log_path("pair_idle", options.port)
    with serving_pair(
        options.port, path, prefill="--pp 2", decode="--pp 1", both=BOTH_FLAGS
    ) as pair:
        first = ask_all(pair.url)
        time.sleep(_SETTLE_S)
        before, started_s = pair.processes(), time.monotonic()
        _wait(pair, options.minutes * 60.0)
        after, idle_s = pair.processes(), time.monotonic() - started_s
        again = ask_all(pair.url)
        servers = pair.servers_at_rest(_REST_TIMEOUT_S)
    found = answer_verdicts(first, again, options.most_s)
    for role, one in servers.items():
        seen = f"{one.rooms} rooms, {one.pages} pages kept"
        found.append(Verdict(f"{role} server at rest", seen, one.is_at_rest))
    found += process_verdicts(before, after)
    return Report(
        name="pair_idle",
        texts=[verdict_table(found), idle_table(before, after, idle_s)],
        facts={
            "servers": {"prefill": "--pp 2", "decode": "--pp 1", "both": BOTH_FLAGS},
            "run": {"idle": f"{idle_s:.0f} s", "nice": str(options.nice)},
        },
        record={
            "idle_s": idle_s,
            "before": {name: asdict(one) for name, one in before.items()},
            "after": {name: asdict(one) for name, one in after.items()},
            "answers": [asdict(one) for one in (*first, *again)],
        },
        problems=[f"{one.what}: {one.seen}" for one in found if not one.passed],
    )


def _wait(pair: Pair, idle_s: float) -> None:
    """Says now and then that all still run; no request reaches the servers."""
    end_s = time.monotonic() + idle_s
    while (left_s := end_s - time.monotonic()) > 0:
        say(f"{left_s / 60:.0f} minutes to wait, {len(pair.processes())} processes")
        time.sleep(min(left_s, _LINE_EVERY_S))


def ask_all(url: str) -> list[Answered]:
    """The answers to PROBES, all asked at once."""
    with ThreadPoolExecutor(len(PROBES)) as pool:
        return list(pool.map(lambda question: _ask(url, question), PROBES))


def _ask(url: str, question: str) -> Answered:
    asked, started_s = probe(question), time.monotonic()
    try:
        reply = requests.post(url + asked.path, json=asked.body, timeout=_TIMEOUT_S)
    except requests.RequestException as error:
        return Answered(str(error), time.monotonic() - started_s, is_good=False)
    took_s = time.monotonic() - started_s
    if reply.status_code != 200:
        return Answered(f"{reply.status_code}: {reply.text[:300]}", took_s, is_good=False)
    return Answered(read_answer(asked.path, reply.text, is_stream=False).text, took_s, is_good=True)


def answer_verdicts(
    first: Sequence[Answered], again: Sequence[Answered], most_s: float
) -> list[Verdict]:
    """The verdicts on the answers before and after the idle time."""
    good = [
        one.is_good and one.text == before.text for before, one in zip(first, again, strict=True)
    ]
    wrong = [one.text for one, is_good in zip(again, good, strict=True) if not is_good]
    longest_s = max(one.took_s for one in again)
    all_good = all(one.is_good for one in first) and all(good)
    return [
        Verdict("requests answered alike", f"{sum(good)} of {len(good)} {wrong or ''}", all_good),
        Verdict("longest answer", f"{longest_s:.2f} s", longest_s <= most_s),
    ]


def process_verdicts(
    before: Mapping[str, ProcessFacts], after: Mapping[str, ProcessFacts]
) -> list[Verdict]:
    changed = sorted(set(before) ^ set(after))
    return [Verdict("processes that came or went", ", ".join(changed) or "none", not changed)]


def idle_table(
    before: Mapping[str, ProcessFacts], after: Mapping[str, ProcessFacts], idle_s: float
) -> str:
    """Markdown: what each process took while idle, and all of them."""
    heads = ["process", "CPU s", "of a core", "PSS MiB", "descriptors"]
    rows, total_s = [], 0.0
    for name, start in before.items():
        if name in after:
            end = after[name]
            spent_s = end.cpu_s - start.cpu_s
            total_s += spent_s
            rows.append(
                [
                    name,
                    f"{spent_s:.1f}",
                    f"{spent_s / idle_s:.2%}",
                    f"{start.pss_mib:.0f} -> {end.pss_mib:.0f}",
                    f"{start.descriptors} -> {end.descriptors}",
                ]
            )
    return markdown_table(
        heads, [*rows, ["all", f"{total_s:.1f}", f"{total_s / idle_s:.2%}", "", ""]]
    )


if __name__ == "__main__":
    sys.exit(main())
