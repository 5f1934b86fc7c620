"""Servers with a bounded pool and a store of their own, and SGLang's router before two of them."""

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import requests

from benchmark.support.engine import Engine, EngineFailure
from benchmark.support.engines import parse_engine
from benchmark.support.machine import usable_cores
from benchmark.support.paths import SCRATCH
from benchmark.support.starts import START_TIMEOUT_S, wait_for_start
from sgl_pipeline.errors import ConfigurationError

STORE_VARIABLE = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV pool of a server."""

    tokens: int
    page_size: int

    @property
    def flags(self) -> str:
        return f"--max-total-tokens {self.tokens} --page-size {self.page_size}"


def tiered_engine(text: str, model: Path, port: int, pool: Pool, store: Path) -> Engine:
    """The engine that `text` names, with that pool; where `text` turns on a store of files, it lies
    in `store`.

    Raises ConfigurationError as `parse_engine`, and for an engine without `/generate`.
    """
    engine = parse_engine(
        f"{text} {pool.flags}", model, port, SCRATCH, usable_cores(), prefix_cache=True
    )
    if engine.client_backend != "sglang":
        raise ConfigurationError(f"--engine {text!r} has no /generate; name ours or sglang")
    return replace(
        engine, label=text, environment=engine.environment | {STORE_VARIABLE: str(store)}
    )


def check_pool(engine: Engine, pool: Pool) -> None:
    """Raises EngineFailure where the running server's pool is not `pool`."""
    info = requests.get(f"{engine.base_url}/get_server_info", timeout=_TIMEOUT_S).json()
    if info["max_total_num_tokens"] != pool.tokens:
        raise EngineFailure(
            f"{engine.label}: its pool has {info['max_total_num_tokens']} tokens, not {pool.tokens}"
        )


@contextlib.contextmanager
def empty_store() -> Iterator[Path]:
    """A folder beside the logs, removed with all that a server wrote into it."""
    with tempfile.TemporaryDirectory(dir=SCRATCH, prefix="store_") as folder:
        yield Path(folder)


def store_mib(store: Path) -> float:
    """The size of all files in `store`."""
    return sum(path.stat().st_size for path in store.rglob("*") if path.is_file()) / 2**20


class Router:
    """SGLang's router at `url`, unmodified, before one replica at a time."""

    def __init__(self, url: str) -> None:
        self.url = url

    def workers(self) -> list[dict[str, object]]:
        """The healthy ones."""
        reply = requests.get(f"{self.url}/workers", timeout=_TIMEOUT_S)
        return [one for one in reply.json()["workers"] if one["is_healthy"]]

    def replace_worker(self, url: str) -> None:
        """Has the replica at `url` answer, and none that did before. Returns when it is so."""
        before = self.workers()
        requests.post(
            f"{self.url}/workers", json={"url": url}, timeout=_TIMEOUT_S
        ).raise_for_status()
        _wait_until(lambda: len(self.workers()) > len(before), f"{self.url} takes no {url}")
        for one in before:
            reply = requests.delete(f"{self.url}/workers/{one['id']}", timeout=_TIMEOUT_S)
            reply.raise_for_status()
        _wait_until(
            lambda: [one["url"] for one in self.workers()] == [url], f"{self.url} keeps {before}"
        )


@contextlib.contextmanager
def router_before(replica_url: str, port: int) -> Iterator[Router]:
    """The router on the loopback `port`, its metrics on the next one, before that replica.

    Raises ConfigurationError where it is not installed, EngineFailure where it does not come up.
    """
    command = [sys.executable, "-m", "sglang_router.launch_router", "--policy", "cache_aware"]
    command += ["--worker-urls", replica_url, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(port + 1)]
    command += ["--health-check-interval-secs", "1", "--worker-startup-check-interval", "1"]
    paths = [str(router_folder()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    log_path, router = SCRATCH / "router.log", Router(f"http://127.0.0.1:{port}")
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for_start("the router", lambda: _has_worker(router), [process], log_path)
        yield router
    finally:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def router_folder() -> Path:
    """The router's place: on Python's path, or the folder of `make test-alone`."""
    spec = importlib.util.find_spec("sglang_router")
    folder = Path(spec.origin).parents[1] if spec and spec.origin else Path(sys.prefix) / "router"
    if not (folder / "sglang_router").is_dir():
        raise ConfigurationError(
            f"SGLang's router is not in {folder}; install it: "
            f"pip install --no-deps --target {folder} -r requirements/router.txt"
        )
    return folder


def _has_worker(router: Router) -> bool:
    try:
        return len(router.workers()) == 1
    except requests.ConnectionError:
        return False


def _wait_until(holds: Callable[[], bool], otherwise: str) -> None:
    """Raises EngineFailure with `otherwise` where it does not hold in time."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise EngineFailure(otherwise)
        time.sleep(0.1)
