"""Proposes a new layer split when recent steps would run faster with it.

Must be notified of every step that has ended, and is asked between steps. Pure. Together with the
forecast it costs under 50 us a step on average.

The default rule balances: among all splits that the stages may hold it finds the one whose slowest
stage takes least in the window's steps, and proposes it once staying has cost more than the move.
The rule `dynapipe` is the paper's: `delta_rule.py`.
"""

from collections.abc import Sequence

from sgl_pipeline.migration.delta_rule import best_removal, even_split_less
from sgl_pipeline.migration.move_prices import MovePrices
from sgl_pipeline.migration.planner_args import MoveProposal, PlannerArgs
from sgl_pipeline.migration.predictor import PartTimes
from sgl_pipeline.migration.split_search import SplitSearch, StageTerms, can_stay_below
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.migration.work_window import Unanimity, WorkWindow
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.move_orders import layer_moves


class LayerPlanner:
    """Watches ended steps, proposes splits.

    Args:
        forecast: predicts step times; its owner passes it steps and plans.
        max_layers: the most layers that each stage may hold, old and new ones together while
            they move; None: any number. May be replaced at any time.
        prices: of moves; None: those of `args`, without states.
    """

    def __init__(
        self,
        args: PlannerArgs,
        plan: StagePlan,
        forecast: StepForecast,
        max_layers: tuple[int, ...] | None = None,
        prices: MovePrices | None = None,
    ) -> None:
        self._args = args
        self._num_stages = plan.num_stages
        self._num_layers = plan.num_layers
        self.forecast = forecast
        self._predictor = forecast.predictor
        self.max_layers = max_layers
        self.prices = prices or MovePrices(args)
        self._window = WorkWindow(args.window_steps)
        self._removals: Unanimity[int] = Unanimity(args.window_steps)
        self._agreed_removal: int | None = None
        self._steps_to_evaluation = args.evaluate_steps
        self._lost_s = 0.0  # by not having moved yet
        self._search: tuple[object, SplitSearch] | None = None

    def start_over(self, plan: StagePlan, max_layers: tuple[int, ...] | None = None) -> None:
        """Other stages hold the layers from now on; their number may have changed."""
        self._num_stages = plan.num_stages
        self.max_layers = max_layers
        self._window.clear()
        self._search = None
        self.moved()

    def note(self, parts: PartTimes) -> None:
        """A step of these predicted times has ended."""
        if self.forecast.predictor is not self._predictor:
            # Parts by another predictor are not comparable.
            self._predictor = self.forecast.predictor
            self._window.clear()
            self._search = None
        self._window.add(parts)
        self._steps_to_evaluation -= 1
        if self._args.rule == "dynapipe":
            self._note_removal(parts)

    def predict(self, layer_counts: Sequence[int]) -> tuple[float, ...] | None:
        """Mean milliseconds of the window's steps on each stage of that split; None while nothing
        is known."""
        if self._predictor is None or not len(self._window):
            return None
        return self._stage_times(layer_counts, self._window.mean())

    def proposal(self, layer_counts: Sequence[int]) -> MoveProposal | None:
        """A split that is worth leaving `layer_counts` for, if there is any."""
        if (
            self._predictor is None
            or not self._window.is_full
            or self._steps_to_evaluation > 0
            or self._num_stages == 1
        ):
            return None
        self._steps_to_evaluation = self._args.evaluate_steps
        current = tuple(layer_counts)
        if self._args.rule == "dynapipe":
            split = self._dynapipe_split(current)
            return None if split is None else self.worthwhile(current, split)
        split = self._balanced_split(current)
        proposal = None if split is None else self.worthwhile(current, split)
        if proposal is None:
            self._lost_s = 0.0
            if split is not None:
                # After a search without result no other, before all steps of the window are new.
                self._steps_to_evaluation = self._args.window_steps
            return None
        lost_ms_per_step = max(proposal.before_ms) - max(proposal.after_ms)
        self._lost_s += self._args.evaluate_steps * lost_ms_per_step * 1e-3
        return proposal if self._lost_s >= proposal.price_s else None

    def preview(self, current: Sequence[int], layer_counts: Sequence[int]) -> MoveProposal | None:
        """The gain of moving from one split to any other, worth it or not; None while nothing is
        known."""
        before_ms, after_ms = self.predict(current), self.predict(layer_counts)
        if before_ms is None or after_ms is None:
            return None
        old, new = (StagePlan(0, tuple(counts)) for counts in (current, layer_counts))
        moved = [one.layer for one in layer_moves(old, new)]
        return MoveProposal(
            layer_counts=tuple(layer_counts),
            before_ms=before_ms,
            after_ms=after_ms,
            gain_share=1.0 - max(after_ms) / max(before_ms) if max(before_ms) else 0.0,
            moved_layers=len(moved),
            price_s=self.prices.of(moved),
        )

    def worthwhile(self, current: tuple[int, ...], split: tuple[int, ...]) -> MoveProposal | None:
        """The move to `split`, if it differs and gains enough."""
        preview = None if split == current else self.preview(current, split)
        return preview if preview and preview.gain_share >= self._args.min_gain_share else None

    def is_allowed(self, current: Sequence[int], layer_counts: Sequence[int]) -> bool:
        """True if every stage may hold its layers of both splits."""
        return self._search_from(tuple(current)).is_allowed(layer_counts)

    def moved(self) -> None:
        """A move has ended, well or not: proposals begin anew."""
        self._lost_s = 0.0
        self._removals.clear()
        self._agreed_removal = None

    def _stage_times(self, layer_counts: Sequence[int], parts: PartTimes) -> tuple[float, ...]:
        assert self._predictor is not None
        return self._predictor.stage_times_ms(parts, layer_counts, self.forecast.speeds)

    def _balanced_split(self, current: tuple[int, ...]) -> tuple[int, ...] | None:
        """The best split for the window; None if none is enough better than `current`."""
        assert self._predictor is not None
        parts = self._window.mean()
        ends_ms = self._predictor.layer_ends_ms(parts)
        extras_ms = [0.0] * self._num_stages
        extras_ms[0] += parts.embedding_ms
        extras_ms[-1] += parts.tail_ms
        terms = [StageTerms(*pair) for pair in zip(self.forecast.speeds, extras_ms, strict=True)]
        slowest_ms = max(self._stage_times(current, parts))
        enough_ms = slowest_ms * (1.0 - self._args.min_gain_share)
        if not can_stay_below(enough_ms, ends_ms, terms):
            return None
        return self._search_from(current).best(ends_ms, terms)

    def _search_from(self, current: tuple[int, ...]) -> SplitSearch:
        key = (current, self.max_layers)
        if self._search is None or self._search[0] != key:
            self._search = (key, SplitSearch(current, self.max_layers))
        return self._search[1]

    def _note_removal(self, parts: PartTimes) -> None:
        """One position of the paper's window."""
        if self._args.reading == "unanimous":
            self._agreed_removal = self._removals.note(self._removal(parts))

    def _dynapipe_split(self, current: tuple[int, ...]) -> tuple[int, ...] | None:
        """The paper's split; fewer layers leave the last stage where others have no room."""
        removed = self._agreed_removal
        if self._args.reading == "accumulated":
            removed = self._removal(self._window.mean())
        if removed is None:
            return None
        search = self._search_from(current)
        for fewer in range(removed, -1, -1):
            split = even_split_less(self._num_layers, self._num_stages, fewer)
            if search.is_allowed(split):
                return split
        return None

    def _removal(self, parts: PartTimes) -> int:
        most = self._num_layers // self._num_stages - 1
        return best_removal(parts.tail_ms, parts.layer_ms, self._num_stages, most)
