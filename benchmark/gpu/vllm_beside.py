"""Measures vLLM on the card with the loads of `part_pipelines.py`, beside one stage of ours.

    python -m benchmark.gpu.vllm_beside --folder "$OUT"       # as vLLM is by default
    python -m benchmark.gpu.vllm_beside --execution graphs --budget-s 120 --folder "$OUT"

Qwen3-8B in bf16 with random weights, vLLM's engine in this process, prompts as token ids, greedy.
vLLM comes as a pack on PYTHONPATH (`pack_vllm.py`). Three kinds of load, each warmed up, then
measured `--repeats` times; the median and all values are saved after each:

- prefill: 256 fresh prompts of 1,000 tokens, one token each: prompt tokens/s;
- decodes of 64 and of 256 requests, and of one: 48 rounds, in each of which every request draws a
  token. The prompts are in the prefix cache (992 tokens of each), so that all requests decode from
  the first round on and at our contexts; with fresh prompts vLLM would mix decodes with prefills.
  The time is that of 49 tokens less that of 1, over 48: what both have in common drops out.

Requests are handed over before the clock starts, as our script writes its plans before; vLLM's
scheduler works inside the measured time, ours does not. `--execution` is what vLLM makes of the
model: `compiled` is its default (torch.compile, CUDA graphs; a minute to start), `graphs` records
full graphs of decodes without compiling, `eager` has neither.

It has run on an H200: vLLM took 91 s to start compiled and 71 s with graphs (by hand), imports
included; hence the budgets.
"""

import argparse
import faulthandler
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmark.gpu.script import Script
from benchmark.gpu.session import Budget, Session
from benchmark.gpu.shapes import MODELS, PAGE_SIZE
from benchmark.gpu.vllm_engine import EXECUTIONS, MODEL, Answer, Engine, VllmEngine
from benchmark.support.command import at_least_one
from benchmark.support.dated_result import DatedResult, markdown_table
from benchmark.support.paths import RESULTS

CONCURRENCIES = (256, 64, 1)  # what is worth most first
_WARM_PROMPTS = 8
_ROUND_SHIFT = 104_729  # of token ids; no prompt of one round begins like one of another
_GRACE_S = 20.0


@dataclass(frozen=True, slots=True)
class Burst:
    """The times of requests that were handed over at once: `add_s` before the clock started, then
    `seconds` until the last had ended, and `ends_s`, the end of each of the engine's steps."""

    add_s: float
    seconds: float
    ends_s: tuple[float, ...]


