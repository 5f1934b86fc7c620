"""Fair shares: one tenant floods the pipeline with long prompts, another asks now and then; and two
tenants with weights that both want more than there is."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

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


def flood(num_requests: int) -> list[SimulatedRequest]:
    """The tenant that always wants more."""
    requests = made_up(num_requests, FLOOD_PROMPT, FLOOD_OUTPUT)
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
        rows += _flooded(policy, options)
        rows.append(_weighted(policy, options))
    return rows


def _flooded(policy: str, options: Options) -> list[Row]:
    """The light tenant alone, and beside the flood in both orders."""
    flooding = flood(min(options.num_requests, MOST_REQUESTS))
    # As long as the flood lasts, it has requests of the light tenant beside it.
    simulation, _ = serve(policy, scheduling("fcfs"), flooding)
    num_light = max(20, round(LIGHT_RATE_PER_S * summarize(simulation).duration_s * 0.9))
    rows = []
    for prompt in LIGHT_PROMPTS:
        asking = light(num_light, prompt, options.seed)
        simulation, _ = serve(policy, scheduling("fcfs"), asking)
        rows.append(_row(policy, prompt, "alone", simulation))
        for order in ORDERS:
            simulation, _ = serve(policy, scheduling(order), [*flooding, *asking])
            rows.append(_row(policy, prompt, order, simulation))
    return rows


def _row(policy: str, prompt: int, case: str, simulation: Simulation) -> Row:
    asked = [one for one in simulation.requests if one.asked.tenant == "light"]
    first_ms = [one.ttft_ms for one in filter(None, map(latency, asked))]
    summary = summarize(simulation)
    return {
        "load": "flood",
        "policy": policy,
        "light_prompt": prompt,
        "case": case,
        "num_light": len(asked),
        "light_ttft_ms": float(np.mean(first_ms)),
        "light_ttft_p99_ms": float(np.percentile(first_ms, 99)),
        "total_tokens_per_s": summary.total_tokens_per_s,
        "num_retractions": summary.num_retractions,
    }


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


def _flood_rows(rows: Sequence[Row], policy: str, prompt: int) -> list[Row]:
    """The rows of `CASES`, in order."""
    chosen = {"load": "flood", "policy": policy, "light_prompt": prompt}
    return [select(rows, **chosen, case=case)[0] for case in CASES]


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    canvas.set_size_inches(13, 3.6)
    *panels, last = canvas.subplots(1, 3)
    places = np.arange(len(THROTTLES))
    for panel, prompt in zip(panels, LIGHT_PROMPTS, strict=True):
        for number, case in enumerate(CASES):
            heights = [
                _flood_rows(rows, policy, prompt)[number]["light_ttft_p99_ms"]
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
        for prompt in LIGHT_PROMPTS:
            alone, fcfs, fair = _flood_rows(rows, policy, prompt)
            p99 = fair["light_ttft_p99_ms"]
            throughput = fair["total_tokens_per_s"] / fcfs["total_tokens_per_s"]
            lines.append(
                f"{policy}, light prompts of {prompt} tokens: their p99 TTFT is {p99:.0f} ms "
                f"beside the flood, {p99 / alone['light_ttft_p99_ms']:.2f} times that alone "
                f"({alone['light_ttft_p99_ms']:.0f} ms), with fcfs "
                f"{fcfs['light_ttft_p99_ms']:.0f} ms; throughput of all {throughput:.3f} of fcfs; "
                f"{fair['num_retractions']} retractions"
            )
        (weights,) = select(rows, load="weights", policy=policy)
        ratio = weights["service_ms_of_three"] / weights["service_ms_of_one"]
        lines.append(f"{policy}: weights of 1 and 3 get service as 1 to {ratio:.3f}")
    return lines


FIGURE = Figure(
    name="fair_shares",
    title="Two tenants, 14B, PP 4",
    claim="None. VTC bounds how far the service of backlogged clients may differ. Ours to show: "
    "beside a flood the other tenant's p99 TTFT is within 1.5 times of being alone, throughput at "
    "least 0.97 of fcfs, and weights of 1 and 3 get 1 to 3 within 5 %.",
    assumptions=f"The flood is {FLOOD_CLIENTS} clients that ask again when answered, prompts of "
    f"about {FLOOD_PROMPT} tokens and answers of {FLOOD_OUTPUT}, for {PLACES} places; the light "
    f"tenant sends {LIGHT_RATE_PER_S:g} requests a second (Poisson), answers of {LIGHT_OUTPUT}. "
    "Service is counted by costs fitted to the cluster's tables.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
