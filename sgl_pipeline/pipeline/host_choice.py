"""Chooses the host that is asked for the next worker. Pure functions."""

from collections.abc import Sequence
from typing import NamedTuple


class HostLoad(NamedTuple):
    """A host that is there: how many workers it starts with, and how many it has or was asked
    for."""

    rank: int
    share: int
    num_workers: int


def choose_host(hosts: Sequence[HostLoad]) -> int:
    """The rank of the host that lacks most of its share; where none lacks any, the one that has
    least beyond it. The first of equals."""
    return max(hosts, key=lambda host: (host.share - host.num_workers, -host.rank)).rank
