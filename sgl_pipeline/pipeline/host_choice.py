"""Chooses the host that is asked for the next worker. Pure functions."""

from collections.abc import Sequence
from typing import NamedTuple


class HostLoad(NamedTuple):
    """A present host: the number of workers that it starts with, and of those that it has or was
    asked for."""

    rank: int
    share: int
    num_workers: int


def choose_host(hosts: Sequence[HostLoad]) -> int:
    """The rank of the host that lacks most of its share; if none lacks any, of the host with the
    least beyond it. The first of equals."""
    return max(hosts, key=lambda host: (host.share - host.num_workers, -host.rank)).rank
