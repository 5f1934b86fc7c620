"""State, schedules and printed lines of a demo model training run.

`train.py` keeps one `Progress` in its checkpoint and asks the functions here for the learning
rate and the number of layers of the moment.  Schedules must depend only on the step and on the
fraction of the time budget spent, so that a resumed run goes on exactly as planned.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmark.demo_model.tasks import TASK_NAMES, TRAINING_TASK_NAMES

WARMUP_STEPS = 60
# Pairs of a fraction of the time budget and the number of layers from then on.
Stages = tuple[tuple[float, int], ...]
# Arithmetic and counting are the hardest tasks and have the shortest turns, so that drawing them
# more often costs few tokens.
BASE_SHARES: dict[str, float] = {"sum": 2.0, "difference": 2.0, "count": 1.5}


@dataclass
class Progress:
    """Everything besides weights and optimiser state that a resumed run needs."""

    step: int = 0
    layer_count: int = 0
    stage_start_step: int = 0
    tokens_seen: int = 0
    elapsed_seconds: float = 0.0
    accuracy_by_task: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(TASK_NAMES, 0.0)
    )

    def task_weights(self) -> list[float]:
        """Return how often to draw each of `TRAINING_TASK_NAMES`, in no unit.

        A task's base share counts fully at 0 % held-out accuracy and falls to a fifth at 100 %.
        """
        accuracies = {**self.accuracy_by_task, "tally": self.accuracy_by_task["count"]}
        return [
            BASE_SHARES.get(name, 1.0) * (1.25 - accuracies[name]) for name in TRAINING_TASK_NAMES
        ]


def learning_rate_factor(
    step: int, fraction_done: float, warmup_steps: int = WARMUP_STEPS
) -> float:
    """Return the schedule in [0, 1]: warm-up by steps, then flat, then linear decay by time."""
    warm = min(1.0, (step + 1) / warmup_steps)
    return warm * min(1.0, max(0.0, (1.0 - fraction_done) / 0.7))


def layer_count_stages(text: str) -> Stages:
    """Read stages such as `0:4,0.5:8,0.88:16`, which must start at 0.

    A shallow model learns the tasks several times faster; the layers added later start as the
    identity and lose nothing.
    """
    stages = tuple(
        (float(start), int(count))
        for start, _, count in (p.partition(":") for p in text.split(","))
    )
    if stages[0][0] != 0.0:
        raise ValueError(
            f"the first stage of {text!r} starts at {stages[0][0]}; it must start at 0"
        )
    return stages


def layer_count_at(fraction_done: float, stages: Stages) -> int:
    """Return the number of layers the model has after this fraction of the time budget."""
    return max(count for start, count in stages if fraction_done >= start)


def report_step(progress: Progress, loss: float, speed: float, budget_seconds: float) -> None:
    """Print one progress line."""
    left_minutes = (budget_seconds - progress.elapsed_seconds) / 60.0
    print(
        f"step {progress.step:6d}  loss {loss:7.4f}  {speed:6.0f} tokens/s  "
        f"{progress.tokens_seen / 1e6:6.2f} M tokens  {left_minutes:5.1f} min left",
        flush=True,
    )


def report_accuracy(progress: Progress) -> None:
    """Print the held-out accuracy of every task, in percent."""
    cells = (f"{name} {100 * value:.0f}" for name, value in progress.accuracy_by_task.items())
    print(f"held out %  {'  '.join(cells)}", flush=True)
