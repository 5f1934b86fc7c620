"""Says which rows of a step take which state further, as tensors for the layers that keep states.

A chunk's rows take its request's state from its own slot and leave it there. Where a snapshot is
taken, or the chunk begins with one, the chunk falls into runs: each begins with the state in one
slot and leaves the state after its rows in another. Shapes: C chunks, R runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.base.to_device import to_device
from sgl_pipeline.wire.step_order import MirroredChunk


@dataclass(frozen=True, slots=True, eq=False)
class StateRows:
    """The runs of a step, in row order. Chunk c has the runs `run_indptr[c]:run_indptr[c + 1]`, run
    r the rows `row_indptr[r]:row_indptr[r + 1]`; without rows it is a copy.

    A run begins with the state in its read slot, or with zeros where `starts_anew`, as at position
    0, which only a run with rows does. It may read the slot that it writes, or the one that the
    run before it in its chunk has written. No two runs write to one slot, and none reads a slot
    that another chunk writes: chunks are computed in any order.
    """

    read_slots: torch.Tensor  # int64 [R], on the stage's device
    write_slots: torch.Tensor  # int64 [R], on the stage's device
    starts_anew: torch.Tensor  # bool [R], on the stage's device
    row_indptr: torch.Tensor  # int32 [R + 1], on the host
    run_indptr: torch.Tensor  # int32 [C + 1], on the host

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """All of them, no two at one address, in one order."""
        return (
            self.read_slots,
            self.write_slots,
            self.starts_anew,
            self.row_indptr,
            self.run_indptr,
        )


def state_rows(
    chunks: Sequence[MirroredChunk], query_indptr: np.ndarray, device: torch.device
) -> StateRows | None:
    """The runs of `chunks`, of which chunk c has the rows `query_indptr[c]:query_indptr[c + 1]`;
    None where requests have no state slots.

    Raises ProtocolError where only some requests have one, where a slot would be written twice, and
    where a chunk begins with a snapshot whose slot the step writes.
    """
    own = [chunk.request.state_slot for chunk in chunks]
    slots = [slot for slot in own if slot is not None]
    if not slots:
        return None
    if len(slots) < len(own):
        raise ProtocolError(f"the chunks of a step have the state slots {own}")
    reads, writes, begins = slots, slots.copy(), query_indptr[:-1].tolist()
    run_indptr = np.arange(len(chunks) + 1, dtype=np.int32)
    # From the last one on, so that the places of those before stay what they are.
    for index in reversed(range(len(chunks))):
        chunk = chunks[index]
        if chunk.state_source is not None or chunk.snapshots:
            reads[index : index + 1], writes[index : index + 1], places = _runs(chunk, slots[index])
            begins[index : index + 1] = [begins[index] + place for place in places]
            run_indptr[index + 1 :] += len(chunk.snapshots)
    _check(chunks, writes)
    starts_anew = np.zeros(len(reads), np.bool_)
    starts_anew[run_indptr[:-1]] = [chunk.start == 0 for chunk in chunks]
    return StateRows(
        to_device(np.array(reads, np.int64), device),
        to_device(np.array(writes, np.int64), device),
        to_device(starts_anew, device),
        torch.from_numpy(np.array([*begins, query_indptr[-1]], np.int32)),
        torch.from_numpy(run_indptr),
    )


def _runs(chunk: MirroredChunk, own: int) -> tuple[list[int], list[int], list[int]]:
    """The read slots and the write slots of the runs of `chunk`, whose request has the slot `own`,
    and the row of the chunk with which each begins."""
    first = own if chunk.state_source is None else chunk.state_source
    slots = [snapshot.slot for snapshot in chunk.snapshots]
    begins = [0, *(snapshot.num_tokens - chunk.start for snapshot in chunk.snapshots)]
    return [first, *slots], [*slots, own], begins


def _check(chunks: Sequence[MirroredChunk], write_slots: Sequence[int]) -> None:
    written = {*write_slots}
    if len(written) < len(write_slots):
        raise ProtocolError(f"the chunks of a step write to the state slots {[*write_slots]}")
    sources = [chunk.state_source for chunk in chunks if chunk.state_source in written]
    if sources:
        raise ProtocolError(
            f"a step writes to the state slots {sources}, with which chunks of it begin"
        )