def run_burst(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    num_hits: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Burst:
    """Runs `prompts` to their ends.

    Raises RuntimeError when a request drew another number of tokens, or `num_hits` is not the
    number of its prompt's tokens that were in the prefix cache.
    """
    begun_s = clock()
    for number, prompt in enumerate(prompts):
        engine.add(f"{begun_s:.6f}-{number}", prompt, num_tokens)
    started_s = clock()
    ends_s: list[float] = []
    answers: list[Answer] = []
    while engine.is_busy():
        answers += engine.step()
        ends_s.append(clock() - started_s)
    expected = [Answer(num_tokens, num_hits)] * len(prompts)
    if answers != expected:
        found = sorted({(each.num_tokens, each.num_hits) for each in answers})
        raise RuntimeError(
            f"{len(prompts)} requests of {num_tokens} tokens after {num_hits} hits were expected, "
            f"{len(answers)} came, of (tokens, hits) {found}"
        )
    return Burst(started_s - begun_s, ends_s[-1], tuple(ends_s))


def round_ms(short: Burst, long: Burst, num_rounds: int) -> float:
    """Milliseconds of a round: `long` has `num_rounds` rounds more than `short`."""
    return (long.seconds - short.seconds) * 1e3 / num_rounds


def prompts_of(script: Script, round_number: int, vocab_size: int) -> list[list[int]]:
    """The script's prompts; those of round 0 have the tokens that our pipeline gets."""
    return [
        [
            (request * 7919 + position * 31 + round_number * _ROUND_SHIFT) % vocab_size
            for position in range(script.prompt_tokens)
        ]
        for request in range(script.num_requests)
    ]


@dataclass
class Measurement:
    """The loads of one engine that is up; `rows` of the session get what was found."""

    session: Session
    engine: Engine
    script: Script
    vocab_size: int
    repeats: int
    clock: Callable[[], float] = time.perf_counter
    num_rounds: int = 0  # of prompts that were made
    prompts: list[list[int]] = field(default_factory=list)

    def prefill(self) -> None:
        """Prompts that no cache has; the last ones stay in it for `decode`."""
        self._burst(self._fresh_prompts()[:_WARM_PROMPTS], 1, 0)
        bursts = [self._burst(self._fresh_prompts(), 1, 0) for _ in range(self.repeats)]
        num_tokens = self.script.num_requests * self.script.prompt_tokens
        rates = [num_tokens / burst.seconds for burst in bursts]
        self._book(
            load=f"prefill of {self.script.num_requests} prompts",
            tokens_per_s=statistics.median(rates),
            all_tokens_per_s=rates,
            bursts=[asdict(burst) for burst in bursts],
        )

    def decode(self, num_requests: int) -> None:
        """Rounds of `num_requests` after the prompts of the last prefill."""
        prompts, rounds = self.prompts[:num_requests], self.script.num_rounds
        # A prompt's last token is computed whatever the cache has.
        num_hits = (self.script.prompt_tokens - 1) // PAGE_SIZE * PAGE_SIZE
        self._burst(prompts, 1, num_hits)
        self._burst(prompts, 5, num_hits)
        pairs = [
            (self._burst(prompts, 1, num_hits), self._burst(prompts, 1 + rounds, num_hits))
            for _ in range(self.repeats)
        ]
        times_ms = [round_ms(short, long, rounds) for short, long in pairs]
        median_ms = statistics.median(times_ms)
        self._book(
            load=f"{num_requests} decode{'s' if num_requests > 1 else ''}",
            round_ms=median_ms,
            all_round_ms=times_ms,
            tokens_per_s=num_requests / median_ms * 1e3,
            bursts=[asdict(burst) for pair in pairs for burst in pair],
        )

    def _burst(self, prompts: Sequence[Sequence[int]], num_tokens: int, num_hits: int) -> Burst:
        return run_burst(self.engine, prompts, num_tokens, num_hits, self.clock)

    def _fresh_prompts(self) -> list[list[int]]:
        self.prompts = prompts_of(self.script, self.num_rounds, self.vocab_size)
        self.num_rounds += 1
        return self.prompts

    def _book(self, **row: Any) -> None:
        self.session.book_row("loads", row)
        self.session.say(" | ".join(_cells(row)))


def text_of(session: Session) -> str:
    """The table of what was measured, and what was not."""
    rows = session.table("loads")
    texts = [markdown_table(["load", "ms a round", "tokens/s", "all"], [_cells(r) for r in rows])]
    texts += [f"Not measured: {each.what} ({each.why})" for each in session.not_measured]
    return "\n\n".join(texts)


def _cells(row: dict[str, Any]) -> list[str]:
    times = row.get("all_round_ms")
    each = (
        [f"{ms:.3f} ms" for ms in times] if times else [f"{x:.0f}" for x in row["all_tokens_per_s"]]
    )
    ms = f"{row['round_ms']:.3f}" if times else "-"
    return [row["load"], ms, f"{row['tokens_per_s']:.0f}", ", ".join(each)]


def main(argv: list[str] | None = None, started_s: float | None = None) -> int:
    """Measures, prints and saves; 1 where something failed, 2 where there is no card.

    Args:
        started_s: when the budget began, monotonic; now, if None.
    """
    options = _parse(argv)
    if not torch.cuda.is_available():
        print("vllm_beside needs an NVIDIA GPU")
        return 2
    started_s = time.monotonic() if started_s is None else started_s
    result = DatedResult(__spec__.name, f"gpu_vllm_{options.execution}", options.folder)
    facts: dict[str, dict[str, str]] = {}

    def save(session: Session) -> None:
        run = {"execution": options.execution, "seconds": f"{time.monotonic() - started_s:.0f}"}
        record = {
            "rows": session.rows,
            "not_measured": [asdict(each) for each in session.not_measured],
        }
        result.write({**facts, "run": run}, record, [text_of(session)])

    session = Session(
        device=torch.device("cuda"),
        models=[MODEL],
        depths=(),
        extra_steps=(),
        budget=Budget(started_s + options.budget_s),
        save=save,
    )
    measure(session, facts, options.execution, options.repeats)
    print(f"\n{text_of(session)}\n\nsaved {result.stem}.md and .json")
    return 0 if session.is_sound else 1


def measure(
    session: Session, facts: dict[str, dict[str, str]], execution: str, repeats: int
) -> None:
    """Starts vLLM, then each load that there is time for; `facts` gets what it runs with."""
    engines: list[VllmEngine] = []

    def describe() -> None:
        facts["vllm"] = engines[0].facts()
        session.say("; ".join(f"{name} {value}" for name, value in facts["vllm"].items()))

    def start() -> None:
        engines.append(VllmEngine(execution))

    if session.attempt(f"starting vLLM, {execution}", start):
        session.attempt("asking what it runs with", describe)
        vocab_size = MODELS[MODEL].vocab_size
        measure_loads(Measurement(session, engines[0], Script(), vocab_size, repeats))


def measure_loads(loads: Measurement) -> None:
    """Each load that there is time for; the others are named as not measured."""
    session = loads.session
    is_prefilled = session.attempt("prefill", loads.prefill, guess_s=15.0)
    for num_requests in CONCURRENCIES:
        what, work = f"decodes of {num_requests}", partial(loads.decode, num_requests)
        if is_prefilled:
            session.attempt(what, work, kind="decodes", guess_s=5.0)
        else:
            session.skip(what, "there was no prefill of its prompts")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__spec__.name}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--execution", choices=EXECUTIONS, default="compiled")
    parser.add_argument("--repeats", type=at_least_one, default=2, help="of each load (2)")
    parser.add_argument(
        "--budget-s", type=float, default=150.0, help="seconds, Python's start included (150)"
    )
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where results are saved")
    return parser.parse_args(argv)


def _run_as_program() -> None:
    """Counts the budget from the start of the process, and names what hangs past it."""
    started_s = time.monotonic() - (time.time() - psutil.Process().create_time())
    left_s = started_s + _parse(None).budget_s + _GRACE_S - time.monotonic()
    faulthandler.dump_traceback_later(max(1.0, left_s), exit=True)
    status = main(started_s=started_s)
    sys.stdout.flush()
    sys.stderr.flush()
    # All is saved, and what vLLM takes down at exit takes seconds of the card.
    os._exit(status)


if __name__ == "__main__":
    _run_as_program()
