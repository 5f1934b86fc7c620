"""Token throttling as others measured it in their engines (T1, T3, T4), simulated."""

from collections.abc import Sequence
from random import Random

from matplotlib.figure import Figure as Canvas

from benchmark.figures.figure import (
    COLUMNS,
    POLICY_STYLE,
    UNBOUNDED,
    Figure,
    Options,
    Row,
    change,
    closed_loop,
    distinct,
    numbers,
    run,
    select,
)
from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.traces import load_trace
from sgl_pipeline.simulator.workload import SimulatedRequest, TokenIds, poisson_arrivals

CLUSTER = Cluster(model="Qwen2.5-32B", device="a100-80g", link="nvlink")
# greedy-queue decides as sarathi does up to 2048 decodes in a step.
POLICIES = ("sarathi", "throttle")
PROMPT_TOKENS, ANSWER_TOKENS = 8192, 350


def compute(options: Options) -> list[Row]:
    rows = []
    for case, workload in _workloads(options).items():
        for policy in POLICIES:
            simulation = run(CLUSTER, ThrottleArgs(policy=policy), workload, UNBOUNDED)
            rows.append({"case": case, "policy": policy, **numbers(simulation)})
    return rows


def _workloads(options: Options) -> dict[str, list[SimulatedRequest]]:
    chats = load_trace(options.trace or "sharegpt", 2 * options.num_requests)
    long_prompts = _equal(options.num_requests // 4)
    return {
        "T1: ShareGPT, 16 req/s": poisson_arrivals(chats, 16.0, Random(options.seed)),
        "T3: 24 clients": closed_loop(long_prompts, 24),
        "T4: 16 clients": closed_loop(long_prompts, 16),
    }


def _equal(num_requests: int) -> list[SimulatedRequest]:
    ids = TokenIds()
    return [
        SimulatedRequest(
            arrival_s=0.0, prompt=(ids.fresh(PROMPT_TOKENS),), output=ids.fresh(ANSWER_TOKENS)
        )
        for _ in range(num_requests)
    ]


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    """Each quantity relative to that of the first policy."""
    canvas.set_size_inches(12, 3.5)
    cases = [case for (case,) in distinct(rows, "case")]
    width = 0.8 / len(POLICIES)
    for panel, (column, label) in zip(canvas.subplots(1, len(COLUMNS)), COLUMNS, strict=True):
        for number, policy in enumerate(POLICIES):
            heights = [
                select(rows, case=case, policy=policy)[0][column]
                / select(rows, case=case, policy=POLICIES[0])[0][column]
                for case in cases
            ]
            places = [place + number * width for place in range(len(cases))]
            color = POLICY_STYLE[policy]["color"]
            panel.bar(places, heights, width=width, label=policy, color=color)
        labels = [case.replace(": ", "\n").replace(", ", "\n") for case in cases]
        panel.set_xticks([place + width / 2 for place in range(len(cases))], labels, fontsize=7)
        panel.set_ylabel(f"{label}, relative to {POLICIES[0]}")
    panel.legend(fontsize=8, loc="lower right")


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for (case,) in distinct(rows, "case"):
        (old,), (new,) = (select(rows, case=case, policy=policy) for policy in POLICIES)
        changes = ", ".join(f"{label} {change(new, old, name)}" for name, label in COLUMNS)
        bubbles = f"bubbles {old['bubble_share']:.0%} to {new['bubble_share']:.0%}"
        lines.append(f"{case}: throttle against sarathi: {changes}, {bubbles}")
    return lines


FIGURE = Figure(
    name="elsewhere",
    title="Token throttling as others measured it: Qwen2.5-32B, PP 4",
    claim="T1 (vLLM PR 20359, the same model on A100): throughput some +30 %, TTFT -90 %, TPOT -80 "
    "%, E2E -80 %. T3 (a blog's port to vLLM 0.9.1, 8k in, 350 out, 24 at a time): TTFT -0.6 %, "
    "time between tokens -9.3 %. T4 (vLLM 0.10.1, 16 at a time): -7.6 %, +6 %.",
    assumptions="T3 and T4 name neither model nor cards: those of T1 are taken, and their 4 and 2 "
    "requests a second are left out, as clients that wait for their answers send fewer.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
