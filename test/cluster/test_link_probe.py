"""A probe of a link to this very host, whose clock is known, and of ends that do not answer."""

import threading
from pathlib import Path

import pytest
from support.clusters import accept, host_directory, open_port

from sgl_pipeline.cluster.doors import Door
from sgl_pipeline.cluster.link_probe import PROBE_DOOR, ProbeFailed, answer_probe, probe_link


def test_a_probe_measures_delay_and_rate_and_finds_its_own_clock(tmp_path: Path) -> None:
    directory = host_directory(tmp_path / "host")
    with open_port(directory) as (address, _):
        door = Door(directory, PROBE_DOOR)
        answers = threading.Thread(target=lambda: answer_probe(accept(door), directory))
        answers.start()
        reading = probe_link(address, directory, 0.2)
        answers.join()  # it ends with the connection
        door.close()
    assert 0.0 < reading.median_ms <= reading.worst_ms
    assert reading.gbit_per_s > 0.0
    assert abs(reading.offset_s) <= reading.error_s


def test_a_host_without_a_doctor_is_named(tmp_path: Path) -> None:
    directory = host_directory(tmp_path / "host")
    with open_port(directory) as (address, _), pytest.raises(ProbeFailed, match=address):
        probe_link(address, directory, 0.2)


def test_an_end_that_never_answers_does_not_hold_a_probe_up(tmp_path: Path) -> None:
    directory = host_directory(tmp_path / "host")
    with open_port(directory) as (address, _):
        door = Door(directory, PROBE_DOOR)
        with pytest.raises(ProbeFailed, match=r"not over after 0\.2 s"):
            probe_link(address, directory, 0.1, limit_s=0.2)
        accept(door).close()
        door.close()
