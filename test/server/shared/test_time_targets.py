"""`throttle-time` with targets and more steps in flight, on live servers with a file of step costs.

The costs are made up, and hundreds of times what the steps take: until the stages' speeds are
known, after some steps, what is decided follows from the file. Whether a target binds or is missed
is read from the steps, never from how long anything took.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from support.live_server import ANSWER_S, LiveServer, live_server, wait_until, wait_until_idle
from support.saved_costs import costs_of, flat

from sgl_pipeline.costs.step_costs import LayerCost, RowCost, StepCosts
from sgl_pipeline.managers.command_line.model_files import DEMO_MODEL
from sgl_pipeline.managers.planning.cost_files import DIRECTORY_VARIABLE, save_costs
from sgl_pipeline.records.trace import StepRecord, read_trace
from test.server.test_metrics_and_drain import Samples

pytestmark = pytest.mark.multiproc
NUM_STAGES = 2
# A stage of eight layers takes 8 ms for one token, and 4 ms for each further one.
COSTS = StepCosts(
    layer=LayerCost(RowCost((1.0,), (1.0,), 0.5), 0.0, 0.0, 0.0),
    embedding=flat(0.0),
    tail=flat(1.0),
    layer_weights=(1.0,) * 16,
)
LEAST_TOKENS = 32  # the default of --min-prefill-tokens
TAIL_TOKENS = LEAST_TOKENS // 8  # a rest of a prompt that is this short rides along
NEVER_MS, ALWAYS_MS = "0.001", "1e9"
PROMPTS = [
    f"{number} Repeat after me: " + "one two three four " * 5 * number for number in range(5)
]
GREEDY = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
SAMPLED = {"temperature": 1.3, "sampling_seed": 7, "max_new_tokens": 40, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Timed:
    """A server whose policy knows the costs from the first step on."""

    server: LiveServer
    trace: Path

    def steps(self) -> list[StepRecord]:
        """All that have ended, once no request is left."""
        wait_until_idle(self.server)
        return list(read_trace(self.trace))


@pytest.fixture(scope="module")
def low_tpot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Timed]:
    """No step is short enough for its time between tokens; any first token is early enough."""
    flags = ["--target-tpot-ms", NEVER_MS, "--target-ttft-ms", ALWAYS_MS]
    yield from timed_server(tmp_path_factory.mktemp("low_tpot"), *flags, extra_steps=1)


@pytest.fixture(scope="module")
def low_ttft(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Timed]:
    """No first token is early enough; 200 ms for each of four steps in flight are 49 tokens."""
    flags = ["--target-tpot-ms", "800", "--target-ttft-ms", NEVER_MS]
    yield from timed_server(tmp_path_factory.mktemp("low_ttft"), *flags, extra_steps=2)


def timed_server(directory: Path, *targets: str, extra_steps: int) -> Iterator[Timed]:
    own = costs_of(DEMO_MODEL.name, costs=COSTS)
    save_costs(own, directory / own.file_name)
    flags = ["--policy", "throttle-time", *targets, "--extra-steps-in-flight", str(extra_steps)]
    flags += ["--pp-layer-partition", "8,8", "--cpu-threads-per-stage", "1", "--enable-metrics"]
    flags += ["--skip-server-warmup"]
    trace = directory / "steps.jsonl"
    with live_server(
        *("--pp", str(NUM_STAGES), "--dtype", "float32", "--trace-path", str(trace), *flags),
        environment={DIRECTORY_VARIABLE: str(directory)},
    ) as server:
        yield Timed(server, trace)


def generate(server: LiveServer, text: str, sampling: dict[str, Any], **body: Any) -> list[int]:
    reply = server.generate(text=text, sampling_params=sampling, **body)
    assert reply.status_code == 200, reply.text
    return list(reply.json()["output_ids"])


def outputs(server: LiveServer) -> list[list[int]]:
    """The tokens of all prompts, greedy and sampled, at the same time and without cached ones."""
    requests.post(f"{server.url}/flush_cache", timeout=30)
    asked = [(text, sampling) for text in PROMPTS for sampling in (GREEDY, SAMPLED)]
    with ThreadPoolExecutor(len(asked)) as clients:
        return list(clients.map(lambda one: generate(server, *one), asked))


def most_in_flight(steps: list[StepRecord]) -> int:
    """At any moment at which a step was decided, that step among them."""
    return max(
        sum(other.scheduled_s <= step.scheduled_s < other.finished_s for other in steps)
        for step in steps
    )


def test_a_tpot_target_that_cannot_be_met_leaves_the_least_prefill_and_is_reported(
    low_tpot: Timed,
) -> None:
    server = low_tpot.server
    with ThreadPoolExecutor(1) as client:
        long = client.submit(
            generate, server, PROMPTS[-1], GREEDY | {"max_new_tokens": 300}, rid="long"
        )
        told: dict[str, Any] = {}

        def is_explained() -> bool:
            reply = requests.get(f"{server.url}/pipeline/explain/long", timeout=ANSWER_S)
            told.update(reply.json()["numbers"] if reply.status_code == 200 else {})
            return bool(told)

        wait_until(is_explained)
        long.result()
    assert (told["bound_by"], told["missed_target"]) == ("MinP", "TPOT")
    assert told["budget_ms"] > 0
    steps = low_tpot.steps()
    assert {(step.bound_by, step.missed_target) for step in steps} == {("MinP", "TPOT")}
    prefills = [step.prefill_tokens for step in steps if step.prefill_tokens]
    assert LEAST_TOKENS <= max(prefills) <= LEAST_TOKENS + TAIL_TOKENS
    assert server.facts()["recent_steps"]["missed_target"] == "TPOT"
    assert_gauges(server, missed="TPOT", met="TTFT", rule="MinP")


def test_the_first_steps_are_bound_by_the_tpot_target_although_the_ttft_is_missed(
    low_ttft: Timed,
) -> None:
    """The first request of this server: eight steps have to come back before its speed is known."""
    generate(low_ttft.server, "one two three four " * 60, GREEDY | {"max_new_tokens": 1})
    steps = low_ttft.steps()
    assert [step.step_id for step in steps[:8]] == list(range(8))
    assert {(step.bound_by, step.budget_ms) for step in steps[:8]} == {("TPOT", 200.0)}
    assert {step.prefill_tokens for step in steps[:8]} == {49}
    # The prompt was waiting in every step.
    assert {step.missed_target for step in steps} == {"TTFT"}
    assert_gauges(low_ttft.server, missed="TTFT", met="TPOT", rule=steps[-1].bound_by)


def assert_gauges(server: LiveServer, missed: str, met: str, rule: str) -> None:
    """What the metrics have of the newest step, once they have been written."""

    def of_target(target: str) -> float:
        return Samples(server).value("sgl_pipeline_target_missed", target=target)

    def has_rule() -> bool:
        return Samples(server).value("sgl_pipeline_budget_bound_by", rule=rule) == 1

    wait_until(lambda: of_target(missed) == 1 and has_rule())
    assert of_target(met) == 0

    def goodput_requests(within: str) -> float:
        return Samples(server).value("sgl_pipeline_goodput_requests_total", within_targets=within)

    wait_until(lambda: goodput_requests("false") > 0)
    assert goodput_requests("true") == 0


@pytest.mark.parametrize(("name", "extra_steps"), [("low_tpot", 1), ("low_ttft", 2)])
def test_tokens_are_those_of_a_server_without_targets_and_extra_steps(
    demo_server: LiveServer, request: pytest.FixtureRequest, name: str, extra_steps: int
) -> None:
    timed: Timed = request.getfixturevalue(name)
    assert outputs(timed.server) == outputs(demo_server)
    steps = timed.steps()
    assert all(step.budget_ms is not None for step in steps), "the token throttle decided a step"
    assert most_in_flight(steps) == NUM_STAGES + extra_steps
