"""Measures conversations that come back after their pages were evicted, with a store of keys and
values and without.

    python -m benchmark.tiers.returning_turns
    python -m benchmark.tiers.returning_turns --model smollm2
    python -m benchmark.tiers.returning_turns --no-reuse
    python -m benchmark.tiers.returning_turns --restart --restart-engine "ours --pp 1 FLAGS"
    python -m benchmark.tiers.returning_turns --two-servers

Run by hand; about a minute a run of the default load on two cores, ten runs. Sessions take turns,
and each turn sends its whole conversation, answers included. The pools of all engines are bounded
so that the conversations exceed them fourfold at their end: without a store, most of a turn is
computed again. Engines take turns (A B B A), each started afresh on an empty folder, with some
prompts before that do not count. Tokens are greedy, and whether engines gave equal ones is counted.

With `--no-reuse` every turn is a session of its own with as many tokens, all new: what does a
store cost that never hits? With `--restart` the server is ended after the load and started again
on its folder, as it was or by `--restart-engine`, and every session returns once more: which of
the pages that had been computed are found? With `--two-servers` the load goes through SGLang's
router to one replica, then a second one on the same folder takes its place.

vLLM 0.32's CPU build cannot be measured beside: with `--kv-offloading-size 1`, as with
`TieringOffloadingSpec` and its file tier, its worker ends with "CPU Offloading is currently only
supported on CUDA-alike and XPU GPUs".
"""

import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from benchmark.models.make_model import FIRST_FILLER, PRESETS
from benchmark.support.command import Command, Options, Report, at_least_one, progress, say
from benchmark.support.measured_models import NAMES, measured_model
from benchmark.support.measured_runs import DEFAULT_PRESET, turns
from benchmark.tiers.conversations import (
    Conversations,
    TokenSource,
    random_tokens,
    tokens_of_text,
)
from benchmark.tiers.tiered_servers import Pool
from benchmark.tiers.trials import Trial
from benchmark.tiers.turn_report import (
    TurnRun,
    equal_answers,
    first_ttft,
    found_share,
    paired,
    ratio_table,
    record_of,
    returning_ttft,
    revisit_table,
    tokens_per_s,
    turn_table,
)
from sgl_pipeline.errors import ConfigurationError

ENGINES = (
    "ours --pp 2",
    "ours --pp 2 --enable-hierarchical-cache --hicache-storage-backend file",
)
EXCESS = 4.0


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=5, port=31900)
    add = command.add
    add(
        "--engine",
        action="append",
        help=f"may be given again; the first is what others stand beside (default: {ENGINES})",
    )
    add("--model", default=DEFAULT_PRESET, help=f"{NAMES} (default: {DEFAULT_PRESET})")
    add("--no-reuse", action="store_true", help="every turn is a session of its own")
    add("--restart", action="store_true", help="sessions return once more after a restart")
    add("--restart-engine", help="what is started then (default: the same engine)")
    add("--two-servers", action="store_true", help="sessions return to a second replica")
    add("--excess", type=float, default=EXCESS, help=f"over the pool (default: {EXCESS:g} times)")
    add("--page-size", type=at_least_one, default=16, help="of the pool (default: 16)")
    add("--settle-s", type=float, default=5.0, help="for saves, before a restart (default: 5)")
    for field in fields(Conversations):
        flag = "--" + field.name.replace("_", "-")
        kind = float if field.name == "turns_per_s" else at_least_one
        add(flag, type=kind, default=field.default, help=f"(default: {field.default})")
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    if options.no_reuse + options.restart + options.two_servers > 1:
        raise ConfigurationError("choose one of --no-reuse, --restart and --two-servers")
    if options.restart_engine and not options.restart:
        raise ConfigurationError("--restart-engine needs --restart")
    if options.output_tokens < 2:
        raise ConfigurationError(
            "--output-tokens must be at least 2: times between them are measured"
        )
    load = Conversations(**{one.name: getattr(options, one.name) for one in fields(Conversations)})
    pool = _pool(load, options.excess, options.page_size)
    model, source = _model(options.model)
    trial = Trial(
        load=load,
        planned=load.without_reuse(source) if options.no_reuse else load.planned(source),
        source=source,
        model=model,
        pool=pool,
        port=options.port,
        settle_s=options.settle_s,
    )
    texts, runs = _labeled(options.engine or ENGINES), []
    with progress(options.rounds * len(texts), "runs") as bar:
        for round_number, label in turns(list(texts), options.rounds):
            run = replace(_run(options, trial, texts[label], round_number), engine=label)
            runs.append(run)
            say(_one_line(run))
            bar.update()
    return _report(options, trial, runs, against=next(iter(texts)))


