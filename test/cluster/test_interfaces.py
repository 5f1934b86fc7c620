"""The address by which the others reach a host: chosen for a reason, or refused with one."""

import socket
from typing import NamedTuple

import psutil
import pytest

from sgl_pipeline.cluster.interfaces import ADDRESS_VARIABLE, agent_own_address, head_own_address
from sgl_pipeline.errors import ConfigurationError


class Entry(NamedTuple):
    """What psutil has of an address, as far as it is read."""

    family: int
    address: str


@pytest.fixture(autouse=True)
def nobody_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)


def test_the_loopback_address_is_refused_on_the_head() -> None:
    with pytest.raises(ConfigurationError, match="loopback"):
        head_own_address("127.0.0.1:5000")


def test_the_loopback_address_is_no_head_of_another_host() -> None:
    with pytest.raises(ConfigurationError, match=r"loopback.*rank 0"):
        agent_own_address("127.0.0.1:5000")


def test_hosts_of_one_machine_say_that_the_loopback_is_meant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, "127.0.0.2")
    assert head_own_address("127.0.0.1:5000").interface == "lo"
    own = agent_own_address("127.0.0.1:5000")
    assert (own.host, own.interface) == ("127.0.0.2", "lo")
    assert own.reason == f"{ADDRESS_VARIABLE} names it"


def test_an_address_of_another_host_is_no_address_of_the_head() -> None:
    # 192.0.2.0/24 is for documentation (RFC 5737): no machine has it.
    with pytest.raises(ConfigurationError, match=r"\(192\.0\.2\.7\)"):
        head_own_address("192.0.2.7:5000")


def test_an_address_that_was_chosen_must_be_this_host_s_and_reachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, "192.0.2.7")
    with pytest.raises(ConfigurationError, match=rf"{ADDRESS_VARIABLE}=192\.0\.2\.7 "):
        agent_own_address("192.0.2.1:5000")
    monkeypatch.setenv(ADDRESS_VARIABLE, "127.0.0.1")
    with pytest.raises(ConfigurationError, match=r"loopback.*head"):
        agent_own_address("192.0.2.1:5000")


def test_the_route_to_the_head_decides() -> None:
    try:
        own = agent_own_address("192.0.2.1:5000")
    except ConfigurationError as error:
        assert "no route from this host to --dist-init-addr 192.0.2.1:5000" in str(error)
        return
    assert own.reason == "the route to 192.0.2.1 begins there"
    with socket.socket() as probe:
        probe.bind((own.host, 0))
    # Whoever is at that address itself cannot be another rank.
    with pytest.raises(ConfigurationError, match=r"itself.*rank 0"):
        agent_own_address(f"{own.host}:5000")


@pytest.mark.parametrize("address", ["head", "no-such-host.invalid:5000"])
def test_what_cannot_be_resolved_is_named(address: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--dist-init-addr {address}: "):
        head_own_address(address)


@pytest.mark.parametrize(
    ("address", "interface"),
    [("[2001:db8::7]:5000", "eth7"), ("[2001:DB8:0:0::7]:5000", "eth7"), ("10.9.8.7:5000", "eth8")],
)
def test_the_interface_of_an_address_of_either_family_is_found(
    monkeypatch: pytest.MonkeyPatch, address: str, interface: str
) -> None:
    found = {
        "lo": [Entry(socket.AF_INET, "127.0.0.1"), Entry(socket.AF_INET6, "::1")],
        "eth7": [Entry(socket.AF_PACKET, "02:00"), Entry(socket.AF_INET6, "2001:db8::7")],
        "eth8": [Entry(socket.AF_INET, "10.9.8.7"), Entry(socket.AF_INET6, "fe80::1%eth8")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    assert head_own_address(address).interface == interface
    with pytest.raises(ConfigurationError, match=r"2001:db8::7 \(eth7\), 10\.9\.8\.7 \(eth8\)"):
        head_own_address("[2001:db8::8]:5000")
