"""A worker is asked of the host that lacks most of its share."""

from sgl_pipeline.pipeline.host_choice import HostLoad, choose_host


def test_the_host_that_lost_a_worker_is_asked_for_another() -> None:
    assert choose_host([HostLoad(0, 2, 2), HostLoad(1, 2, 1), HostLoad(2, 1, 1)]) == 1


def test_where_none_lacks_any_the_one_with_least_beyond_its_share_is_asked() -> None:
    assert choose_host([HostLoad(0, 1, 2), HostLoad(2, 3, 3)]) == 2
    assert choose_host([HostLoad(0, 1, 1), HostLoad(1, 2, 2)]) == 0


def test_a_host_that_is_back_is_asked_before_one_that_took_over() -> None:
    assert choose_host([HostLoad(0, 1, 2), HostLoad(1, 1, 0)]) == 1
