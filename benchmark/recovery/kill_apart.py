"""Kills parts of a prefill and a decode server under streams: how does every request end?

    python -m benchmark.recovery.kill_apart
    python -m benchmark.recovery.kill_apart --kills 20 --seed 1

Run by hand; half an hour. A prefill and a decode server of two stages each, whose splits differ,
are behind SGLang's router. Clients stream answers all the time, greedy and seeded, from prompts
that exceed both pools; at random moments a stage of either server is killed, or its scheduler,
with which the server ends: then it is started again. Each token is compared with the answer of one
server of one stage. It measures no speed and may run beside other work.
Exits with 1 when any token was another one, any request hung or failed without a kill, or anything
was kept at the end.
"""

import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from random import Random

from benchmark.recovery.apart_clients import LIMIT_S, ApartClients, Ending, Outcome, ask
from benchmark.recovery.kill_clients import Prompt
from benchmark.recovery.kill_counts import (
    Kill,
    count_table,
    meetings,
    reason_table,
    room_table,
)
from benchmark.recovery.kill_stages import WARM_UP_S, answers_to
from benchmark.recovery.servers_apart import ServersApart, servers_apart
from benchmark.support.command import Command, Options, Report, at_least_one, progress, say
from benchmark.support.engine import EngineFailure
from benchmark.support.engines import parse_engine, running
from benchmark.support.machine import usable_cores
from benchmark.support.paths import DEMO_MODEL, SCRATCH

PREFILL_FLAGS = "--pp 2 --pp-layer-partition 9,7"
DECODE_FLAGS = "--pp 2 --pp-layer-partition 6,10"
SAME_TOKENS = "--dtype float32 --cpu-threads-per-stage 1"
BOTH_FLAGS = f"{SAME_TOKENS} --max-stage-restarts 1000000 --max-total-tokens 8192"
# Kinds of kills, and how many of a hundred are of each.
PREFILL_STAGE, DECODE_STAGE = "a prefill stage", "a decode stage"
PREFILL_SCHEDULER, DECODE_SCHEDULER = "the prefill scheduler", "the decode scheduler"
SHARES = {PREFILL_STAGE: 35, DECODE_STAGE: 35, PREFILL_SCHEDULER: 15, DECODE_SCHEDULER: 15}
# What must not come of any.
FAULTS = (Outcome.WRONG, Outcome.HUNG)
_VOCABULARY = 300
_SERVED_TIMEOUT_S = 180.0


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, port=31800)
    command.add("--kills", type=at_least_one, default=100)
    command.add("--minutes", type=float, default=60.0, help="after which no further part is killed")
    command.add("--clients", type=at_least_one, default=6)
    command.add("--prompts", type=at_least_one, default=60, help="that clients ask in turns")
    command.add("--seed", type=int, default=0)
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    rng = Random(options.seed)
    prompts, probes = make_prompts(rng, options.prompts), make_probes(rng, options.kills)
    answers = _oracle(options.port, [*prompts, *probes])
    kinds = kinds_of(options.kills, rng)
    with servers_apart(options.port, PREFILL_FLAGS, DECODE_FLAGS, BOTH_FLAGS) as servers:
        expected = {prompt: answers[prompt] for prompt in prompts}
        clients = ApartClients(servers.router_url, expected, options.clients, options.seed)
        clients.start()
        time.sleep(WARM_UP_S)
        end_s = time.monotonic() + 60.0 * options.minutes
        kills: list[Kill] = []
        with progress(len(kinds), "kills") as bar:
            for kind, probe in zip(kinds, probes, strict=True):
                if time.monotonic() > end_s:
                    break
                kills.append(_kill(servers, kind, rng, {probe: answers[probe]}))
                bar.update()
                say(f"{len(kills)}: {kind}; {_one_line(clients.endings)}")
                time.sleep(0.3 + 2.0 * rng.random())
        clients.stop()
        kept = servers.kept_rooms()
    return _report(options, kills, clients.endings, kept)


def make_prompts(rng: Random, count: int) -> list[Prompt]:
    """Prompts from less than a page to many; some share a beginning, every other one is seeded."""
    shared = [rng.randrange(10, _VOCABULARY) for _ in range(400)]
    prompts = []
    for number in range(count):
        own = [rng.randrange(10, _VOCABULARY) for _ in range(rng.choice((5, 100, 300, 800)))]
        ids = tuple(shared + own[:100] if number % 5 == 0 else own)
        prompts.append(Prompt(ids, rng.choice((8, 30, 80)), number if number % 2 else None))
    return prompts


