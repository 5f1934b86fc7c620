"""Measures all that users notice of stages that are killed: the gap in their streams.

    python -m benchmark.recovery.kill_stages
    python -m benchmark.recovery.kill_stages --stages 4 --model 0.27b --kills 50
    python -m benchmark.recovery.kill_stages --how stop --kills 20   # SIGSTOP in place of SIGKILL
    python -m benchmark.recovery.kill_stages --how term --kills 20   # asked to leave: planned moves
    python -m benchmark.recovery.kill_stages --model odd --flags="--pp-layer-partition 4,3"
    python -m benchmark.recovery.kill_stages --beside "python -c 'while True: pass'"

Run by hand. Clients stream answers all the time, others leave each of theirs at a random moment; at
random moments a random stage is killed, now and then another one while it is replaced. Each token
is compared with the answer of the same server before the first kill. In turns without and with a
spare worker.
The restart budget is raised unless `--flags` names one, because kills come faster than it allows.
Exits with 1 when any request failed, any token was another one, or anything was left behind.
"""

import contextlib
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import psutil
import requests

from benchmark.figures.style import PALETTE
from benchmark.recovery.kill_clients import KillClients, Prompt, Tally, body_of, make_prompts
from benchmark.support.command import Command, Options, Report, at_least_one, progress
from benchmark.support.dated_result import markdown_table
from benchmark.support.engines import parse_engine, running
from benchmark.support.machine import usable_cores
from benchmark.support.measured_runs import make_model
from benchmark.support.paths import DEMO_MODEL, SCRATCH
from benchmark.support.process_kinds import process_kind
from sgl_pipeline.errors import SglPipelineError

WARM_UP_S = 3.0
# The plot's reach around a kill, and the width of its bins.
BEFORE_S, AFTER_S, BIN_S = 2.0, 6.0, 0.1
_TIMEOUT_S = 120.0
# What `--how` does to a stage's process.
HURTS = {
    "kill": psutil.Process.kill,
    "stop": psutil.Process.suspend,
    "term": psutil.Process.terminate,
}
_ASKED_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill and what came of it until `until_s`. `gap_s` is the longest of any stream that ended
    in that time, `recovery_s` the server's own account; `is_double` says that another stage was
    killed in the same recovery. Of running requests `prefilled_tokens` were computed again by all
    stages, `replayed_tokens` by the lost ones alone."""

    spares: int
    stage: int
    killed_s: float
    until_s: float
    gap_s: float = 0.0  # known once all streams have ended
    recovery_s: float
    is_double: bool
    prefilled_tokens: int
    replayed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One server and its kills."""

    spares: int
    kills: list[Kill]
    tally: Tally
    leftovers: list[str]


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, port=31950)
    command.add("--stages", type=int, default=2)
    command.add("--model", default="demo", help="demo, or a preset of benchmark.models.make_model")
    command.add("--kills", type=at_least_one, default=25, help="of each server")
    command.add("--spares", default="0,1", help="spare workers of each server")
    command.add("--clients", type=at_least_one, default=8)
    command.add("--leavers", type=int, default=4, help="clients that leave every stream")
    command.add("--how", choices=tuple(HURTS), default="kill")
    command.add("--dtype", choices=("float32", "bfloat16"), default="float32")
    command.add("--flags", default="", help="more flags of the server")
    command.add("--beside", default="", help="a command that runs again and again meanwhile")
    command.add("--seed", type=int, default=0)
    return command.run(_measure_all, argv)


def _measure_all(options: Options) -> Report:
    rounds = [_measure(options, int(spares)) for spares in options.spares.split(",")]
    return Report(
        name=f"kill_stages_{options.model}",
        texts=[kill_table(rounds)],
        facts={
            "model": {
                "model": options.model,
                "stages": str(options.stages),
                "dtype": options.dtype,
                "more flags": flags_of(options) or "none",
            },
            "load": {
                "clients": f"{options.clients}, always streaming",
                "beside them": f"{options.leavers} that leave every stream within half a second",
                "how": options.how,
                "on the same cores": options.beside or "nothing",
            },
        },
        record={
            "kills": [asdict(kill) for one in rounds for kill in one.kills],
            "rates": {str(one.spares): rates_around(one) for one in rounds},
            "failures": [text for one in rounds for text in one.tally.failures],
        },
        problems=[text for one in rounds for text in (*one.tally.failures, *one.leftovers)],
        draw=partial(_draw, rounds),
    )


def flags_of(options: Options) -> str:
    """The server's flags besides those that the other options stand for."""
    budget = "" if "--max-stage-restarts" in options.flags else "--max-stage-restarts 1000000"
    return f"{budget} {options.flags}".strip()


