"""Hands every event that is over to the writers of `--trace-path`, `--trace-steps` and profiles."""

import logging
from collections.abc import Iterable

from sgl_pipeline.records.event import Event
from sgl_pipeline.records.trace import EventWriter

logger = logging.getLogger(__name__)


class TraceFiles:
    """The writers of one server; those of profiles come and go."""

    def __init__(self, writers: Iterable[EventWriter] = ()) -> None:
        self._writers = list(writers)

    def add(self, writer: EventWriter) -> None:
        """`writer` gets the events that end from now on."""
        self._writers.append(writer)

    def remove(self, writer: EventWriter) -> None:
        """Closes `writer`, unless a full disk has ended it already."""
        if writer in self._writers:
            self._writers.remove(writer)
            writer.close()

    def on(self, event: Event) -> None:
        """Writes `event` to all, if it is over. A full disk ends one trace, not the server."""
        if not event.is_over:
            return
        for writer in tuple(self._writers):
            try:
                writer.write(event)
                writer.flush()
            except OSError as error:
                logger.error("the trace ends with %s: %s", event.label, error)
                self._writers.remove(writer)

    def close(self) -> None:
        for writer in tuple(self._writers):
            self.remove(writer)
