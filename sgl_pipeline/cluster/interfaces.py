"""Chooses the address at which other hosts can reach this one, and says why.

A wrong guess is what users of other engines report most: a host that names its loopback address,
or a network that the others are not in. The kernel's own route to the head decides here; an
environment variable (SGLang's) decides where several networks lead there.
"""

import ipaddress
import os
import socket
from dataclasses import dataclass

import psutil

from sgl_pipeline.cluster.doors import split_address
from sgl_pipeline.errors import ConfigurationError

ADDRESS_VARIABLE = "SGLANG_HOST_IP"


@dataclass(frozen=True, slots=True)
class OwnAddress:
    """`host` is an IP address of `interface`; `reason` says why it was chosen, in a clause."""

    host: str
    interface: str
    reason: str


def head_own_address(head_address: str) -> OwnAddress:
    """The address of rank 0: `--dist-init-addr` itself. Raises ConfigurationError where it is not
    this host's, or no other host could reach it there."""
    host = _resolve(head_address)
    if _is_loopback(host) and not _loopback_is_meant():
        raise ConfigurationError(
            f"--dist-init-addr {head_address} is the loopback address, where no other host can "
            f"reach this one; name an address of {_others_text()}"
        )
    interface = _interface_of(host)
    if interface is None:
        raise ConfigurationError(
            f"--dist-init-addr {head_address} ({host}) is not an address of this host, which has "
            f"{_others_text()}; --node-rank 0 belongs on the host that --dist-init-addr names"
        )
    return OwnAddress(host, interface, "--dist-init-addr names it")


def agent_own_address(head_address: str) -> OwnAddress:
    """The address of another rank: `SGLANG_HOST_IP`, else where the route to the head begins.

    Raises ConfigurationError where there is no route, or the head's address is this host's own.
    """
    head = _resolve(head_address)
    asked = os.environ.get(ADDRESS_VARIABLE)
    if asked:
        interface = _interface_of(asked)
        if interface is None:
            raise ConfigurationError(
                f"{ADDRESS_VARIABLE}={asked} is not an address of this host, which has "
                f"{_others_text()}"
            )
        if _is_loopback(asked) and not _is_loopback(head):
            raise ConfigurationError(
                f"{ADDRESS_VARIABLE}={asked} is the loopback address, where the head at "
                f"{head_address} cannot reach this host; name one of {_others_text()}"
            )
        return OwnAddress(asked, interface, f"{ADDRESS_VARIABLE} names it")
    if _is_loopback(head):
        raise ConfigurationError(
            f"--dist-init-addr {head_address} is this host's own loopback address, and rank 0 is "
            "another host; name an address of rank 0"
        )
    family = socket.AF_INET6 if ":" in head else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((head, 9))  # sends nothing: the kernel looks up the route
        except OSError as error:
            raise ConfigurationError(
                f"no route from this host to --dist-init-addr {head_address} ({head}): "
                f"{error.strerror}; this host has {_others_text()}"
            ) from error
        own = str(probe.getsockname()[0])
    if own == head:
        raise ConfigurationError(
            f"--dist-init-addr {head_address} is this host itself, and rank 0 is another host; "
            "name an address of rank 0, or start this one with --node-rank 0"
        )
    return OwnAddress(own, _interface_of(own) or "unknown", f"the route to {head} begins there")


def is_own_address(host: str) -> bool:
    """True if an IP address is one of this host's."""
    return _interface_of(host) is not None


def _resolve(address: str) -> str:
    try:
        name, port = split_address(address)
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (ValueError, OSError) as error:
        raise ConfigurationError(f"--dist-init-addr {address}: {error}") from error
    return str(found[0][4][0])


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _loopback_is_meant() -> bool:
    """Hosts of a test may all be this machine; then each says so."""
    return _is_loopback(os.environ.get(ADDRESS_VARIABLE) or "0.0.0.0")


def _interface_of(host: str) -> str | None:
    """The name of the interface that has an address; None when none has."""
    if _is_loopback(host):
        return "lo"
    wanted = ipaddress.ip_address(host)
    for name, address in _addresses():
        if ipaddress.ip_address(address) == wanted:
            return name
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return None
    return "unknown"


def _addresses() -> list[tuple[str, str]]:
    """Each interface and each of its IP addresses; IPv6 link-local ones have a scope (`%eth0`)."""
    return [
        (name, one.address)
        for name, entries in psutil.net_if_addrs().items()
        for one in entries
        if one.family in (socket.AF_INET, socket.AF_INET6)
    ]


def _others_text() -> str:
    outer = [f"{address} ({name})" for name, address in _addresses() if not _is_loopback(address)]
    return ", ".join(outer) or "none but the loopback address"
