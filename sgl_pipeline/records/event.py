"""The base of the records of what happens to a pipeline.

`PipelineCore` keeps one list of events, its driver drains it once a turn and gives each event to
every sink: traces, metrics, the log, whoever waits for an answer. A sink has a table of the kinds
that it handles and passes over all others, so a new kind needs its record, a line in the core and
the sinks that care.
"""

from typing import ClassVar


class Event:
    """One event; each kind is a msgspec.Struct as well.

    `trace_key` is the key under which a kind has its line in a trace file. It is empty for a step,
    whose line is the record itself.
    """

    __slots__ = ()
    trace_key: ClassVar[str] = ""

    @property
    def label(self) -> str:
        """The kind's name in messages."""
        return type(self).__name__

    @property
    def is_over(self) -> bool:
        """True if this is the end of the event. A layer move is in the list twice: as it begins and
        when it is over."""
        return True
