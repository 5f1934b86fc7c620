"""`sgl-pipeline capacity`: the highest request rate that holds latency targets.

    sgl-pipeline capacity --model DIR --max-total-tokens 32768 --ttft-ms 1000 --tpot-ms 100
    sgl-pipeline capacity --model DIR --ttft-ms 1000 --tpot-ms 100 --measure

Without `--measure` everything is simulated, by the server's own scheduler. With it a server is
started, or that of `--url` loaded, with the very requests that the simulator serves.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import msgspec

from sgl_pipeline.capacity import flags
from sgl_pipeline.capacity.load_client import LoadClient
from sgl_pipeline.capacity.measured import MeasuredServer
from sgl_pipeline.capacity.own_server import own_server
from sgl_pipeline.capacity.pipelines import pipeline_of, require_source, vocab_size_of
from sgl_pipeline.capacity.predicted import Predicted, pace
from sgl_pipeline.capacity.rate_trial import Round
from sgl_pipeline.capacity.result import CapacityResult
from sgl_pipeline.capacity.study import Question, Side, Study, compared_rates
from sgl_pipeline.errors import ConfigurationError, SglPipelineError
from sgl_pipeline.simulator.tune import RATE_TOLERANCE

_EXIT_INTERRUPTED = 130
_SIMULATED_ROUNDS, _MEASURED_ROUNDS = 5, 2
# Requests that are measured one by one, before the load.
_ALONE = 10
# A measurement begins at the prediction, and costs seconds a step.
_MEASURED_FACTOR, _MEASURED_TOLERANCE = 1.25, 0.08
_PREDICTED, _AT_PACE, _MEASURED = "predicted", "predicted at the server's pace", "measured"


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code: 0, 1 after an error, 130 after Ctrl-C."""
    options = flags.make_parser().parse_args(argv)
    try:
        result = _both(options) if options.measure or options.url else _simulated(options)
        print("\n".join(result.lines()))
        if options.json is not None:
            _write(Path(options.json), result)
    except SglPipelineError as error:
        print(f"capacity: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("capacity: interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED
    return 0


def _simulated(options: argparse.Namespace) -> CapacityResult:
    study = Study(_question(options, _SIMULATED_ROUNDS))
    throttle = flags.throttle_of(options)
    predicted = Predicted(
        pipeline=pipeline_of(options, None),
        throttle=throttle,
        scheduling=flags.scheduling_of(options),
        load=flags.load_of(options),
    )
    print(_describe(predicted))
    _predict(study, _PREDICTED, predicted, options.policy or [throttle.policy], options.rate)
    return _result(options, study, predicted)


def _both(options: argparse.Namespace) -> CapacityResult:
    """Predicts and measures, on one server."""
    study = Study(_question(options, _MEASURED_ROUNDS))
    if options.url is None:
        require_source(options)
    with _server(options) as server:
        facts, knobs = server.facts(), server.knobs()
        policies = options.policy or [knobs["policy"]]
        predicted = Predicted(
            pipeline=pipeline_of(options, facts),
            throttle=flags.throttle_in_force(knobs, policies[0]),
            scheduling=replace(
                facts.in_force(flags.scheduling_of(options)), accounting=knobs["accounting"]
            ),
            load=server.load,
        )
        print(_describe(predicted))
        changes_policy = policies != [knobs["policy"]]  # else no key of an administrator is needed
        try:
            if changes_policy:
                server.set_policy(policies[0])
            alone = server.alone(_ALONE)
            study.require_alone(alone, _MEASURED)
            slowness, front_ms = pace(predicted.alone(_ALONE), alone)
            at_pace = predicted.at_pace(slowness, front_ms)
            for side, one in ((_PREDICTED, predicted), (_AT_PACE, at_pace)):
                try:
                    _predict(study, side, one, policies, options.rate)
                except ConfigurationError as error:
                    study.notes.append(str(error))
                    print(f"{error}; the measurement goes on", file=sys.stderr)
            _measure(study, server, policies, options.rate, _guess_per_s(study, policies, alone))
        finally:
            if changes_policy:
                server.set_policy(knobs["policy"])
    for reason, times in server.client.failures.most_common():
        print(f"failed {times} times: {reason}", file=sys.stderr)
    return _result(options, study, predicted, slowness, front_ms)


@contextmanager
def _server(options: argparse.Namespace) -> Iterator[MeasuredServer]:
    """The one at `--url`, or a new one."""
    load, vocab_size = flags.load_of(options), vocab_size_of(options)
    if options.url is not None:
        url = options.url.rstrip("/")
        client = LoadClient(url, vocab_size, options.api_key)
        yield MeasuredServer(url, client, load, options.api_key)
        return
    with own_server(flags.server_words(options)) as server:
        client = LoadClient(server.url, vocab_size, None)
        yield MeasuredServer(server.url, client, load, pid=server.pid)


def _predict(
    study: Study,
    side: str,
    predicted: Predicted,
    policies: Sequence[str],
    rates: Sequence[float] | None,
) -> None:
    """Each policy's capacity; of several, the ratios to the first one."""
    study.require_alone(predicted.alone(predicted.load.num_requests), side)
    own = {policy: predicted.under(policy) for policy in policies}
    trials, capacities = {}, [1.0]
    for policy, one in own.items():
        study.require_fillable(one.serve(float("inf"), 0), side)
        step = Side(name=side, guess_per_s=capacities[-1], factor=2.0, tolerance=RATE_TOLERANCE)
        trials[policy] = study.find_capacity(step, policy, one.serve)
        capacities.append(study.capacity_of(side, policy) or capacities[-1])
    if len(own) > 1:
        study.compare_capacities(side, trials)
        at_rates = rates or compared_rates(capacities[1])
        study.compare_at(
            side, list(own), at_rates, lambda policy, rate, number: own[policy].serve(rate, number)
        )


def _guess_per_s(study: Study, policies: Sequence[str], alone: Round) -> float:
    """The predicted capacity of the first policy, at the server's pace if that is known; without
    any, the rate at which one request after the other gets its first token."""
    for side in (_AT_PACE, _PREDICTED):
        if (found := study.capacity_of(side, policies[0])) is not None:
            return found
    return 1e3 / fmean(one.ttft_ms for one in alone.latencies if one is not None)


def _measure(
    study: Study,
    server: MeasuredServer,
    policies: Sequence[str],
    rates: Sequence[float] | None,
    guess_per_s: float,
) -> None:
    """The capacity of one policy, or several of them by turns on the one server: a search for each
    would compare hours of the machine, not policies."""
    if len(policies) == 1:
        step = Side(
            name=_MEASURED,
            guess_per_s=guess_per_s,
            factor=_MEASURED_FACTOR,
            tolerance=_MEASURED_TOLERANCE,
        )
        study.find_capacity(step, policies[0], server.serve)
        return

    def serve(policy: str, rate_per_s: float, number: int) -> Round:
        server.set_policy(policy)
        return server.serve(rate_per_s, number)

    study.compare_at(_MEASURED, policies, rates or compared_rates(guess_per_s), serve)


def _question(options: argparse.Namespace, num_rounds: int) -> Question:
    return Question(
        target=flags.target_of(options),
        needed_share=options.goodput,
        num_rounds=options.rounds or num_rounds,
    )


def _describe(predicted: Predicted) -> str:
    pipeline = predicted.pipeline
    return (
        f"{pipeline.num_stages} stages, KV pool of {pipeline.kv_pool_tokens()} tokens; "
        f"{predicted.load.describe()}"
    )


def _result(
    options: argparse.Namespace,
    study: Study,
    predicted: Predicted,
    slowness: float | None = None,
    front_ms: float | None = None,
) -> CapacityResult:
    return CapacityResult(
        load=predicted.load.describe(),
        pipeline=_describe(predicted),
        ttft_ms=options.ttft_ms,
        tpot_ms=options.tpot_ms,
        needed_share=options.goodput,
        num_rounds=study.question.num_rounds,
        num_requests=predicted.load.num_requests,
        sides=study.sides,
        ratios=study.ratios,
        notes=study.notes,
        slowness=slowness,
        front_ms=front_ms,
    )


def _write(path: Path, result: CapacityResult) -> None:
    """Raises ConfigurationError if the file cannot be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    except OSError as error:
        raise ConfigurationError(f"--json {path}: {error.strerror}") from error
