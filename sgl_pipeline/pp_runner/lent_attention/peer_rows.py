"""The offloaded rows of one step that are at one peer, from their plan to their results.

Shapes: R such rows, L offloaded rows of the step in all; Hq query heads, D and Dv head dims.
"""

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from sgl_pipeline.errors import PeerLost
from sgl_pipeline.pp_runner.lent_attention.executor_stream import ExecutorStream
from sgl_pipeline.wire.attention_messages import AttendRows, PlanAttention

logger = logging.getLogger(__name__)


class PeerRows:
    """Rows of the leases of `plan`.

    Args:
        source: the peer's name.
        rows: [R] their places among the offloaded ones.
        slots: [R] the places of their keys and values in this stage's pages.
        ways: to the stages of the peer that have the layers of the step, by layer.

    `lost` are the leases that could not be used, in the sequence of their losses.
    """

    def __init__(
        self,
        source: str,
        plan: PlanAttention,
        rows: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
        ways: Mapping[int, ExecutorStream],
    ) -> None:
        self._source, self._plan, self._ways = source, plan, ways
        self._rows, self._slots = torch.from_numpy(rows), slots
        self._is_lost = False
        self.lost: list[int] = []

    def announce(self, layers: range) -> None:
        """Sends the plan to each stage of the peer that has some of `layers`."""
        if len(self._ways) < len(layers):
            self._lose("it is not in use here, or has no stage with some layer of this one")
            return
        try:
            for way in dict.fromkeys(self._ways.values()):
                way.plan(self._plan)
        except PeerLost as error:
            self._lose(str(error))

    def send(
        self,
        layer: int,
        query: torch.Tensor,
        pages: Sequence[torch.Tensor],
        sinks: torch.Tensor | None,
    ) -> bool:
        """Sends the rows of a layer; whether results are to be received. `query` [L, Hq, D] has all
        offloaded rows, `pages` are those of keys and values."""
        if self._is_lost:
            return False
        keys, values = (
            part.flatten(0, 1).flatten(1).view(torch.uint8).numpy()[self._slots].data.cast("B")
            for part in pages
        )
        asked = _bytes_of(query[self._rows])
        content = memoryview(b"") if sinks is None else _bytes_of(sinks)
        try:
            self._ways[layer].send(AttendRows(layer, asked, keys, values, content))
        except PeerLost as error:
            self._lose(str(error))
        return not self._is_lost

    def receive(self, layer: int, output: torch.Tensor) -> float:
        """Puts the results of a layer into their rows of `output` [L, Hq, Dv]; the seconds that the
        peer took. Rows of leases that are lost stay as they are, or become zeros."""
        shape = (self._plan.num_rows, *output.shape[1:])
        num_bytes = int(np.prod(shape)) * output.itemsize
        try:
            answer = self._ways[layer].receive(layer, num_bytes)
        except PeerLost as error:
            self._lose(str(error))
            return 0.0
        results = torch.frombuffer(bytearray(answer.output), dtype=output.dtype).view(shape)
        output[self._rows] = results
        for refused in answer.refused:
            if refused.lease not in self.lost:
                self.lost.append(refused.lease)
                logger.warning(
                    "peer %s refuses lease %d: %s", self._source, refused.lease, refused.reason
                )
        return answer.busy_s

    def _lose(self, reason: str) -> None:
        """Loses all leases: nothing of the rows' further layers is sent."""
        logger.warning("the leases of peer %s are lost: %s", self._source, reason)
        self._is_lost = True
        leases = [chunk.lease for chunk in self._plan.chunks]
        self.lost += [lease for lease in leases if lease not in self.lost]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data.cast("B")
