"""The progress of the stages' weights, on one line of the terminal.

Nothing is written if there is no terminal.
"""

from sgl_pipeline.status_line import StatusLine, bar


class LoadLine:
    """`num_layers` are the model's."""

    def __init__(self, num_layers: int, line: StatusLine | None = None) -> None:
        self._num_layers = num_layers
        self._line = line or StatusLine()
        self._read: dict[int, int] = {}

    def heard(self, stage: int, num_layers: int) -> None:
        """The stage has read `num_layers` of its layers."""
        self._read[stage] = num_layers
        stages = ", ".join(f"{one}: {count}" for one, count in sorted(self._read.items()))
        whole = bar(sum(self._read.values()), self._num_layers)
        self._line.show(f"loading weights {whole} layers (stage {stages})")

    def close(self) -> None:
        self._line.clear()
