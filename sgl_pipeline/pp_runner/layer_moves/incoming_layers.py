"""The layers that come from one other stage: their pages arrive while the old plan's steps run.

After the switch a step that reaches one of the layers waits for the last parcel; no step before it
waits.
"""

import time
from collections.abc import Sequence
from typing import Generic

from sgl_pipeline.pp_runner.layer_moves.move_site import MoveSite, PageReceiver, R, StageGone

# Seconds of one look for a parcel in a step that waits.
_WAIT_S = 0.2


class IncomingLayers(Generic[R]):
    """`has_all` once the last parcel was written; a step waited `wait_s` for it."""

    def __init__(self, layers: Sequence[int], site: MoveSite[R], receiver: PageReceiver[R]) -> None:
        self.layers = tuple(layers)
        self.has_all = False
        self.wait_s = 0.0
        self._site = site
        self._receiver = receiver
        self._is_gone = False

    def work(self, timeout_s: float = 0.0) -> bool:
        """Takes one parcel, if there is one within `timeout_s`. The layers are held."""
        if self.has_all or self._is_gone:
            return False
        try:
            parcel = self._receiver.receive(timeout_s)
        except StageGone:
            self._is_gone = True  # an AbandonMove is on its way, or the source has died
            return False
        if parcel is None:
            return False
        if parcel.rows is not None:
            self._site.write(parcel.rows)
        if parcel.is_last:
            self.has_all = True
            self.close()
        return True

    def wait(self) -> None:
        """Returns when everything is there; to be called after the switch.

        Raises what `MoveSite.attend` does, which ends a step whose pages will never come: their
        source has gone before it sent everything.
        """
        started_s = time.monotonic()
        while not self.has_all:
            self._site.attend(_WAIT_S if self._is_gone else 0.0)
            self.work(_WAIT_S)
        self.wait_s += time.monotonic() - started_s

    def close(self) -> None:
        self._receiver.close()
