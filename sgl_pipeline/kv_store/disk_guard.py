"""Turns saving off while the disk is full."""

import errno
import logging
import time
from collections.abc import Callable

from sgl_pipeline.errors import StoreFull
from sgl_pipeline.kv_store.store_folder import StoreFolder

logger = logging.getLogger(__name__)

MIN_FREE_BYTES = 1 << 30
PAUSE_S = 60.0
# Written bytes between two looks at the free space.
CHECK_BYTES = 64 << 20
FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)


class DiskGuard:
    """Asked before each write; one thread uses it."""

    def __init__(
        self,
        folder: StoreFolder,
        *,
        min_free_bytes: int = MIN_FREE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._min_free_bytes = min_free_bytes
        self._clock = clock
        self._unchecked_bytes = CHECK_BYTES
        self._off_until_s = float("-inf")

    def admit(self, num_bytes: int) -> None:
        """Raises StoreFull while saving is off, or where too little space is free."""
        if (left_s := self._off_until_s - self._clock()) > 0:
            raise StoreFull(f"saving is off for {left_s:.0f} s, because the disk is full")
        self._unchecked_bytes += num_bytes
        if self._unchecked_bytes >= CHECK_BYTES:
            self._unchecked_bytes = 0
            free_bytes = self._folder.free_bytes()
            if free_bytes - num_bytes < self._min_free_bytes:
                raise self.turn_off(
                    f"{free_bytes >> 20} MiB are free, {self._min_free_bytes >> 20} must be left"
                )

    def turn_off(self, reason: str) -> StoreFull:
        """Turns saving off for PAUSE_S and says so; gives the error to raise."""
        self._off_until_s = self._clock() + PAUSE_S
        self._unchecked_bytes = CHECK_BYTES
        message = (
            f"the disk of {self._folder.path} is full ({reason}): no pages are saved for "
            f"{PAUSE_S:.0f} s; make room, or give the store a smaller bound"
        )
        logger.warning("%s", message)
        return StoreFull(message)
