"""Marks how far a GPU has come with what was launched."""

import torch


class StreamMark:
    """An event on the stream that is current on `device` when it is recorded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()

    def record(self) -> None:
        """Marks this point of the stream."""
        # Without a stream torch asks the driver and the environment which devices there are.
        self._event.record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        """Waits for the stream to pass the mark; returns at once when there is none."""
        self._event.synchronize()
