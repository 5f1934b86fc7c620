"""Two hosts of namespaces: only the network joins them, and nothing of them is left behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmark.hosts.bridge import add_bridge, ip
from benchmark.hosts.namespaces import ROOT, Network, hosts, remove_leftovers, why_no_hosts

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts()),
]
PORT = 9000
ECHO = f"""
import socket
with socket.create_server(("0.0.0.0", {PORT})) as server:
    while True:
        peer, _ = server.accept()
        with peer:
            while received := peer.recv(64):
                peer.sendall(received)
"""
FACTS = """
import json, os, socket, time
print(json.dumps([socket.gethostname(), os.listdir("/dev/shm"), time.monotonic(),
                  sorted(os.sched_getaffinity(0))]))
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    core = min(os.sched_getaffinity(0))
    with hosts(2, cores=[(core,), ()], clock_offsets_s=[0.0, 5000.25]) as two:
        yield two


def facts(network: Network, place: int) -> list:
    return json.loads(network.hosts[place].run(sys.executable, "-c", FACTS))


def is_answered(peer: socket.socket, seconds: float) -> bool:
    peer.settimeout(seconds)
    peer.sendall(b"x")
    try:
        return peer.recv(1) == b"x"
    except TimeoutError:
        return False


def test_a_host_has_a_name_memory_cores_and_a_clock_of_its_own(network: Network) -> None:
    mark = Path("/dev/shm", f"sglp-test-{os.getpid()}")
    mark.touch()
    try:
        before_s = time.monotonic()
        first, second = facts(network, 0), facts(network, 1)
        after_s = time.monotonic()
    finally:
        mark.unlink()
    assert (first[0], second[0]) == ("host1", "host2")
    assert first[1] == second[1] == []
    assert before_s <= first[2] <= after_s
    assert before_s <= second[2] - 5000.25 <= after_s
    assert first[3] == [min(os.sched_getaffinity(0))]


def test_hosts_are_reached_over_their_cables_alone(network: Network) -> None:
    host = network.hosts[1]
    with host.start(sys.executable, "-c", ECHO):
        while host.listeners() != [f"0.0.0.0:{PORT}"]:
            time.sleep(0.02)
        assert network.hosts[0].listeners() == []
        with socket.create_connection((host.address, PORT)) as peer:
            assert is_answered(peer, 10.0)
            host.cut_cable()
            assert not is_answered(peer, 0.3)
            host.cable(delay_ms=40.0)
            # What was lost is sent again by TCP; the answer is the one to what was asked then.
            assert is_answered(peer, 30.0)
            began_s = time.monotonic()
            peer.setblocking(True)
            peer.recv(64)
            assert is_answered(peer, 10.0)
            assert time.monotonic() - began_s >= 0.08
        host.power_off()
    assert host.listeners() == []
    host.cable()


def test_what_a_killed_test_has_left_is_removed_by_the_next(network: Network) -> None:
    code = (
        "import time\nfrom benchmark.hosts.namespaces import hosts\n"
        "with hosts(1) as network:\n"
        "    network.hosts[0].start('sh', '-c', 'sleep 600 & echo up; wait')\n"
        "    time.sleep(600)\n"
    )
    maker = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert maker.stdout is not None
    assert maker.stdout.readline() == "up\n"
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    assert remove_leftovers() == [f"sglp-{maker.pid}-1"]
    assert maker.stdout.read() == ""
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert f"sglp-{maker.pid}-" not in listed
    assert {host.namespace for host in network.hosts} <= set(listed.split())


def test_a_process_may_have_two_networks_at_once(network: Network) -> None:
    with hosts(1) as other:
        assert other.hosts[0].address not in [host.address for host in network.hosts]
        assert other.hosts[0].run("hostname") == "host1\n"
    assert network.hosts[0].run("hostname") == "host1\n"


def test_the_kernel_joins_hosts_that_are_bridged() -> None:
    with hosts(2, is_bridged=True) as network:
        first, second = network.hosts
        with second.start(sys.executable, "-c", ECHO):
            while second.listeners() != [f"0.0.0.0:{PORT}"]:
                time.sleep(0.02)
            with socket.create_connection((second.address, PORT)) as peer:
                assert is_answered(peer, 10.0)
            ask = f"import socket; socket.create_connection(('{second.address}', {PORT}), 10)"
            first.run(sys.executable, "-c", ask)
            second.power_off()
    listed = subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
    assert re.findall(rf"sglp{os.getpid()}\.\d+p", listed) == []


def test_a_bridge_that_a_killed_process_has_left_is_removed() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    name = f"sglp{ended.pid}.0"
    add_bridge(name)
    assert name in remove_leftovers()
    assert name not in ip("link")
