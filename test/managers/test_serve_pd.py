"""One command for two servers and a router: what it starts, and how it ends."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from support.clusters import until

from sgl_pipeline.cluster.keys import FEWEST_CHARACTERS, KEY_VARIABLE
from sgl_pipeline.managers import serve_pd
from sgl_pipeline.managers.serve_pd import Group, Ports, main, router_command, server_command

pytestmark = pytest.mark.usefixtures("signals")
SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def signals() -> Iterator[None]:
    """Restores the handlers that a command replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_the_servers_share_ports_and_flags() -> None:
    ports = Ports.from_first(31000)
    command = server_command("decode", ports.decode, ports, ["--pp", "2"])
    words = """-m sgl_pipeline.launch_server --host 127.0.0.1 --port 31002
        --disaggregation-mode decode --disaggregation-bootstrap-port 31003 --pp 2"""
    assert command[1:] == words.split()


def test_the_router_knows_both_and_lets_no_breaker_open() -> None:
    command = router_command(Ports.from_first(31000), ["--log-level", "warn"])
    words = """-m sglang_router.launch_router --pd-disaggregation
        --prefill http://127.0.0.1:31001 31003 --decode http://127.0.0.1:31002
        --host 127.0.0.1 --port 31000 --prometheus-host 127.0.0.1 --prometheus-port 31004
        --policy cache_aware --disable-circuit-breaker --log-level warn"""
    assert command[1:] == words.split()


def test_the_routers_folder_comes_before_other_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "other")
    assert serve_pd.router_environment("router")["PYTHONPATH"] == f"router{os.pathsep}other"
    assert serve_pd.router_environment(None)["PYTHONPATH"] == "other"


def test_what_does_not_answer_is_not_healthy() -> None:
    assert not serve_pd.is_healthy("http://127.0.0.1:1")
    assert not serve_pd.has_both("http://127.0.0.1:1")


@pytest.mark.multiproc
def test_a_group_ends_together() -> None:
    group = Group()
    group.start(python(SLEEP), os.environ)
    assert not group.ended
    group.start(python("pass"), os.environ)
    until(lambda: group.ended)
    group.end()
    assert [process.returncode for process in group._processes] == [-signal.SIGTERM, 0]


@pytest.mark.multiproc
def test_who_does_not_end_in_time_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_pd, "_END_S", 0.1)
    group = Group()
    group.start(
        python(f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"), os.environ
    )
    time.sleep(0.3)
    group.end()
    assert group._processes[0].returncode in (-signal.SIGKILL, -signal.SIGTERM)


class _Started:
    """Commands in the place of servers and a router, and what they would have been."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *codes: str) -> None:
        self.commands: list[Sequence[str]] = []
        self.keys: list[str | None] = []
        self._codes = iter(codes)
        start = Group.start

        def start_instead(
            group: Group, command: Sequence[str], environment: dict[str, str]
        ) -> None:
            self.commands.append(command)
            self.keys.append(environment.get(KEY_VARIABLE))
            start(group, python(next(self._codes)), environment)

        monkeypatch.setattr(Group, "start", start_instead)
        monkeypatch.setattr(serve_pd, "is_healthy", lambda url: True)
        monkeypatch.setattr(serve_pd, "has_both", lambda url: True)
        monkeypatch.delenv(KEY_VARIABLE, raising=False)


@pytest.mark.multiproc
def test_roles_have_flags_of_their_own_and_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    started = _Started(monkeypatch, SLEEP, SLEEP, "pass")
    argv = [
        "--port",
        "31000",
        "--prefill=--pp 2",
        "--decode=",
        "--router=-x 1",
        "--",
        "--ui",
        "off",
    ]
    assert main(argv) == 1, "the router has ended"
    prefill, decode, router = started.commands
    assert prefill[-4:] == ["--ui", "off", "--pp", "2"] and "prefill" in prefill
    assert decode[-2:] == ["--ui", "off"] and "decode" in decode
    assert router[-2:] == ["-x", "1"]
    first, second, _ = started.keys
    assert first == second and first is not None and len(first) >= FEWEST_CHARACTERS


@pytest.mark.multiproc
def test_a_server_that_does_not_come_up_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    started = _Started(monkeypatch, "pass", SLEEP)
    monkeypatch.setattr(serve_pd, "is_healthy", lambda url: False)
    assert main([]) == 1
    assert len(started.commands) == 2


@pytest.mark.multiproc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_in_good_order(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    started = _Started(monkeypatch, SLEEP, SLEEP, SLEEP)

    def ask() -> None:
        until(lambda: len(started.commands) == 3)
        os.kill(os.getpid(), number)

    threading.Thread(target=ask).start()
    assert main([]) == 0


@pytest.mark.multiproc
def test_a_router_that_has_not_found_both_is_not_called_ready(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _Started(monkeypatch, SLEEP, SLEEP, "import time; time.sleep(0.5)")
    monkeypatch.setattr(serve_pd, "has_both", lambda url: False)
    assert main([]) == 1
    assert "Router:" not in capfd.readouterr().out
