"""A start waits for a lost host, says so once, and not for ever."""

import pytest

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.stages.start_losses import StartLosses


def test_a_host_that_comes_back_gets_as_many_workers_as_it_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    losses = StartLosses(10.0)
    assert losses.num_wanted(are_hosts_there=False, now_s=0.0) == 0
    losses.add("host 1 is lost: silent", 1.0)
    losses.add("host 1 is lost: silent", 1.0)
    (line,) = caplog.messages
    assert "host 1 is lost" in line and "run its command again within 10 s" in line
    assert losses.num_wanted(are_hosts_there=False, now_s=10.0) == 0
    assert losses.num_wanted(are_hosts_there=True, now_s=10.5) == 2
    assert losses.num_wanted(are_hosts_there=True, now_s=11.0) == 0


def test_a_host_that_does_not_come_back_ends_the_start_by_name() -> None:
    losses = StartLosses(10.0)
    losses.add("host 1 is lost: silent", 1.0)
    with pytest.raises(ConfigurationError, match=r"host 1.* 10 s"):
        losses.num_wanted(are_hosts_there=False, now_s=11.5)


def test_the_limit_is_that_of_the_newest_loss() -> None:
    losses = StartLosses(10.0)
    losses.add("host 1 is lost: silent", 1.0)
    assert losses.num_wanted(are_hosts_there=True, now_s=2.0) == 1
    losses.add("host 1 is lost: silent", 20.0)
    assert losses.num_wanted(are_hosts_there=False, now_s=29.0) == 0
