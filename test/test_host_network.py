"""Hosts and links on paper: what a file may say, and what it is told about its faults."""

from pathlib import Path

import pytest
from support.malformed_data import JSON

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.host_network import HostNetwork, read_host_network

GOOD = """{"hosts": [{"name": "a", "stages": 2}, {"name": "b", "speed": 0.5}, {"name": "c"}],
  "link": {"gbit_per_s": 10, "delay_ms": 0.1},
  "links": [{"between": ["c", "a"], "gbit_per_s": 1, "delay_ms": 4}]}"""


def read(tmp_path: Path, text: str) -> HostNetwork:
    path = tmp_path / "hosts.json"
    path.write_text(text)
    return read_host_network(path)


def test_links_are_found_by_hosts_whatever_their_order(tmp_path: Path) -> None:
    network = read(tmp_path, GOOD)
    assert network.num_stages == 4
    assert network.host_of_stage == (0, 0, 1, 2)
    assert network.stage_slowness == (1.0, 1.0, 2.0, 1.0)
    named, usual = network.between(0, 2), network.between(0, 1)
    assert named is not None
    assert usual is not None
    assert network.between(2, 0) == named
    assert network.between(1, 1) is None
    # 125,000 bytes are a megabit.
    assert (named.busy_ms(125_000), named.transfer_ms(125_000)) == (1.0, 5.0)
    assert usual.transfer_ms(125_000) == pytest.approx(0.2)
    turned = network.ordered((0, 2, 1))
    assert [host.name for host in turned.hosts] == ["a", "c", "b"]
    assert turned.between(0, 1) == named


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"stages": 2', '"stages": 0', "host a needs stages of 1 or more"),
        ('"speed": 0.5', '"speed": 0', "host b needs .* a speed above 0"),
        ('"name": "c"', '"name": "b"', "a name of its own"),
        ('["c", "a"]', '["x", "a"]', "links name x, which is none of the hosts"),
        ('["c", "a"]', '["a", "a"]', "joins a with itself"),
        ('"delay_ms": 4', '"delay_ms": -4', "delay_ms of 0 or more"),
        ('"gbit_per_s": 10', '"gbit_per_s": 0', "gbit_per_s above 0"),
        ('"gbit_per_s": 10', '"gbit": 10', "unknown field `gbit`"),
        ('"link": {"gbit_per_s": 10, "delay_ms": 0.1},', "", "no link joins a and b"),
        ("{", "", "hosts.json"),
    ],
)
def test_a_fault_is_named_with_its_file(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigurationError, match=message) as caught:
        read(tmp_path, GOOD.replace(old, new, 1))
    assert "hosts.json" in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read .*nowhere\.json"):
        read_host_network(tmp_path / "nowhere.json")


@pytest.mark.parametrize("kind", JSON)
def test_a_file_that_cannot_be_decoded_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "hosts.json"
    path.write_bytes(JSON[kind])
    with pytest.raises(ConfigurationError, match=r"hosts\.json: "):
        read_host_network(path)
