"""Fair shares: one tenant floods the pipeline with long prompts, another asks now and then; and two
tenants with weights that both want more than there is."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from statistics import median

import numpy as np
from matplotlib.figure import Figure as Canvas

from benchmark.figures.figure import Figure, Options, Row, closed_loop, select
from benchmark.figures.plans import made_up
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.requests import RequestState
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.simulation import Simulation
from sgl_pipeline.simulator.summary import latency, summarize
from sgl_pipeline.simulator.workload import SimulatedRequest, poisson_arrivals
from sgl_pipeline.throttle import make_policy

CLUSTER = Cluster(model="Qwen2.5-14B", device="a100-80g", num_stages=4, split="auto")
TARGET_TPOT_MS = 100.0
# A target bounds the steps that a newcomer finds on their way.
BOUNDED = f"throttle-time, TPOT {TARGET_TPOT_MS:.0f} ms"
THROTTLES = {
    "throttle": ThrottleArgs(policy="throttle"),
    "throttle-time": ThrottleArgs(policy="throttle-time"),
    BOUNDED: ThrottleArgs(policy="throttle-time", target_tpot_ms=TARGET_TPOT_MS),
    "sarathi": ThrottleArgs(policy="sarathi"),
}
# The flood: clients that ask again when answered, with more requests than there are places.
FLOOD_CLIENTS, FLOOD_PROMPT, FLOOD_OUTPUT = 96, 3000, 150
PLACES = 64
# Of the light tenant: as long as a step's prefill, and much shorter.
LIGHT_PROMPTS, LIGHT_OUTPUT = (1800, 300), 80
MOST_REQUESTS = 800
LIGHT_RATE_PER_S = 2.0
# Of the two tenants with weights.
WEIGHTS = {"one": 1.0, "three": 3.0}
WEIGHTS_STEPS = 1500
ORDERS = {"fcfs": None, "fair shares": "user"}
CASES = ("alone", *ORDERS)
NUM_SEEDS = 5
# A flood of prompts alone: answers of some tokens, and places for all.
SHORT_ANSWERS, MANY_PLACES = 20, 256
PREFILL_BOUND = "throttle-time"


def scheduling(order: str, places: int = PLACES) -> SchedulingArgs:
    """`order` is of `ORDERS`."""
    by = ORDERS[order]
    return SchedulingArgs(
        max_running_requests=places,
        fair_shares_by=by,
        tenant_weights=None if by is None else '{"three": 3}',
    )


def serve(
    policy: str,
    args: SchedulingArgs,
    workload: Sequence[SimulatedRequest],
    most_steps: int | None = None,
) -> tuple[Simulation, StepScheduler]:
    """A run of `CLUSTER`, and the scheduler as it was at the end; its times are known to all."""
    pool_tokens = CLUSTER.kv_pool_tokens()
    scheduler = StepScheduler(
        args,
        make_policy(THROTTLES[policy]),
        num_pages=pool_tokens // args.page_size,
        num_stages=CLUSTER.num_stages,
        context_length=pool_tokens,
    )
    pipeline = CLUSTER.pipeline(scheduler, args.page_size, is_timed=True)
    return pipeline.run(workload, most_steps=most_steps), scheduler


def of_tenant(requests: Sequence[SimulatedRequest], tenant: str) -> list[SimulatedRequest]:
    """The same requests, with all that follow them, as that tenant's."""
    return [
        SimulatedRequest.chain([replace(one, tenant=tenant) for one in first.with_follow_ups()])
        for first in requests
    ]


def flood(num_requests: int, output: int = FLOOD_OUTPUT) -> list[SimulatedRequest]:
    """The tenant that always wants more."""
    requests = made_up(num_requests, FLOOD_PROMPT, output)
    return of_tenant(closed_loop(requests, FLOOD_CLIENTS), "flood")


def light(num_requests: int, prompt: int, seed: int) -> list[SimulatedRequest]:
    """The tenant that asks now and then; its prompts are none of the flood's."""
    requests = made_up(num_requests, prompt, LIGHT_OUTPUT)
    shifted = [
        replace(
            one,
            prompt=tuple(replace(part, first=part.first + 2**30) for part in one.prompt),
        )
        for one in requests
    ]
    return of_tenant(poisson_arrivals(shifted, LIGHT_RATE_PER_S, Random(seed)), "light")


