"""Arguments and results of the planner of layer moves, `planner.py`."""

from dataclasses import dataclass
from typing import Literal

from sgl_pipeline.args import require


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerArgs:
    """The conditions under which a move is worth its cost.

    A move costs `move_price_s + moved layers * layer_price_s` seconds of the pipeline's time, and
    `state_byte_price_s` for each byte of states that moves (`move_prices.py` learns both). The rule
    `balance` proposes it once the steps have lost as much by staying, counted while another split
    is at least `min_gain_share` of the slowest stage's time faster: whatever the load does next,
    moving has then cost no more than not moving had (ski rental).

    The rule `dynapipe` is the paper's. `reading` interprets its window, which it leaves open: with
    `unanimous` a plan is proposed when it was best at every position of the window; with
    `accumulated`, when it is best for the sum of the window's steps.
    """

    rule: Literal["balance", "dynapipe"] = "balance"
    reading: Literal["unanimous", "accumulated"] = "unanimous"
    window_steps: int = 25
    evaluate_steps: int = 5  # steps from one evaluation to the next, of the balance
    min_gain_share: float = 0.03
    move_price_s: float = 0.0
    layer_price_s: float = 0.1  # DynaPipe: under 100 ms a layer over PCIe
    state_byte_price_s: float = 1e-9  # a host copies about 1 GB/s so, beside its steps

    def __post_init__(self) -> None:
        require(self.window_steps >= 1, f"a window of {self.window_steps} steps; 1 or more")
        require(
            1 <= self.evaluate_steps <= self.window_steps,
            f"an evaluation every {self.evaluate_steps} steps; between 1 and the window's "
            f"{self.window_steps}",
        )
        prices = self.move_price_s, self.layer_price_s, self.state_byte_price_s
        require(min(prices) >= 0.0, "prices must not be negative")

    @classmethod
    def as_published(
        cls, window_steps: int = 25, reading: Literal["unanimous", "accumulated"] = "unanimous"
    ) -> "PlannerArgs":
        """DynaPipe's planner: its rule and its window, without prices."""
        return cls(
            rule="dynapipe",
            reading=reading,
            window_steps=window_steps,
            evaluate_steps=1,
            min_gain_share=-1.0,
            layer_price_s=0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveProposal:
    """A split that is worth moving to. Times are the mean predicted milliseconds of a step of the
    window on each stage; `gain_share` is the share of its time by which the slowest stage gets
    faster."""

    layer_counts: tuple[int, ...]
    before_ms: tuple[float, ...]
    after_ms: tuple[float, ...]
    gain_share: float
    moved_layers: int
    price_s: float
