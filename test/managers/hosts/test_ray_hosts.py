"""What Ray is asked for, and what is said where it cannot: with a stand-in for the module `ray`.

`test/cluster/test_live_hosts.py` is with Ray itself.
"""

import importlib.util
import os
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from sgl_pipeline import __version__
from sgl_pipeline.args import ClusterArgs
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.hosts import ray_hosts
from sgl_pipeline.managers.hosts.early_options import read_early_options
from sgl_pipeline.managers.hosts.ray_driver import RayDriver, ray_setup
from sgl_pipeline.managers.hosts.ray_hosts import HostAgent, RayHosts, RaySetup

SECRET = b"0123456789abcdef0123456789abcdef"
HERE, ELSEWHERE = "127.0.0.1", ("203.0.113.1", "203.0.113.2", "203.0.113.3")
FACTS = ("node", platform.python_version(), __version__)
ARGV = "--nnodes 3 --node-rank 0 --dist-init-addr 198.51.100.1:25000 --use-ray --pp 4"


class Lost(Exception):
    """As `ray.exceptions.RayError`."""


class Unavailable(Lost):
    """As `ray.exceptions.ActorUnavailableError`."""


class FakeRay:
    """Nodes by address; `facts` of actors by rank, and how their agents end: None as long as they
    run, an exception where the actor is lost."""

    def __init__(self, *addresses: str, cpus: float = 8.0) -> None:
        self.addresses = list(addresses)
        self.cpus = cpus
        self.is_placed = True
        self.facts: dict[int, Any] = {}
        self.actors: list[FakeActor] = []
        self.groups: list[Any] = []
        self.killed: list[FakeActor] = []
        self.exceptions = SimpleNamespace(RayError=Lost, ActorUnavailableError=Unavailable)
        schedule = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda *place: place)
        self.util = SimpleNamespace(
            placement_group=self._placement_group,
            remove_placement_group=self.groups.remove,
            scheduling_strategies=schedule,
        )

    def nodes(self) -> list[dict[str, Any]]:
        alive = [
            {"Alive": True, "NodeManagerAddress": one, "Resources": {"CPU": self.cpus}}
            for one in self.addresses
        ]
        return [*alive, {"Alive": False, "NodeManagerAddress": "203.0.113.9", "Resources": {}}]

    def _placement_group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        group = SimpleNamespace(bundles=bundles, strategy=strategy, wait=lambda _: self.is_placed)
        self.groups.append(group)
        return group

    def remote(self, actor_class: type) -> Any:
        assert actor_class is HostAgent

        def options(**chosen: Any) -> Any:
            return SimpleNamespace(remote=lambda: FakeActor(self, **chosen))

        return SimpleNamespace(options=options)

    def wait(
        self, calls: list["FakeCall"], num_returns: int, timeout: float
    ) -> tuple[list["FakeCall"], list["FakeCall"]]:
        assert num_returns == len(calls) > 0
        done = [call for call in calls if call.answer is not None]
        return done, [call for call in calls if call.answer is None]

    def get(self, call: "FakeCall") -> Any:
        if isinstance(call.answer, Exception):
            raise call.answer
        return call.answer

    def kill(self, actor: "FakeActor") -> None:
        self.killed.append(actor)


class FakeCall:
    def __init__(self, answer: Any) -> None:
        self.answer = answer


class FakeActor:
    def __init__(self, ray: FakeRay, num_cpus: int, scheduling_strategy: Any) -> None:
        group, self.bundle = scheduling_strategy
        assert group is ray.groups[0]
        assert group.bundles[self.bundle] == {"CPU": num_cpus}
        self.rank = self.bundle + (len(group.bundles) == 2)
        self.runs: list[FakeCall] = []
        self.arguments: list[tuple[Any, ...]] = []
        self.facts = SimpleNamespace(remote=lambda: FakeCall(ray.facts.get(self.rank, FACTS)))
        self.run = SimpleNamespace(remote=self._run)
        ray.actors.append(self)

    def _run(self, *arguments: Any) -> FakeCall:
        self.arguments.append(arguments)
        self.runs.append(FakeCall(None))
        return self.runs[-1]


