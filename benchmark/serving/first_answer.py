"""Does the first user wait longer than the second? Times the first answers of fresh servers.

    python -m benchmark.serving.first_answer
    python -m benchmark.serving.first_answer --engine "ours --pp 4" --engine "ours@COMMIT --pp 4"

Run by hand. Each server is started anew, the engines by turns, as users start it: it is ready when
`/health` says so. Then some prompts of equal length and other tokens are answered one after the
other.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import requests

from benchmark.support.command import Command, Options, Report, at_least_one, progress
from benchmark.support.dated_result import markdown_table
from benchmark.support.engines import parse_engine, running
from benchmark.support.machine import usable_cores
from benchmark.support.paths import DEMO_MODEL, SCRATCH

_ANSWERS = 6
_PROMPT_TOKENS, _NEW_TOKENS = 48, 32
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Start:
    """One server: seconds of each answer, in order."""

    engine: str
    answers_s: list[float]

    @property
    def first_to_second(self) -> float:
        return self.answers_s[0] / self.answers_s[1]


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, port=31970)
    command.add("--engine", action="append", help="may be given again; default: ours --pp 4")
    command.add("--starts", type=at_least_one, default=5, help="of each engine")
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    engines = options.engine or ["ours --pp 4"]
    starts = []
    with progress(options.starts * len(engines), "starts") as bar:
        for _ in range(options.starts):
            for engine in engines:
                starts.append(Start(engine, _answer_times(engine, options.port)))
                bar.update()
    return Report(
        name="first_answer",
        texts=[_table(engines, starts)],
        facts={
            "load": {
                "prompt": f"{_PROMPT_TOKENS} tokens",
                "answer": f"{_NEW_TOKENS} tokens, greedy",
                "answers": f"{_ANSWERS} of each server, one after the other",
            }
        },
        record={"starts": [asdict(one) for one in starts]},
    )


def _answer_times(text: str, port: int) -> list[float]:
    engine = parse_engine(text, DEMO_MODEL, port, SCRATCH, usable_cores())
    # A benchmark's servers answer no request of their own; a user's do.
    command = tuple(word for word in engine.command if word != "--skip-server-warmup")
    engine = replace(engine, command=command)
    times_s = []
    with running(engine, SCRATCH / "first_answer.log"), requests.Session() as session:
        while session.get(engine.base_url + "/health", timeout=_TIMEOUT_S).status_code != 200:
            time.sleep(0.1)
        for number in range(_ANSWERS):
            ids = [(7 * place + 31 * number) % 200 + 10 for place in range(_PROMPT_TOKENS)]
            sampling = {"max_new_tokens": _NEW_TOKENS, "ignore_eos": True, "temperature": 0}
            started_s = time.perf_counter()
            reply = session.post(
                engine.base_url + "/generate",
                json={"input_ids": ids, "sampling_params": sampling},
                timeout=_TIMEOUT_S,
            )
            reply.raise_for_status()
            times_s.append(time.perf_counter() - started_s)
    return times_s


def _table(engines: Sequence[str], starts: Sequence[Start]) -> str:
    """Markdown: one row an engine."""
    heads = ["engine", "starts", "first, ms", "second, ms", "later, ms", "first / second"]
    rows = []
    for engine in engines:
        own = [one for one in starts if one.engine == engine]
        ratios = sorted(one.first_to_second for one in own)
        first_s, second_s = (statistics.median(one.answers_s[n] for one in own) for n in (0, 1))
        rows.append(
            [
                engine,
                str(len(own)),
                f"{1e3 * first_s:.0f}",
                f"{1e3 * second_s:.0f}",
                f"{1e3 * statistics.median(s for one in own for s in one.answers_s[2:]):.0f}",
                f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            ]
        )
    return markdown_table(heads, rows)


if __name__ == "__main__":
    sys.exit(main())
