"""The attention of steps with rows whose keys and values are on other servers.

The other rows of a layer are attended here, meanwhile. The keys and values of the offloaded rows
are taken from their places in this stage's pages, into which the kernels have put them as those of
all rows: so a peer writes the bytes that it would have computed.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sgl_pipeline.pp_runner.attention.attention_backend import AttentionBackend, LayerwiseAttention
from sgl_pipeline.pp_runner.base.kv_format import head_dim_of
from sgl_pipeline.pp_runner.base.step_inputs import LentRows, PagedLayout, StepInputs
from sgl_pipeline.pp_runner.lent_attention.executor_stream import ExecutorStream
from sgl_pipeline.pp_runner.lent_attention.peer_rows import PeerRows
from sgl_pipeline.wire.attention_messages import LeasedChunk, PlanAttention, attention_address
from sgl_pipeline.wire.lease_orders import OffloadedWork
from sgl_pipeline.wire.store_orders import PeerPlace


@dataclass(slots=True, eq=False)
class _Step:
    """The step under way; the fields behind `parts` are those of `OffloadedWork`."""

    first_row: int
    parts: list[PeerRows]
    num_layers: int
    local_tokens: int
    remote_tokens: int
    local_s: float = 0.0
    remote_s: float = 0.0
    trip_s: float = 0.0
    wait_s: float = 0.0

    def work(self) -> OffloadedWork:
        return OffloadedWork(
            self.num_layers,
            self.local_tokens,
            self.remote_tokens,
            self.local_s,
            self.remote_s,
            self.trip_s,
            self.wait_s,
        )


class OffloadedAttention:
    """A `LayerwiseAttention`: `begin`, then `plan`, before the layers of such a step, `end` behind
    them.

    Args:
        local: the attention of the other rows.
        run_directory: where the keys are.
    """

    def __init__(self, local: LayerwiseAttention, run_directory: str) -> None:
        self._local, self._run_directory = local, run_directory
        self._peers: dict[str, PeerPlace] = {}  # by name
        self._streams: dict[str, ExecutorStream] = {}  # by address
        self._step: _Step | None = None

    def use(self, peers: Iterable[PeerPlace]) -> None:
        """Finds leases at the stages of `peers` from now on, and at no others."""
        self._peers = {peer.name: peer for peer in peers}
        addresses = {
            attention_address(stage.address)
            for peer in self._peers.values()
            for stage in peer.stages
        }
        for address in self._streams.keys() - addresses:
            self._streams.pop(address).close()

    def begin(self, inputs: StepInputs, layers: range) -> None:
        """Tells the peers of a step with offloaded rows, which will run `layers`."""
        lent, layout = inputs.lent, inputs.layout
        assert lent is not None
        local_lengths = np.diff(layout.query_indptr.numpy()).astype(np.int64)
        local_starts = layout.kv_lengths.numpy() - local_lengths
        starts = np.array([chunk.start for chunk in lent.chunks], np.int64)
        lengths = np.array([chunk.length for chunk in lent.chunks], np.int64)
        self._step = step = _Step(
            lent.first_row,
            [*self._parts(lent, inputs.slots[lent.first_row :].numpy(), layers)],
            len(layers),
            _num_attended(local_starts, local_lengths),
            _num_attended(starts, lengths),
        )
        for part in step.parts:
            part.announce(layers)

    def plan(self, layout: PagedLayout) -> None:
        """See `LayerwiseAttention.plan`."""
        self._local.plan(layout)

    def of(self, layer: int) -> AttentionBackend:
        """See `LayerwiseAttention.of`."""
        return _OffloadedLayer(self, layer, self._local.of(layer))

    def end(self) -> tuple[OffloadedWork, tuple[int, ...]]:
        """The work of the step that has run, and the numbers of its leases that were lost."""
        step, self._step = self._step, None
        assert step is not None
        return step.work(), tuple(lease for part in step.parts for lease in part.lost)

    def close(self) -> None:
        """Ends all streams."""
        self.use(())

    def attend(
        self,
        layer: int,
        local: AttentionBackend,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`; `local` attends to the other rows. Those of lost leases
        become zeros."""
        step = self._step
        assert step is not None, "attend before begin"
        first, pages = step.first_row, (key_pages, value_pages)
        output = query.new_zeros(*query.shape[:2], head_dim_of(value_pages))
        sent_s = time.monotonic()
        asked = [one for one in step.parts if one.send(layer, query[first:], pages, sinks)]
        began_s = time.monotonic()
        if first:
            output[:first] = local.attend(query[:first], *pages, sinks)
        attended_s = time.monotonic()
        step.remote_s += sum(part.receive(layer, output[first:]) for part in asked)
        done_s = time.monotonic()
        step.local_s += attended_s - began_s
        step.trip_s += done_s - sent_s
        step.wait_s += done_s - attended_s
        return output

    def _parts(
        self, lent: LentRows, slots: npt.NDArray[np.int64], layers: range
    ) -> Iterator[PeerRows]:
        """The offloaded rows of a step, whose places here are `slots`, by peer."""
        chunks: dict[str, list[LeasedChunk]] = {}
        rows: dict[str, list[npt.NDArray[np.int64]]] = {}
        row = 0
        for chunk in lent.chunks:
            lease, end = chunk.request.lease, row + chunk.length
            assert lease is not None
            leased = LeasedChunk(lease.number, chunk.start, chunk.length)
            chunks.setdefault(lease.source, []).append(leased)
            rows.setdefault(lease.source, []).append(np.arange(row, end))
            row = end
        for name in chunks:
            peer, at = self._peers.get(name), np.concatenate(rows[name])
            ways = {} if peer is None else self._ways(peer, layers)
            plan = PlanAttention("" if peer is None else peer.digest, tuple(chunks[name]))
            yield PeerRows(name, plan, at, slots[at], ways)

    def _ways(self, peer: PeerPlace, layers: range) -> dict[int, ExecutorStream]:
        """The streams to the peer's stages that have some of `layers`, by layer."""
        ways = {}
        for stage in peer.stages:
            address = attention_address(stage.address)
            for layer in range(*stage.layers):
                if layer in layers:
                    if address not in self._streams:
                        self._streams[address] = ExecutorStream(address, self._run_directory)
                    ways[layer] = self._streams[address]
        return ways


@dataclass(frozen=True, slots=True)
class _OffloadedLayer:
    """The `AttentionBackend` of a layer, for one step."""

    step: OffloadedAttention
    layer: int
    local: AttentionBackend

    def plan(self, layout: PagedLayout) -> None:
        self.local.plan(layout)

    def attend(
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        return self.step.attend(self.layer, self.local, query, key_pages, value_pages, sinks)


def _num_attended(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> int:
    """Pairs of a row and a token up to its own, of chunks from positions `starts` on."""
    return int((lengths * starts + lengths * (lengths + 1) // 2).sum())