def setup(wait_s: float = 0.0) -> RaySetup:
    return RaySetup("auto", wait_s, [1, 2], [["--node-rank", "1"], ["--node-rank", "2"]], SECRET)


def hosts_of(ray: FakeRay, is_over: Callable[[], bool] = lambda: False) -> RayHosts:
    return RayHosts(ray, setup(), is_over)


def test_a_head_outside_has_a_node_for_each_other_host() -> None:
    ray = FakeRay(*ELSEWHERE)
    hosts_of(ray).place()
    (group,) = ray.groups
    assert (group.bundles, group.strategy) == ([{"CPU": 1}, {"CPU": 2}], "STRICT_SPREAD")
    assert [actor.bundle for actor in ray.actors] == [0, 1]


def test_a_head_on_a_node_keeps_the_others_away_from_it() -> None:
    ray = FakeRay(*ELSEWHERE, HERE)
    hosts_of(ray).place()
    (group,) = ray.groups
    assert group.bundles == [{f"node:{HERE}": 0.001}, {"CPU": 1}, {"CPU": 2}]
    assert [actor.bundle for actor in ray.actors] == [1, 2]


def test_the_key_is_an_argument_of_a_call_to_a_node_that_has_said_what_it_runs() -> None:
    ray = FakeRay(*ELSEWHERE)
    hosts_of(ray).place()
    expected = [[(["--node-rank", str(rank)], SECRET)] for rank in (1, 2)]
    assert [actor.arguments for actor in ray.actors] == expected


@pytest.mark.parametrize(
    ("addresses", "cpus", "words"),
    [
        (
            ELSEWHERE[:1],
            8.0,
            r"needs 2 of Ray.s nodes, .* with 2 CPUs each, .* 1 \(1 of any size\)",
        ),
        ((HERE, ELSEWHERE[0]), 8.0, r"Ray has 1 \(1 of any size\)"),
        (ELSEWHERE, 1.0, r"Ray has 0 \(3 of any size\)"),
        (ELSEWHERE, 8.0, "nodes are busy"),
    ],
)
def test_nodes_that_are_missing_or_busy_are_named(
    addresses: tuple[str, ...], cpus: float, words: str
) -> None:
    ray = FakeRay(*addresses, cpus=cpus)
    ray.is_placed = False
    with pytest.raises(ConfigurationError, match=words):
        hosts_of(ray).place()


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (("n", "3.9.1", __version__), r"host 2: Ray's node n runs Python 3\.9\.1, the head"),
        (("n", platform.python_version(), "0.0.0"), r"n runs sgl_pipeline 0\.0\.0, the head"),
        (("n", platform.python_version(), ""), "n has no sgl_pipeline, the head"),
        (Lost("The actor died.\nmany\nlines"), r"host 2: its actor is lost \(The actor died\)"),
    ],
)
def test_a_node_that_does_not_fit_is_named_and_gets_no_key(facts: Any, words: str) -> None:
    ray = FakeRay(*ELSEWHERE)
    ray.facts[2] = facts
    with pytest.raises(ConfigurationError, match=words):
        hosts_of(ray).place()
    assert ray.actors[1].arguments == []


def test_an_actor_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(*ELSEWHERE)
    monkeypatch.setattr(FakeRay, "wait", lambda _, calls, **more: ([], calls))
    with pytest.raises(ConfigurationError, match=r"host 1, 2.*--ray-wait-s"):
        hosts_of(ray).place()


def test_a_server_that_ends_meanwhile_waits_for_nothing() -> None:
    ray = FakeRay(*ELSEWHERE)
    ray.is_placed = False
    hosts = RayHosts(ray, setup(wait_s=60.0), lambda: True)
    with pytest.raises(KeyboardInterrupt):
        hosts.place()
    hosts.end()
    assert ray.groups == []


