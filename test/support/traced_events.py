"""Reads the events of a trace file that are not steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from sgl_pipeline.records.event import Event

Kind = TypeVar("Kind", bound=Event)


def read_events(path: Path, kind: type[Kind]) -> Iterator[Kind]:
    """The events of one kind, in the order in which they ended.

    Raises msgspec.ValidationError for a line of this kind that cannot be read.
    """
    decoder = msgspec.json.Decoder(dict[str, kind])  # type: ignore[valid-type]
    start = b'{"%s":' % kind.trace_key.encode()
    with open(path, "rb") as lines:
        for line in lines:
            if line.startswith(start):
                yield decoder.decode(line)[kind.trace_key]