def compute(options: Options) -> list[Row]:
    rows = []
    for policy in THROTTLES:
        rows += _flooded("flood", policy, options, FLOOD_OUTPUT, PLACES)
        rows.append(_weighted(policy, options))
    rows += _flooded("prompts", PREFILL_BOUND, options, SHORT_ANSWERS, MANY_PLACES)
    return rows


def _flooded(load: str, policy: str, options: Options, output: int, places: int) -> list[Row]:
    """The light tenant alone, and beside the flood in both orders."""
    flooding = flood(min(options.num_requests, MOST_REQUESTS), output)
    # As long as the flood lasts, it has requests of the light tenant beside it.
    simulation, _ = serve(policy, scheduling("fcfs", places), flooding)
    num_light = max(20, round(LIGHT_RATE_PER_S * summarize(simulation).duration_s * 0.9))
    rows = []
    for prompt in LIGHT_PROMPTS:
        for seed in range(options.seed, options.seed + NUM_SEEDS):
            asking = light(num_light, prompt, seed)
            for case in CASES:
                order = "fcfs" if case == "alone" else case
                requests = asking if case == "alone" else [*flooding, *asking]
                simulation, _ = serve(policy, scheduling(order, places), requests)
                row = _row(policy, prompt, case, simulation)
                rows.append({"load": load, "seed": seed} | row)
    return rows


def _row(policy: str, prompt: int, case: str, simulation: Simulation) -> Row:
    asked = [one for one in simulation.requests if one.asked.tenant == "light"]
    first_ms = [one.ttft_ms for one in filter(None, map(latency, asked))]
    summary = summarize(simulation)
    step_ms = [
        1e3 * max(end - start for start, end in zip(step.starts_s, step.ends_s, strict=True))
        for step in simulation.steps
    ]
    return {
        "policy": policy,
        "light_prompt": prompt,
        "case": case,
        "num_light": len(asked),
        "light_ttft_ms": float(np.mean(first_ms)),
        "light_ttft_p99_ms": float(np.percentile(first_ms, 99)),
        "step_p99_ms": float(np.percentile(step_ms, 99)),
        "bubble_share": summary.bubble_share,
        "flooded_tokens_per_s": _flooded_tokens_per_s(simulation),
        "num_retractions": summary.num_retractions,
    }


def _flooded_tokens_per_s(simulation: Simulation) -> float:
    """Tokens of all while the flood has prompts to compute, a prompt's with its first token; 0
    where there is none."""
    firsts_s = [one.token_times_s[0] for one in simulation.requests if one.asked.tenant == "flood"]
    until_s = max(firsts_s, default=0.0)
    tokens = 0
    for one in simulation.requests:
        in_time = sum(moment_s < until_s for moment_s in one.token_times_s)
        tokens += in_time + (one.asked.input_tokens if in_time else 0)
    return tokens / until_s if until_s else 0.0


def _weighted(policy: str, options: Options) -> Row:
    """Two tenants whose requests all wait; it ends while both still do."""
    each = 2 * min(options.num_requests, MOST_REQUESTS)
    requests = made_up(2 * each, 900, 120)
    one, three = requests[:each], requests[each:]
    both = [*of_tenant(one, "one"), *of_tenant(three, "three")]
    _, scheduler = serve(policy, scheduling("fair shares"), both, WEIGHTS_STEPS)
    assert scheduler.shares is not None
    waiting = {one.tenant for one in scheduler.requests() if one.state is RequestState.WAITING}
    assert waiting == set(WEIGHTS), "both must wait to the end; serve more requests"
    service = scheduler.shares.tenants.totals.service
    return {
        "load": "weights",
        "policy": policy,
        "case": "fair shares",
        "service_ms_of_one": service["one"],
        "service_ms_of_three": service["three"],
    }