def test_a_lost_agent_is_asked_for_again_and_a_dismissed_one_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_hosts, "RETRY_S", 0.0)
    ray = FakeRay(*ELSEWHERE)
    endings = [
        lambda: setattr(ray.actors[0].runs[0], "answer", Lost("The node has died.")),
        lambda: setattr(ray.actors[1].runs[0], "answer", (0, "the head says: the server ended")),
        lambda: setattr(ray.actors[2].runs[0], "answer", (1, "error: no such model")),
        lambda: None,
        lambda: None,
    ]

    def is_over() -> bool:
        if endings and (len(ray.actors) < 2 or not ray.actors[-1].runs):
            return False  # until the newest has been started
        if endings:
            endings.pop(0)()
        return not endings

    hosts = RayHosts(ray, setup(), is_over)
    hosts.place()
    hosts.keep()
    assert [actor.bundle for actor in ray.actors] == [0, 1, 0, 0]
    assert all(len(actor.arguments) == 1 for actor in ray.actors)
    assert ray.killed == [ray.actors[0], ray.actors[2]]
    assert "host 1: its actor is lost (The node has died); Ray is asked" in caplog.text
    assert "exit code 1: error: no such model" in caplog.text
    hosts.end()
    assert ray.killed[2:] == [ray.actors[3], ray.actors[1]]
    assert ray.groups == []


def test_an_actor_that_is_out_of_reach_keeps_its_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_hosts, "RETRY_S", 0.0)
    ray = FakeRay(*ELSEWHERE)

    def is_over() -> bool:
        if len(ray.actors) == 2 and len(ray.actors[0].runs) == 1:
            ray.actors[0].runs[0].answer = Unavailable("not now")
        return len(ray.actors) == 2 and len(ray.actors[0].runs) == 2

    hosts = RayHosts(ray, setup(), is_over)
    hosts.place()
    hosts.keep()
    assert len(ray.actors) == 2
    assert ray.killed == []


