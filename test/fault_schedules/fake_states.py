"""The states of a stage without arithmetic: what each layer knows of a request's positions so far.

They change in place as real ones do, so that a step that runs twice, or in another's slot, changes
what is drawn.
"""

from collections.abc import Mapping, Sequence

from sgl_pipeline.wire.step_order import MirroredChunk


class FakeStates:
    """`num_slots` places of each layer, with what `fake_model.attention` says of all positions that
    have been run there; 0: the model has no states."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._seen: dict[tuple[int, int], int] = {}

    def read(self, layer: int, slots: Sequence[int]) -> dict[int, int]:
        """The states of `layer` in those of `slots` that have any."""
        return {slot: self._seen[layer, slot] for slot in slots if (layer, slot) in self._seen}

    def write(self, layer: int, states: Mapping[int, int]) -> None:
        """States of another stage's slots come to the same ones."""
        self._seen.update({(layer, slot): seen for slot, seen in states.items()})

    def drop(self, layer: int) -> None:
        """The layer leaves with its states."""
        for key in [key for key in self._seen if key[0] == layer]:
            del self._seen[key]

    def before(self, layer: int, chunk: MirroredChunk) -> int | None:
        """The state before `chunk`; None where the model has none. Raises KeyError for one that
        was never begun."""
        slot = chunk.request.state_slot
        if chunk.state_source is not None:
            slot = chunk.state_source
        if not self.num_slots:
            assert slot is None, "a slot in a model without states"
            return None
        assert slot is not None and 0 <= slot < self.num_slots, f"state slot {slot}"
        return self._seen[layer, slot] if chunk.start else 0

    def keep(self, layer: int, slot: int | None, seen: int) -> None:
        """The state for `slot`, if the model has states."""
        if slot is not None:
            self._seen[layer, slot] = seen


def runs_of(chunk: MirroredChunk) -> list[tuple[int, int | None]]:
    """The position at which each run of `chunk` ends, and the slot for the state there."""
    end = chunk.start + chunk.length
    return [
        *((one.num_tokens, one.slot) for one in chunk.snapshots),
        (end, chunk.request.state_slot),
    ]


def check_slots(chunks: Sequence[MirroredChunk]) -> None:
    """Asserts that chunks could run in any order: no slot is written twice, and none is written
    with which another chunk begins."""
    written = [slot for chunk in chunks for _, slot in runs_of(chunk) if slot is not None]
    assert len(written) == len({*written}), f"a step writes to the slots {written}"
    sources = {one.state_source for one in chunks if one.state_source is not None}
    assert not sources & {*written}, f"a step reads {sources} and writes {written}"