def make_probes(rng: Random, count: int) -> list[Prompt]:
    """One for each kill: several pages that no server has cached."""
    return [
        Prompt(tuple(rng.randrange(10, _VOCABULARY) for _ in range(70)), 4) for _ in range(count)
    ]


def kinds_of(count: int, rng: Random) -> list[str]:
    """The kinds of `count` kills, in random order."""
    kinds = [kind for kind, number in SHARES.items() for _ in range(number)]
    rng.shuffle(kinds)
    return list(itertools.islice(itertools.cycle(kinds), count))


def _oracle(port: int, prompts: Sequence[Prompt]) -> dict[Prompt, list[int]]:
    """The answers of one server of one stage."""
    text = f"ours --pp 1 {SAME_TOKENS}"
    engine = parse_engine(text, DEMO_MODEL, port, SCRATCH, usable_cores(), prefix_cache=True)
    with running(engine, SCRATCH / "kill_apart_oracle.log"):
        return answers_to(engine.base_url, prompts)


def _kill(
    servers: ServersApart, kind: str, rng: Random, probe: Mapping[Prompt, Sequence[int]]
) -> Kill:
    """Kills, and waits until all is as before."""
    rooms = {f"{one.role} {name}": n for one in servers.sides for name, n in one.rooms().items()}
    side = servers.prefill if kind in (PREFILL_STAGE, PREFILL_SCHEDULER) else servers.decode
    is_stage = kind in (PREFILL_STAGE, DECODE_STAGE)
    wound = side.kill_stage(rng.randrange(2)) if is_stage else side.kill_scheduler()
    faults: list[str] = []
    if is_stage:
        served_s = _served_again(servers.router_url, probe, faults)
        wound.mend()
    else:
        wound.mend()
        served_s = _served_again(servers.router_url, probe, faults)
    servers.wait_until_found()
    return Kill(
        kind=kind,
        killed_s=wound.killed_s,
        served_s=served_s,
        healthy_s=time.monotonic(),
        faults=faults,
        rooms=rooms,
    )


def _served_again(url: str, probe: Mapping[Prompt, Sequence[int]], faults: list[str]) -> float:
    """The moment at which a request that came now, or later, was answered rightly. What hangs or
    has wrong tokens before goes to `faults`."""
    ((prompt, expected),) = probe.items()
    deadline_s = time.monotonic() + _SERVED_TIMEOUT_S
    while True:
        ending = ask(url, prompt, expected)
        if ending.outcome is Outcome.RIGHT:
            return ending.ended_s
        if ending.outcome in FAULTS:
            faults.append(f"{ending.outcome} after a kill: {ending.reason}")
        if ending.ended_s > deadline_s:
            raise EngineFailure(f"no request is answered after a kill: {ending.reason}")
        time.sleep(0.1)


def _one_line(endings: Sequence[Ending]) -> str:
    counts = {one: sum(ending.outcome is one for ending in endings) for one in Outcome}
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.items())


def _report(
    options: Options, kills: Sequence[Kill], endings: Sequence[Ending], kept: Sequence[str]
) -> Report:
    problems = [f"{one.outcome}: {one.reason}" for one in endings if one.outcome in FAULTS]
    problems += [fault for kill in kills for fault in kill.faults]
    _, others = meetings(kills, endings)
    problems += [f"{one.outcome} without a kill: {one.reason}" for one in others]
    problems += [f"kept at the end: {one}" for one in kept]
    first_s = kills[0].killed_s
    return Report(
        name="kill_apart",
        texts=[
            count_table(kills, endings),
            "How the requests ended that did not go on:",
            reason_table(kills, endings),
            "Between the servers right before the kills, summed:",
            room_table(kills),
            f"All requests: {_one_line(endings)}. Kept at the end: {'; '.join(kept) or 'nothing'}. "
            "No speed was measured.",
        ],
        facts={
            "model": {"model": "demo", "both": BOTH_FLAGS},
            "servers": {"prefill": PREFILL_FLAGS, "decode": DECODE_FLAGS},
            "load": {
                "clients": f"{options.clients}, always streaming, every other prompt seeded",
                "hung": f"later than {LIMIT_S:g} s",
            },
        },
        record={
            "kills": [asdict(kill) for kill in kills],
            "endings": [
                [
                    round(one.began_s - first_s, 2),
                    round(one.ended_s - one.began_s, 2),
                    [*Outcome].index(one.outcome),
                    one.reason,
                ]
                for one in endings
            ],
            "problems": problems,
        },
        problems=problems,
    )


if __name__ == "__main__":
    sys.exit(main())
