"""The servers that a benchmark compares: how each is started, waited for and ended.

An engine is written `ours --pp 2 --policy sarathi`, `vllm --pp 2`, `zentorch --pp 2` (vLLM with
AMD's kernels), `sglang --pp 2`, `transformers --pp 1`, `llama --pp 1` or `openvino --pp 1`.
`--weights FORMAT` has it serve a copy of the model in that format: `vllm --pp 1 --weights
int-quantized`, `llama --pp 1 --weights q8_0`; every other flag is handed on as it stands.
`ours@COMMIT` is our server as of that commit. Used by the benchmarks that start servers, one engine
at a time. Prefix caches are off unless asked for: with them, a repeated load is answered from the
cache.
"""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from benchmark.support.engine import Builder, Engine, Served
from benchmark.support.paths import BUILD, ROOT
from benchmark.support.peer_engines import PEERS
from benchmark.support.starts import answers, wait_for_start
from sgl_pipeline.errors import ConfigurationError

_STOP_TIMEOUT_S = 30.0
_CHILDREN_TIMEOUT_S = 5.0
_COMMITS = BUILD / "commits"


def parse_engine(
    text: str,
    model: Path,
    port: int,
    scratch: Path,
    cores: Sequence[int],
    *,
    prefix_cache: bool = False,
) -> Engine:
    """The engine that `text` names, serving `model` on the loopback `port`.

    Args:
        scratch: directory for the trace of ours.
        cores: ids of the usable cores, split over the stages of the peers; ours splits them itself.
        prefix_cache: leave the engine's prefix cache on.

    Raises:
        ConfigurationError: for an unknown kind, a peer with more stages than cores or that is not
            installed, and a missing copy of the model.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    parser.add_argument("kind")
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--weights")
    words = shlex.split(text)
    try:
        parsed, flags = parser.parse_known_args(words)
        kind, _, commit = parsed.kind.partition("@")
        build = _BUILDERS[kind]
    except (argparse.ArgumentError, SystemExit, KeyError):
        raise ConfigurationError(
            f"--engine {text!r} must begin with one of {', '.join(_BUILDERS)}; --pp wants a number"
        ) from None
    served = Served(
        " ".join(words), model, parsed.weights, port, parsed.pp, tuple(flags), prefix_cache
    )
    if commit and build is not _ours:
        raise ConfigurationError(f"--engine {text!r}: only ours can be had as of a commit")
    engine = build(served, scratch, cores)
    if not commit:
        return engine
    directory = _checkout(commit)
    # Before the environment's own: what a Python of it imports when it starts counts as well.
    environment = engine.environment | {"PYTHONPATH": str(directory)}
    return replace(engine, directory=directory, environment=environment)


def _checkout(commit: str) -> Path:
    """A work tree of `commit`, made unless it is there."""
    try:
        path = _COMMITS / _git("rev-parse", "--short", f"{commit}^{{commit}}")
        if not path.exists():
            _git("worktree", "prune")
            _git("worktree", "add", "--detach", str(path), path.name)
    except subprocess.CalledProcessError as error:
        raise ConfigurationError(f"ours@{commit}: {error.stderr.strip()}") from None
    return path


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _ours(served: Served, scratch: Path, cores: Sequence[int]) -> Engine:
    trace_path = scratch / f"trace_{served.port}.jsonl"
    command = [sys.executable, "-m", "sgl_pipeline.launch_server", "--model-path"]
    command += [str(served.checkpoint), "--pp", str(served.num_stages), *served.address_flags]
    # Its request would be in the trace, and may come when the measurement has begun.
    command += ["--skip-server-warmup"]
    command += [*served.cache_flags("--disable-radix-cache"), "--trace-path", str(trace_path)]
    return Engine(
        label=served.label,
        client_backend="sglang",
        base_url=served.base_url,
        command=(*command, *served.flags),
        trace_path=trace_path,
    )


_BUILDERS: dict[str, Builder] = {"ours": _ours, **PEERS}


@contextlib.contextmanager
def running(engine: Engine, log_path: Path) -> Iterator[psutil.Process | None]:
    """Starts the engine, waits until it answers, and leaves no process of it behind.

    Gives its main process, None for one that ran before.

    Raises EngineFailure with the end of its log when it does not come up.
    """
    if not engine.command:
        yield None
        return
    if answers(engine.base_url):
        raise ConfigurationError(f"{engine.base_url} is taken; choose another --port")
    if engine.trace_path is not None:
        engine.trace_path.unlink(missing_ok=True)
    # Ended by a time limit, a benchmark must not leave its servers behind either.
    signal.signal(signal.SIGTERM, _exit_in_order)
    with log_path.open("wb") as log:
        server = psutil.Popen(
            engine.command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | engine.environment,
            cwd=engine.directory,
            # Ctrl-C reaches us alone, and we end the server in order.
            start_new_session=True,
        )
        try:
            wait_for_start(engine.label, lambda: answers(engine.base_url), [server], log_path)
            yield server
        finally:
            _stop(server)


def _exit_in_order(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _stop(server: psutil.Popen) -> None:
    """Asks the server to end, then ends what is left of its process tree."""
    try:
        children = server.children(recursive=True)
        server.terminate()
    except psutil.NoSuchProcess:
        return
    _, alive = psutil.wait_procs([server], timeout=_STOP_TIMEOUT_S)
    alive += children
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                end(process)
        _, alive = psutil.wait_procs(alive, timeout=_CHILDREN_TIMEOUT_S)