def _flood_rows(rows: Sequence[Row], load: str, policy: str, prompt: int) -> list[list[Row]]:
    """The rows of `CASES`, in order, each with those of all seeds."""
    chosen = {"load": load, "policy": policy, "light_prompt": prompt}
    return [select(rows, **chosen, case=case) for case in CASES]


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    canvas.set_size_inches(13, 3.6)
    *panels, last = canvas.subplots(1, 3)
    places = np.arange(len(THROTTLES))
    for panel, prompt in zip(panels, LIGHT_PROMPTS, strict=True):
        for number, case in enumerate(CASES):
            heights = [
                median(
                    row["light_ttft_p99_ms"]
                    for row in _flood_rows(rows, "flood", policy, prompt)[number]
                )
                for policy in THROTTLES
            ]
            panel.bar(places + 0.27 * (number - 1), heights, 0.25, label=case)
        panel.set_yscale("log")
        panel.set_ylabel(f"p99 TTFT of prompts of {prompt} tokens (ms)")
    panels[0].legend(fontsize=8)
    chosen = select(rows, load="weights")
    last.bar(places, [row["service_ms_of_three"] / row["service_ms_of_one"] for row in chosen])
    last.axhline(3.0, color="black", linewidth=0.8)
    last.set_ylabel("service of weight 3 / of weight 1")
    for panel in (*panels, last):
        panel.set_xticks(places, [one.replace(", ", "\n") for one in THROTTLES], fontsize=7)
        panel.grid(axis="y", alpha=0.3)


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for policy in THROTTLES:
        lines += [_flood_line(rows, "flood", policy, prompt) for prompt in LIGHT_PROMPTS]
        (weights,) = select(rows, load="weights", policy=policy)
        ratio = weights["service_ms_of_three"] / weights["service_ms_of_one"]
        lines.append(f"{policy}: weights of 1 and 3 get service as 1 to {ratio:.3f}")
    lines += [_flood_line(rows, "prompts", PREFILL_BOUND, prompt) for prompt in LIGHT_PROMPTS]
    return lines


def _flood_line(rows: Sequence[Row], load: str, policy: str, prompt: int) -> str:
    alone, fcfs, fair = _flood_rows(rows, load, policy, prompt)

    def middle(of: list[Row], name: str) -> float:
        return float(median(row[name] for row in of))

    def ratios(of: list[Row], name: str) -> list[float]:
        return sorted(one[name] / other[name] for one, other in zip(fair, of, strict=True))

    p99 = "light_ttft_p99_ms"
    times, throughput = ratios(alone, p99), ratios(fcfs, "flooded_tokens_per_s")
    step_ms = middle(fair, "step_p99_ms")
    return (
        f"{load}, {policy}, light prompts of {prompt} tokens: their p99 TTFT is "
        f"{middle(fair, p99):.0f} ms beside the flood, {median(times):.2f} times that alone "
        f"({times[0]:.2f} to {times[-1]:.2f}; {middle(alone, p99):.0f} ms), with fcfs "
        f"{middle(fcfs, p99):.0f} ms; {CLUSTER.num_stages + 1} steps of {step_ms:.1f} ms (p99; "
        f"fcfs {middle(fcfs, 'step_p99_ms'):.1f}) are {(CLUSTER.num_stages + 1) * step_ms:.0f} ms; "
        f"throughput of all {median(throughput):.3f} of fcfs ({throughput[0]:.3f} to "
        f"{throughput[-1]:.3f}), bubbles {middle(fair, 'bubble_share'):.0%} against "
        f"{middle(fcfs, 'bubble_share'):.0%}"
    )


FIGURE = Figure(
    name="fair_shares",
    title="Two tenants, 14B, PP 4",
    claim="None. VTC bounds how far the service of backlogged clients may differ. Ours to show: "
    "beside a flood the other tenant's p99 TTFT is within 1.5 times of being alone, throughput at "
    "least 0.97 of fcfs, and weights of 1 and 3 get 1 to 3 within 5 %.",
    assumptions=f"The flood is {FLOOD_CLIENTS} clients that ask again when answered, prompts of "
    f"about {FLOOD_PROMPT} tokens and answers of {FLOOD_OUTPUT}, for {PLACES} places; the light "
    f"tenant sends {LIGHT_RATE_PER_S:g} requests a second (Poisson), answers of {LIGHT_OUTPUT}. "
    "Service is counted by costs fitted to the cluster's tables. Medians of "
    f"{NUM_SEEDS} seeds, and their range; throughput while the flood has prompts to compute. In "
    f"the load `prompts` the flood's answers have {SHORT_ANSWERS} tokens, for {MANY_PLACES} "
    "places, so that prompts fill every step.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
