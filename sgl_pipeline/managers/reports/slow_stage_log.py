"""The line that the log gets when a stage becomes slow, and the line when that is over."""

import logging

from sgl_pipeline.pipeline.pipeline_state import PipelineState, StageState

logger = logging.getLogger(__name__)

_ADVICE = {
    "off": "its layers stay, as --migration is off; with auto they move to faster stages",
    "manual": "POST /pipeline/plan moves layers away from it; --migration auto would do so itself",
    "auto": "--migration auto moves layers away from it where others have room",
}


class SlowStageLog:
    """Args:
    migration: the mode of `args.MIGRATION_MODES` in force.
    """

    def __init__(self, migration: str) -> None:
        self._advice = _ADVICE[migration]
        self._slow: dict[int, StageState] = {}
        self._num_stages = 0

    def report(self, state: PipelineState) -> None:
        """Logs the changes since the last call."""
        slow = state.slow_stages
        if state.plan.num_stages != self._num_stages:
            # The old stages are gone, or have other layers.
            self._num_stages, self._slow = state.plan.num_stages, {}
        for number, stage in slow.items():
            if number not in self._slow:
                self._log_slow(number, stage, state.now_s)
        for number, stage in self._slow.items():
            if number not in slow:
                assert stage.slow_since_s is not None
                logger.info(
                    "stage %d is as fast as before, after %.0f s: %.1f times what is predicted",
                    number,
                    state.now_s - stage.slow_since_s,
                    state.stages[number].slowdown,
                )
        self._slow = slow

    def _log_slow(self, number: int, stage: StageState, now_s: float) -> None:
        assert stage.slow_since_s is not None
        logger.warning(
            "stage %d is slow: for %.0f s its steps have taken %.1f times what is predicted; see "
            "what else runs on its cores; %s",
            number,
            now_s - stage.slow_since_s,
            stage.slowdown,
            self._advice,
        )
