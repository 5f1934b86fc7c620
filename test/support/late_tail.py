"""The end of a last stage whose tokens come when a test says so, as those of a GPU do."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgl_pipeline.pp_runner.base.step_inputs import StepInputs
from sgl_pipeline.pp_runner.output.output_tail import Outputs
from sgl_pipeline.wire.step_order import MirroredChunk


@dataclass(eq=False)
class LateOutputs:
    """Token ids of one step: its number among the drawn, for each row that samples."""

    log: list[str]
    number: int
    num_samples: int
    looks_left: int
    error: Exception | None

    def is_ready(self) -> bool:
        self.looks_left -= 1
        return self.looks_left < 0

    def result(self) -> Outputs:
        self.log.append(f"result {self.number}")
        if self.error is not None:
            raise self.error
        return (self.number,) * self.num_samples, ()


class LateTail:
    """A `Tail` whose n-th step is ready when it has been looked for `looks[n]` times, or then fails
    with `error`.

    Puts "draw n" and "result n" into `log`.
    """

    def __init__(
        self, log: list[str], looks: Sequence[int], error: Exception | None = None
    ) -> None:
        self._num_drawn = 0
        self._log = log
        self._looks = looks
        self._error = error
        self._num_samples = 0

    def plan(self, chunks: Sequence[MirroredChunk], inputs: StepInputs) -> None:
        self._num_samples = len(inputs.sampling)

    def draw(self, hidden: torch.Tensor) -> LateOutputs:
        number, self._num_drawn = self._num_drawn, self._num_drawn + 1
        self._log.append(f"draw {number}")
        looks = self._looks[number]
        return LateOutputs(self._log, number, self._num_samples, looks, self._error)
