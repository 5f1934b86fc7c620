"""What all tests need: transformers imports on a CPU, no test takes more than one core, and none
fails because the machine is busy. A test that starts processes is marked `multiproc`: without that
mark, starting one fails, so that `make test-fast` stays in one process."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from sgl_pipeline.errors import KernelBuildError
from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim
from sgl_pipeline.pp_runner.cpu_kernels.build import find_compiler

install_torchvision_shim()
torch.set_num_threads(1)
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
SHARED_SERVERS = "test/server/shared/"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Also after a test that changed the number."""
    torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A machine with a card may have no pytest-xdist, which alone calls this."""
    from support.whole_files import WholeFiles

    return WholeFiles(config, log, SHARED_SERVERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first, so that the workers of `make test` and `make test-servers`
    end together: those that share servers, then those that start processes, then those with slow
    tests. The order is otherwise as collected.

    A machine without a C++ compiler serves through the torch path, and is tested on it.
    """
    starting, slow = (
        {item.path for item in items if item.get_closest_marker(mark)}
        for mark in ("multiproc", "slow")
    )
    items.sort(
        key=lambda item: (
            not item.nodeid.startswith(SHARED_SERVERS),
            item.path not in starting,
            item.path not in slow,
        )
    )
    try:
        find_compiler()
    except KernelBuildError as error:
        for item in items:
            if item.get_closest_marker("compiler"):
                item.add_marker(pytest.mark.skip(reason=str(error)))


_running: list[pytest.Item] = []


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _running[:] = [item]
    try:
        return (yield)
    finally:
        _running.clear()


def _watch_starts(event: str, arguments: tuple) -> None:
    """Fails a test that forks or starts a Python without the mark; `git`, compilers and the like
    are short."""
    starts = event == "os.fork" or (event == "subprocess.Popen" and arguments[0] == sys.executable)
    if starts and _running and not _running[0].get_closest_marker("multiproc"):
        pytest.fail("this test starts a process: mark it with pytest.mark.multiproc")


sys.addaudithook(_watch_starts)
