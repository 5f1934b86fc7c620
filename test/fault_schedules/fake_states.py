"""The states of a stage without arithmetic: what each layer knows of a request's positions so far.

They change in place as real ones do, so that a step that runs twice, or in another's slot, changes
what is drawn.
"""

from sgl_pipeline.wire.step_order import MirroredChunk


class FakeStates:
    """`num_slots` places of each layer, with what `fake_model.attention` says of all positions that
    have been run there; 0: the model has no states."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._seen: dict[tuple[int, int], int] = {}

    def before(self, layer: int, chunk: MirroredChunk) -> int | None:
        """The state before `chunk`; None where the model has none. Raises KeyError for one that
        was never begun."""
        slot = chunk.request.state_slot
        if not self._num_slots:
            assert slot is None, "a slot in a model without states"
            return None
        assert slot is not None and 0 <= slot < self._num_slots, f"state slot {slot}"
        return self._seen[layer, slot] if chunk.start else 0

    def keep(self, layer: int, chunk: MirroredChunk, seen: int) -> None:
        """The state after `chunk`."""
        if chunk.request.state_slot is not None:
            self._seen[layer, chunk.request.state_slot] = seen