def test_agents_get_what_they_need_of_the_command_line_and_no_more(tmp_path: Path) -> None:
    model = ["--model-path", str(tmp_path / "." / "x" / ".."), "--revision", "main"]
    (tmp_path / "x").mkdir()
    more = ["--api-key", "secret", "--cpu-threads-per-stage", "3", "--host-silence-s", "9"]
    more += ["--load-format", "dummy"]
    options = read_early_options([*ARGV.split(), *model, *more, "--cluster-key-file", "file"])
    assert options is not None
    asked = ray_setup(options, SECRET)
    assert asked.cpus == [3, 6]  # of four stages the head has one
    for rank, flags in enumerate(asked.flags, 1):
        agent = read_early_options(flags)
        assert agent is not None
        assert agent.cluster == ClusterArgs(
            num_hosts=3, rank=rank, head_address="198.51.100.1:25000", silence_s=9.0
        )
        assert (agent.model, agent.revision) == (str(tmp_path), "main")
        assert agent.load_format == "dummy"
        assert "secret" not in flags


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--use-ray", "start with --nnodes 2 or more"),
        (f"{ARGV} --node-rank 1", "one command starts all hosts"),
        (f"{ARGV} --ray-wait-s 0", "--ray-wait-s 0.0 must be"),
    ],
)
def test_flags_that_do_not_go_together(argv: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        read_early_options(argv.split())


def driver(tmp_path: Path) -> RayDriver:
    options = read_early_options(ARGV.split())
    assert options is not None
    return RayDriver(options, SECRET, str(tmp_path))


def test_without_ray_one_line_says_how_to_install_it(tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is not None:
        pytest.skip("Ray is installed here")
    with pytest.raises(ConfigurationError, match=r"pip install 'sgl_pipeline\[ray\]'"):
        driver(tmp_path)


@pytest.fixture
def ray_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The source of a module `ray` for the driver's own process."""
    package = tmp_path / "ray"
    package.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("RAY_ADDRESS", "203.0.113.1:6379")
    return package / "__init__.py"


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("error", "times"), [("ConnectionError", 1), ("ConnectionAbortedError", 4)]
)
def test_a_cluster_that_is_not_there_is_named(
    error: str, times: int, ray_package: Path, tmp_path: Path
) -> None:
    """A client server that aborts is asked again."""
    asked = tmp_path / "asked"
    ray_package.write_text(
        f"def init(**more):\n    print('noise')\n    open({str(asked)!r}, 'a').write('x')\n"
        f"    raise {error}('no\\nGCS')\n"
    )
    started = driver(tmp_path)
    words = r"no Ray cluster at '203\.0\.113\.1:6379': no GCS; start one with `ray start`"
    with pytest.raises(ConfigurationError, match=words):
        started.wait_until_placed()
    started.close()
    assert asked.read_text() == "x" * times


@pytest.mark.multiproc
def test_a_driver_that_dies_is_named_and_shows_no_key(ray_package: Path, tmp_path: Path) -> None:
    ray_package.write_text(
        "import os, time\ndef init(**more):\n    time.sleep(1)\n    os._exit(7)\n"
    )
    started = driver(tmp_path)
    (process,) = [
        one
        for one in psutil.process_iter(["cmdline"])
        if "sgl_pipeline.managers.hosts.ray_hosts" in (one.info["cmdline"] or ())
        and one.environ().get("TMPDIR") == str(tmp_path)
    ]
    seen = " ".join([*process.cmdline(), *process.environ().values()])
    assert "ray_hosts" in seen
    assert SECRET.decode() not in seen
    with pytest.raises(ConfigurationError, match="Ray driver"):
        started.wait_until_placed()
    started.close()


@pytest.mark.multiproc
def test_a_driver_that_is_lost_is_replaced(
    ray_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sgl_pipeline.managers.hosts import ray_driver

    monkeypatch.setattr(ray_driver, "_RESTART_S", 0.0)
    ray_package.write_text(
        "import pathlib, os\n"
        f"def init(**more):\n    path = pathlib.Path({str(tmp_path)!r}, str(os.getpid()))\n"
        "    path.with_suffix('.started').touch()\n    os._exit(1)\n"
    )
    started = driver(tmp_path)
    started.keep()
    deadline_s = time.monotonic() + 30
    while len([*tmp_path.glob("*.started")]) < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    started.close()


@pytest.mark.multiproc
def test_an_agent_gets_its_key_through_a_pipe_and_says_why_it_ends(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_HOST_IP", "127.0.0.1")
    monkeypatch.delenv("SGL_PIPELINE_CLUSTER_KEY", raising=False)
    flags = "--nnodes 2 --node-rank 1 --dist-init-addr 127.0.0.2:9".split()
    endings: list[tuple[int, str]] = []
    running = threading.Thread(target=lambda: endings.append(HostAgent().run(flags, SECRET)))
    running.start()
    seen, text = "", ""
    deadline_s = time.monotonic() + 30
    while "waiting for the head" not in text:
        assert time.monotonic() < deadline_s and not endings, (endings, text)
        text += capfd.readouterr().err
        time.sleep(0.05)
    (agent,) = [one for one in psutil.Process().children() if "/dev/stdin" in one.cmdline()]
    seen = " ".join([*agent.cmdline(), *agent.environ().values()])
    agent.terminate()
    running.join(30)
    assert SECRET.decode() not in seen + text
    ((code, last),) = endings
    assert code == 130
    assert "waiting for the head" in last
    code, last = HostAgent().run([*flags, "--model-path", "nowhere/at all"], SECRET)
    assert (code, "--model-path nowhere/at all does not exist" in last) == (1, True)


def test_an_actor_says_what_its_node_runs() -> None:
    assert HostAgent().facts()[1:] == FACTS[1:]
