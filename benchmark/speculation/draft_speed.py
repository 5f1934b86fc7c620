"""A server with n-gram drafts beside one without, by kind of text and number of clients.

    python -m benchmark.speculation.draft_speed
    python -m benchmark.speculation.draft_speed --clients 1,64 --pp 2 --rounds 3
    python -m benchmark.speculation.draft_speed --model 0.27b --temperature 1
    python -m benchmark.speculation.draft_speed --kind "JSON by schema" --kind "JSON, same prompts"

Run by hand on a quiet machine. Both servers are up and take turns (A B, B A). One client asks the
prompts of a kind one after the other; several share those of all kinds, one each at least. Random
weights are asked with random ids: greedy, they fall into loops, which drafts foretell; at
temperature 1 no draft is right. Answers must be the same tokens, or the exit code is 1.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, cycle, islice
from random import Random
from statistics import median
from typing import Any

import requests

from benchmark.models.make_model import FIRST_FILLER, PRESETS
from benchmark.speculation.prompts import KINDS, PROMPTS_EACH, SCHEMAS, chat_ids
from benchmark.support.command import Command, Options, Report, at_least_one, progress, say
from benchmark.support.dated_result import markdown_table
from benchmark.support.engine import Engine, EngineFailure
from benchmark.support.engines import parse_engine, running
from benchmark.support.machine import usable_cores
from benchmark.support.measured_models import MODELS, measured_model
from benchmark.support.measured_runs import turns
from benchmark.support.paths import SCRATCH
from sgl_pipeline.errors import ConfigurationError

_DRAFTS = "--speculative-algorithm NGRAM"
_OFF, _ON = "off", "on"
_ALL_KINDS = "all kinds"
_RANDOM_PROMPTS, _RANDOM_PROMPT_TOKENS = PROMPTS_EACH, 128
_SEED = 1
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts that so many clients share, and the JSON schema of each answer; empty: none."""

    kind: str
    clients: int
    prompts: tuple[tuple[int, ...], ...]
    schemas: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.clients} client{'s' if self.clients > 1 else ''}"


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of a server to a load, in the order of its prompts."""

    drafts: str
    load: str
    round: int
    seconds: float
    outputs: tuple[tuple[int, ...], ...]

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.outputs)) / self.seconds


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=5, port=31700)
    known = [*MODELS, *PRESETS]
    command.add("--model", default="smollm2", choices=known, help="(default: smollm2)")
    command.add("--kind", action="append", choices=KINDS, help="of text; may be repeated (all)")
    command.add("--pp", type=at_least_one, default=1, help="stages (default: 1)")
    command.add("--clients", default="1,16", help="numbers of clients (default: 1,16)")
    command.add("--output-tokens", type=at_least_one, default=128)
    command.add("--temperature", type=float, default=0.0, help="(default: 0, greedy)")
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    preset = PRESETS.get(options.model)
    if preset is not None and options.kind:
        raise ConfigurationError(
            f"{options.model} has random weights, which are asked with random ids: leave out "
            f"--kind, or choose --model {', '.join(MODELS)}"
        )
    model = measured_model(options.model)
    if preset is None:
        known_ids = chat_ids(model.directory)
        prompts = {kind: known_ids[kind] for kind in options.kind or KINDS}
    else:
        prompts = random_ids(preset.vocab_size)
    sampling = {
        "temperature": options.temperature,
        "sampling_seed": _SEED,
        "max_new_tokens": options.output_tokens,
        "ignore_eos": preset is not None,
    }
    loads = [one for number in options.clients.split(",") for one in loads_of(prompts, int(number))]
    runs: list[Answers] = []
    with ExitStack() as stack:
        engines = {}
        for index, (drafts, flags) in enumerate(((_OFF, ""), (_ON, _DRAFTS))):
            text = f"ours --pp {options.pp} --policy throttle {flags}"
            port, cores = options.port + index, usable_cores()
            engine = parse_engine(text, model.path, port, SCRATCH, cores)
            stack.enter_context(running(engine, SCRATCH / f"drafts_{drafts}.log"))
            engines[drafts] = engine
        for load in loads:  # of which nothing counts
            for drafts in engines:
                _ask_all(engines[drafts], drafts, load, 0, sampling)
        with progress(2 * options.rounds * len(loads), "runs") as bar:
            for load in loads:
                for round_number, drafts in turns([_OFF, _ON], options.rounds):
                    engine = engines[drafts]
                    runs.append(_ask_all(engine, drafts, load, round_number, sampling))
                    bar.update()
                say(f"{load.name}: {', '.join(f'{one:.2f}' for one in ratios(runs)[load.name])}")
    return Report(
        name="draft_speed",
        texts=[ratio_table(runs)],
        facts={
            "Servers": {
                _OFF: f"ours --pp {options.pp} --policy throttle",
                _ON: f"ours --pp {options.pp} --policy throttle {_DRAFTS}",
                "model": options.model,
            },
            "Load": {
                "output tokens": str(options.output_tokens),
                "temperature": f"{options.temperature:g}",
                "rounds": str(options.rounds),
                "prompts": ", ".join(f"{len(ids)} {kind}" for kind, ids in prompts.items()),
            },
        },
        record={
            "runs": [
                [one.drafts, one.load, one.round, one.seconds, sum(map(len, one.outputs))]
                for one in runs
            ]
        },
        problems=unequal(runs),
    )


def random_ids(vocab_size: int) -> dict[str, list[list[int]]]:
    """Prompts of one kind for a model of random weights: its fillers in no order."""
    random = Random(_SEED)
    fillers = range(FIRST_FILLER, vocab_size)
    prompts = [random.choices(fillers, k=_RANDOM_PROMPT_TOKENS) for _ in range(_RANDOM_PROMPTS)]
    return {"random ids": prompts}


def loads_of(prompts: Mapping[str, Sequence[Sequence[int]]], clients: int) -> list[Load]:
    """The loads of so many clients: each kind by itself for one; for several all that there are,
    from the first again where there are fewer prompts than clients."""
    of_kinds = [
        Load(kind, 1, tuple(map(tuple, of_kind)), (SCHEMAS.get(kind, ""),) * len(of_kind))
        for kind, of_kind in prompts.items()
    ]
    if clients == 1:
        return of_kinds
    in_turn = tuple(chain.from_iterable(zip(*(one.prompts for one in of_kinds), strict=True)))
    schemas = tuple(chain.from_iterable(zip(*(one.schemas for one in of_kinds), strict=True)))
    count = max(clients, len(in_turn))
    asked, held = (tuple(islice(cycle(each), count)) for each in (in_turn, schemas))
    name = _ALL_KINDS if len(prompts) > 1 else of_kinds[0].kind
    return [Load(name, clients, asked, held)]


def ratios(runs: Sequence[Answers]) -> dict[str, list[float]]:
    """Tokens a second with drafts over those without, of each round, by load."""
    off = {(one.load, one.round): one.tokens_per_s for one in runs if one.drafts == _OFF}
    found: dict[str, list[float]] = {}
    for one in runs:
        before = off.get((one.load, one.round))
        if one.drafts == _ON and before is not None:
            found.setdefault(one.load, []).append(one.tokens_per_s / before)
    return found


def ratio_table(runs: Sequence[Answers]) -> str:
    """Markdown: medians over the rounds, and the ratio of each."""

    def rate(load: str, drafts: str) -> str:
        of_load = [one.tokens_per_s for one in runs if (one.load, one.drafts) == (load, drafts)]
        return f"{median(of_load):.0f}"

    rows = [
        [
            load,
            rate(load, _OFF),
            rate(load, _ON),
            f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})",
        ]
        for load, values in ratios(runs).items()
    ]
    heads = ["load", "tokens/s without drafts", "with", "with / without: median (range)"]
    return markdown_table(heads, rows)


def unequal(runs: Sequence[Answers]) -> list[str]:
    """A line for each run whose answers differ from the first of its load."""
    first: dict[str, Answers] = {}
    return [
        f"{one.load}, round {one.round}, drafts {one.drafts}: other tokens"
        for one in runs
        if first.setdefault(one.load, one).outputs != one.outputs
    ]


def whole_answer(label: str, reply: Mapping[str, Any], schema: str) -> tuple[int, ...]:
    """The tokens of an answer of the server `label`.

    Args:
        reply: to `/generate`.
        schema: that the answer must keep where it ended by itself; empty: none.

    Raises EngineFailure for an answer that was aborted or keeps to no schema.
    """
    reason = reply["meta_info"]["finish_reason"]
    if reason["type"] not in ("stop", "length"):
        raise EngineFailure(f"{label}: an answer ended by {reason}")
    if schema and reason["type"] == "stop":
        try:
            keys = set(json.loads(reply["text"]))
        except (ValueError, TypeError):
            keys = set()
        if missing := sorted(set(json.loads(schema)["required"]) - keys):
            raise EngineFailure(f"{label}: an answer has no {missing[0]}: {reply['text'][:300]}")
    return tuple(reply["output_ids"])


def _ask_all(
    engine: Engine, drafts: str, load: Load, round_number: int, sampling: Mapping[str, Any]
) -> Answers:
    """Raises EngineFailure for a request that fails, or an answer that is not whole."""

    def ask(prompt: Sequence[int], schema: str) -> tuple[int, ...]:
        held = {"json_schema": schema} if schema else {}
        body: dict[str, Any] = {"input_ids": prompt, "sampling_params": {**sampling, **held}}
        reply = requests.post(f"{engine.base_url}/generate", json=body, timeout=_TIMEOUT_S)
        if reply.status_code != 200:
            raise EngineFailure(f"{engine.label}: status {reply.status_code}: {reply.text[:300]}")
        return whole_answer(engine.label, reply.json(), schema)

    with ThreadPoolExecutor(load.clients) as clients:
        began_s = time.monotonic()
        outputs = tuple(clients.map(ask, load.prompts, load.schemas))
        seconds = time.monotonic() - began_s
    return Answers(drafts, load.name, round_number, seconds, outputs)


if __name__ == "__main__":
    sys.exit(main())
