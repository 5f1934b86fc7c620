"""Stages that are hurt and not killed: does every stream go on, and how soon?

    python -m benchmark.recovery.hurt_stages
    python -m benchmark.recovery.hurt_stages --kinds "slow,full link" --times 5

Run by hand. Clients stream answers all the time; at random moments a stage is stopped, slowed
tenfold or stopped while its link is full, or what the scheduler sends it or hears of it is
truncated, repeated or altered (`faulty_server.py`). Each token is compared with the answer of the
same server before. Exits with 1 when any request failed, any token was another one, a stream stood
still for longer than `LIMIT_S`, or anything was left behind.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import psutil

from benchmark.recovery.faulty_server import ORDER_FAULTS, REPORT_FAULTS, WISH_VARIABLE, ask_for
from benchmark.recovery.kill_clients import KillClients, make_prompts
from benchmark.recovery.kill_stages import (
    DEMO_MODEL,
    WARM_UP_S,
    answers_to,
    facts_of,
    leftovers_of,
    open_descriptors,
    share,
)
from benchmark.support.command import Command, Options, Report, at_least_one, names_of, progress
from benchmark.support.dated_result import markdown_table
from benchmark.support.engine import Engine, EngineFailure
from benchmark.support.engines import parse_engine, running
from benchmark.support.machine import usable_cores
from benchmark.support.paths import SCRATCH

KINDS = ("stopped", "slow", "full link", *ORDER_FAULTS, *REPORT_FAULTS)
LIMIT_S = 10.0
SLOW_S = 15.0
# Of each period a slow stage may run a tenth.
_PERIOD_S = 0.05
_NOTICED_S = 30.0
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hurt:
    """One stage was hurt. `outcome` is the reason that its worker was replaced for, or what else
    came of it; `recovery_s` is from the hurt until all stages ran again, None where none was
    replaced; `gap_s` the longest of any stream meanwhile."""

    kind: str
    outcome: str
    began_s: float
    until_s: float
    recovery_s: float | None
    gap_s: float = 0.0  # known once all streams have ended


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, port=31960)
    command.add("--kinds", type=names_of(list(KINDS)), default=list(KINDS), help="default: all")
    command.add("--times", type=at_least_one, default=20, help="of each kind")
    command.add("--stages", type=int, default=2)
    command.add("--clients", type=at_least_one, default=8)
    command.add("--seed", type=int, default=0)
    return command.run(_measure_all, argv)


def _measure_all(options: Options) -> Report:
    hurts, problems = _measure(options)
    problems += [
        f"{one.kind}: a stream stood still for {one.gap_s:.1f} s"
        for one in hurts
        if one.gap_s > LIMIT_S
    ]
    return Report(
        name="hurt_stages",
        texts=[hurt_table(hurts), f"{len(problems)} problems"],
        facts={
            "model": {"model": "demo", "stages": str(options.stages), "dtype": "float32"},
            "load": {"clients": f"{options.clients}, always streaming"},
            "asked": {"a stream stands still": f"<= {LIMIT_S:g} s"},
        },
        record={"hurts": [asdict(one) for one in hurts], "problems": problems},
        problems=problems,
    )


def _engine(options: Options, wishes: Path) -> Engine:
    flags = "--dtype float32 --spare-workers 1 --max-stage-restarts 1000000"
    engine = parse_engine(
        # So many steps in flight that a link can be full.
        f"ours --pp {options.stages} --extra-steps-in-flight 8 {flags}",
        DEMO_MODEL,
        options.port,
        SCRATCH,
        usable_cores(),
        prefix_cache=True,
    )
    command = [
        "benchmark.recovery.faulty_server" if word == "sgl_pipeline.launch_server" else word
        for word in engine.command
    ]
    return replace(engine, command=tuple(command), environment={WISH_VARIABLE: str(wishes)})


def _measure(options: Options) -> tuple[list[Hurt], list[str]]:
    rng = Random(options.seed)
    wishes = SCRATCH / "wanted_fault"
    wishes.unlink(missing_ok=True)
    engine = _engine(options, wishes)
    turns = [kind for _ in range(options.times) for kind in options.kinds]
    hurts: list[Hurt] = []
    with running(engine, SCRATCH / "hurt_stages.log") as server:
        assert server is not None
        url = engine.base_url
        expected = answers_to(url, make_prompts(rng, 24, 300))
        before = open_descriptors(server)
        clients = KillClients(url, expected, options.clients, 0, options.seed)
        clients.start()
        time.sleep(WARM_UP_S)
        with progress(len(turns), "times") as bar:
            for kind in turns:
                hurts.append(_hurt(url, rng, kind, wishes))
                bar.update()
                bar.set_postfix_str(f"{kind}, {clients.tally.one_line}")
                if clients.tally.failures:
                    break
        clients.stop()
        problems = [*clients.tally.failures, *leftovers_of(url, server, before)]
    gap_s = clients.tally.longest_gap_s
    return [replace(one, gap_s=gap_s(one.began_s, one.until_s)) for one in hurts], problems


def _hurt(url: str, rng: Random, kind: str, wishes: Path) -> Hurt:
    """Hurts a stage and waits until all run as they should, and a moment longer."""
    facts = facts_of(url)
    num_before, pids = _num_losses(facts), facts["stage_pids"]
    # The reader of a link is never the first.
    stage = rng.randrange(1 if kind == "full link" else 0, len(pids))
    began_s = time.monotonic()
    if kind == "slow":
        outcome = _slow_down(url, psutil.Process(pids[stage]))
    else:
        if kind in ("stopped", "full link"):
            psutil.Process(pids[stage]).suspend()
        else:
            ask_for(kind, rng.randrange(len(pids)), wishes)
        facts = _wait_for_recovery(url, num_before)
        outcome = " / ".join(facts["recoveries"][-1]["reasons"])
    recovery_s = None if kind == "slow" else time.monotonic() - began_s
    time.sleep(1.0 + rng.random())
    return Hurt(
        kind=kind,
        outcome=outcome,
        began_s=began_s,
        until_s=time.monotonic(),
        recovery_s=recovery_s,
    )


def _num_losses(facts: dict[str, Any]) -> int:
    """The number of recoveries so far, of which the newest are listed."""
    return int(facts["recoveries"][-1]["incarnation"]) if facts["recoveries"] else 0


def _wait_for_recovery(url: str, num_before: int) -> dict[str, Any]:
    began_s = time.monotonic()
    while True:
        facts = facts_of(url)
        if _num_losses(facts) > num_before and not facts["is_recovering"]:
            return facts
        waited_s = time.monotonic() - began_s
        if waited_s > (_NOTICED_S if _num_losses(facts) == num_before else _TIMEOUT_S):
            raise EngineFailure(f"nothing came of it in {waited_s:.0f} s")
        time.sleep(0.05)


def _slow_down(url: str, process: psutil.Process) -> str:
    """Lets a stage run for a tenth of the time; says what the server has told of it."""
    told = "not reported"
    began_s = time.monotonic()
    next_look_s = began_s
    while (now_s := time.monotonic()) < began_s + SLOW_S:
        process.suspend()
        if now_s >= next_look_s:
            next_look_s = now_s + 1.0
            if facts_of(url)["slow_stages"]:
                told = "reported as slow"
        time.sleep(max(0.0, now_s + 0.9 * _PERIOD_S - time.monotonic()))
        process.resume()
        time.sleep(0.1 * _PERIOD_S)
    return told


def hurt_table(hurts: Sequence[Hurt]) -> str:
    """Markdown: one row a kind."""
    heads = ["what", "times", "replaced", "until all ran again, s: p50", "most"]
    heads += ["longest gap of a stream, s: p50", "most", "for example"]
    rows = []
    for kind in dict.fromkeys(one.kind for one in hurts):
        of_kind = [one for one in hurts if one.kind == kind]
        recoveries = [one.recovery_s for one in of_kind if one.recovery_s is not None]
        gaps = [one.gap_s for one in of_kind]
        outcomes = [one.outcome for one in of_kind]
        example = max(outcomes, key=outcomes.count)
        rows.append(
            [
                kind,
                str(len(of_kind)),
                str(len(recoveries)),
                f"{share(recoveries, 50):.2f}" if recoveries else "none replaced",
                f"{max(recoveries):.2f}" if recoveries else "",
                f"{share(gaps, 50):.2f}",
                f"{max(gaps):.2f}",
                f"{example} ({outcomes.count(example)} of {len(of_kind)})",
            ]
        )
    return markdown_table(heads, rows)


if __name__ == "__main__":
    sys.exit(main())