def _labeled(texts: Sequence[str]) -> dict[str, str]:
    """The engines by label: an engine that is named again, which shows how far equal runs differ,
    gets a number."""
    labeled: dict[str, str] = {}
    for text in texts:
        number = list(labeled.values()).count(text)
        labeled[f"{text} ({number + 1})" if number else text] = text
    return labeled


def _run(options: Options, trial: Trial, text: str, round_number: int) -> TurnRun:
    if options.restart:
        return trial.run_and_restart(text, options.restart_engine or text, round_number)
    if options.two_servers:
        return trial.run_and_replace(text, round_number)
    return trial.run(text, round_number)


def _pool(load: Conversations, excess: float, page_size: int) -> Pool:
    """The pool that the load exceeds `excess` times, said aloud.

    Raises ConfigurationError where it does not hold a conversation of each client.
    """
    pool = Pool(load.pool_tokens(excess, page_size), page_size)
    if pool.tokens < load.clients * (load.final_tokens + page_size):
        raise ConfigurationError(
            f"a pool of {pool.tokens} tokens does not hold {load.clients} conversations of "
            f"{load.final_tokens}; raise --sessions, or lower --clients or --excess"
        )
    say(f"pool: {_pool_text(load, pool)}")
    return pool


def _pool_text(load: Conversations, pool: Pool) -> str:
    whole = load.sessions * load.final_tokens
    return (
        f"{pool.tokens} tokens in pages of {pool.page_size}; {load.sessions} conversations of "
        f"{load.final_tokens} tokens at their end are {whole / pool.tokens:.2f} times that"
    )


def _model(name: str) -> tuple[Path, TokenSource]:
    """Random weights get random tokens, a trained model the text of our pages."""
    model = measured_model(name)
    if model.page_ids is None:
        return model.path, random_tokens(FIRST_FILLER, PRESETS[name].vocab_size)
    return model.path, tokens_of_text(model.page_ids)


def _one_line(run: TurnRun) -> str:
    found = found_share(run.answers.turns)
    means = {"first": first_ttft(run).mean, "returning": returning_ttft(run).mean}
    ttfts = ", ".join(f"{turns} {mean:.0f} ms" for turns, mean in means.items() if mean == mean)
    return (
        f"{run.engine}, round {run.round}: mean TTFT {ttfts}; {tokens_per_s(run):.0f} tok/s, "
        f"{found:.0%} of the prompts found"
    )


def _report(options: Options, trial: Trial, runs: Sequence[TurnRun], against: str) -> Report:
    kinds = ("no_reuse", "restart", "two_servers")
    kind = next((one for one in kinds if getattr(options, one)), "")
    load, with_reuse = trial.load, not options.no_reuse
    prompts = "random ids" if options.model in PRESETS else "our pages' text"
    return Report(
        name="_".join(filter(None, ("returning_turns", kind))),
        texts=[
            turn_table(runs),
            ratio_table(runs, against, with_reuse=with_reuse),
            revisit_table(runs, trial.pool.page_size),
        ],
        facts={
            # JSON has no infinity.
            "load": {one.name: str(getattr(load, one.name)) for one in fields(load)},
            "pool": {"size": _pool_text(load, trial.pool)},
            "model": {options.model: f"prompts of {prompts}"},
            "figures": {"of a run's turns": "medians over the rounds (min to max)"},
        },
        record={"runs": [record_of(run) for run in runs]},
        problems=_unequal(runs, against),
    )


def _unequal(runs: Sequence[TurnRun], against: str) -> list[str]:
    """Ours gives equal prompts equal answers, whatever it has to load."""
    problems = []
    for engine, pairs in paired(runs, against).items():
        for pair in pairs:
            equal, same = equal_answers(*pair)
            if equal < same and engine.startswith("ours") and against.startswith("ours"):
                problems.append(f"{engine}, round {pair[0].round}: {equal} of {same} answers equal")
    return problems


if __name__ == "__main__":
    sys.exit(main())