@contextlib.contextmanager
def _beside(command: str) -> Iterator[None]:
    """Runs `command` again and again meanwhile; nothing where it is empty."""
    if not command:
        yield
        return
    loop = f"while true; do {command}; done"
    log = subprocess.DEVNULL
    with subprocess.Popen(["bash", "-c", loop], stdout=log, stderr=log) as process:
        tree = psutil.Process(process.pid)
        try:
            yield
        finally:
            for one in (tree, *tree.children(recursive=True)):
                one.kill()


def _measure(options: Options, spares: int) -> Round:
    model = DEMO_MODEL if options.model == "demo" else make_model(options.model)
    flags = f"--dtype {options.dtype} --spare-workers {spares} {flags_of(options)}"
    engine = parse_engine(
        f"ours --pp {options.stages} {flags}",
        model,
        options.port,
        SCRATCH,
        usable_cores(),
        prefix_cache=True,
    )
    rng = Random(options.seed)
    with running(engine, SCRATCH / f"kill_stages_{spares}.log") as server:
        assert server is not None
        url = engine.base_url
        prompts = make_prompts(rng, 24, 300)
        expected = answers_to(url, prompts)
        before = open_descriptors(server)
        clients = KillClients(url, expected, options.clients, options.leavers, options.seed)
        clients.start()
        time.sleep(WARM_UP_S)
        kills: list[Kill] = []
        with (
            _beside(options.beside),
            progress(options.kills, f"kills with {spares} spare") as bar,
        ):
            while len(kills) < options.kills and not clients.tally.failures:
                kills += _kill(url, clients, rng, spares, options.how)
                bar.update(len(kills) - bar.n)
                bar.set_postfix_str(clients.tally.one_line)
        clients.stop()
        gap_s = clients.tally.longest_gap_s
        return Round(
            spares=spares,
            kills=[replace(one, gap_s=gap_s(one.killed_s, one.until_s)) for one in kills],
            tally=clients.tally,
            leftovers=leftovers_of(url, server, before),
        )


def answers_to(url: str, prompts: Sequence[Prompt]) -> dict[Prompt, list[int]]:
    """The tokens of each prompt's answer, asked for a few at a time.

    Raises SglPipelineError when one is refused.
    """
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool, progress(len(prompts), "answers") as bar:
        answers = {}
        for prompt, answer in zip(prompts, pool.map(partial(_answer, url), prompts), strict=True):
            answers[prompt] = answer
            bar.update()
    return answers


def _answer(url: str, prompt: Prompt) -> list[int]:
    reply = requests.post(url + "/generate", json=body_of(prompt), timeout=_TIMEOUT_S)
    if reply.status_code != 200:
        raise SglPipelineError(f"an answer without faults has status {reply.status_code}")
    ids: list[int] = reply.json()["output_ids"]
    return ids


def facts_of(url: str) -> dict[str, Any]:
    facts: dict[str, Any] = requests.get(url + "/server_info", timeout=_TIMEOUT_S).json()[
        "internal_states"
    ][0]
    return facts


def _kill(url: str, clients: KillClients, rng: Random, spares: int, how: str) -> list[Kill]:
    """Kills a stage, perhaps two, and waits until all run again, every stream has gone on, and a
    moment longer."""
    facts = facts_of(url)
    pids = facts["stage_pids"]
    stages = rng.sample(range(len(pids)), 2 if rng.random() < 0.15 and len(pids) > 1 else 1)
    killed: list[tuple[int, float]] = []
    for stage in stages:
        killed.append((stage, time.monotonic()))
        process = psutil.Process(pids[stage])
        HURTS[how](process)
        time.sleep(rng.random() * 0.5 if len(stages) > 1 else 0.0)
    deadline_s = time.monotonic() + _TIMEOUT_S
    recovered_s: float | None = None
    while recovered_s is None or not clients.all_go_on_after(recovered_s):
        facts = facts_of(url)
        is_replaced = not {pids[stage] for stage in stages} & {*facts["stage_pids"]}
        if recovered_s is None and is_replaced and not facts["is_recovering"]:
            recovered_s = time.monotonic()
        if time.monotonic() > deadline_s:
            raise SglPipelineError(f"no recovery within {_TIMEOUT_S} s: {facts['recoveries'][-1:]}")
        time.sleep(0.05)
    time.sleep(1.0 + rng.random() * 2.0)
    return [
        Kill(
            spares=spares,
            stage=stage,
            killed_s=at_s,
            until_s=time.monotonic(),
            recovery_s=facts["recoveries"][-1]["seconds"],
            is_double=len(stages) > 1,
            prefilled_tokens=facts["recoveries"][-1]["tokens"],
            replayed_tokens=facts["recoveries"][-1]["replay_tokens"],
        )
        for stage, at_s in killed
    ]


def open_descriptors(server: psutil.Process) -> dict[str, int]:
    """Open files and threads of the server's lasting processes."""
    lasting = [server, *[one for one in server.children() if _is_lasting(one)]]
    return {f"{one.name()} {one.pid}": one.num_fds() + one.num_threads() for one in lasting}


def _is_lasting(process: psutil.Process) -> bool:
    """True unless the process is a stage; stages that were killed are zombies for a while."""
    try:
        return not process_kind(process.cmdline(), process.pid).startswith("stage ")
    except psutil.NoSuchProcess:
        return False


def leftovers_of(url: str, server: psutil.Process, before: dict[str, int]) -> list[str]:
    """The remains of the kills: pages, requests, descriptors, workers."""
    found = []
    deadline_s = time.monotonic() + 10.0
    while (facts := facts_of(url))["num_running_requests"] and time.monotonic() < deadline_s:
        time.sleep(0.1)
    time.sleep(1.0)
    facts = facts_of(url)
    if facts["free_pages"] != facts["total_pages"]:
        found.append(f"{facts['total_pages'] - facts['free_pages']} pages are still in use")
    for name, count in open_descriptors(server).items():
        # A connection of the last answer may still be open.
        if count > before.get(name, count) + 8:
            found.append(
                f"{name} has {count} descriptors and threads, {before[name]} before the first kill"
            )
    return found


def kill_table(rounds: Sequence[Round]) -> str:
    """Markdown: one row a server."""
    heads = ["spares", "kills", "answers", "left by clients", "failed", "gap p50, s", "gap p99, s"]
    heads += ["longest gap, s"]
    heads += ["recovery p50, s", "recovery p99, s", "prefilled again", "by the stage alone"]
    heads += ["left behind"]
    rows = []
    for one in rounds:
        single = [kill for kill in one.kills if not kill.is_double]
        gaps = [kill.gap_s for kill in single]
        recoveries = [kill.recovery_s for kill in single]
        rows.append(
            [
                str(one.spares),
                f"{len(one.kills)} ({len(one.kills) - len(single)} of them two at once)",
                str(one.tally.num_answers),
                str(one.tally.num_aborted),
                str(len(one.tally.failures)),
                *(f"{share(gaps, q):.2f}" for q in (50, 99)),
                f"{max((kill.gap_s for kill in one.kills), default=0.0):.2f}",
                *(f"{share(recoveries, q):.2f}" for q in (50, 99)),
                *(
                    f"{statistics.fmean(tokens):.0f} tokens"
                    for tokens in (
                        [kill.prefilled_tokens for kill in single] or [0],
                        [kill.replayed_tokens for kill in single] or [0],
                    )
                ),
                "; ".join(one.leftovers) or "nothing",
            ]
        )
    return markdown_table(heads, rows)


def share(values: Sequence[float], percent: int) -> float:
    """The value that so many percent of `values` do not exceed; NaN without any."""
    if len(values) < 2:
        return values[0] if values else float("nan")
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def rates_around(one: Round) -> list[float]:
    """Median tokens a second in each bin around the single kills."""
    num_bins = round((BEFORE_S + AFTER_S) / BIN_S)
    moments = sorted(one.tally.moments)
    bins: list[list[float]] = [[] for _ in range(num_bins)]
    for kill in one.kills:
        if kill.is_double:
            continue
        counts = [0] * num_bins
        for moment in moments:
            place = int((moment - kill.killed_s + BEFORE_S) // BIN_S)
            if 0 <= place < num_bins:
                counts[place] += 1
        for place, count in enumerate(counts):
            bins[place].append(count / BIN_S)
    return [statistics.median(values) if values else 0.0 for values in bins]


def _draw(rounds: Sequence[Round], path: Path) -> None:
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(7, 3.5), layout="constrained")
    axes = canvas.subplots()
    for one, color in zip(rounds, itertools.cycle(PALETTE)):
        rates = rates_around(one)
        places = [-BEFORE_S + (place + 0.5) * BIN_S for place in range(len(rates))]
        axes.plot(places, rates, color=color, label=f"{one.spares} spare workers")
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set(
        xlabel="seconds since the kill", ylabel="tokens/s, median of the kills", ylim=(0, None)
    )
    axes.legend()
    canvas.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
