"""The command lines of the engines, and the life of a server process, with a stand-in server."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.ports import number_of, reserve_port

from benchmark.support.engine import Engine, EngineFailure
from benchmark.support.engines import parse_engine, running
from sgl_pipeline.errors import ConfigurationError

MODEL = Path("model")


@pytest.fixture
def port() -> Iterator[int]:
    with reserve_port() as reserved:
        yield number_of(reserved)


def engine_of(program: str, port: int) -> Engine:
    return Engine(
        label="stand-in",
        client_backend="sglang",
        base_url=f"http://127.0.0.1:{port}",
        command=(sys.executable, "-c", program, str(port)),
    )


SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.multiproc
def test_ours_as_of_a_commit_runs_in_a_work_tree_of_it(tmp_path: Path) -> None:
    engine = parse_engine("ours@HEAD --pp 2", MODEL, 31000, tmp_path, [0])
    assert engine.directory is not None
    try:
        assert (engine.directory / "sgl_pipeline" / "launch_server.py").exists()
        again = parse_engine("ours@HEAD --pp 2", MODEL, 31000, tmp_path, [0])
        assert again.directory == engine.directory
        package = subprocess.check_output(
            [sys.executable, "-c", "import sgl_pipeline; print(sgl_pipeline.__file__)"],
            cwd=engine.directory,
            env=os.environ | engine.environment,
            text=True,
        )
        assert Path(package).is_relative_to(engine.directory)
    finally:
        command = ["git", "worktree", "remove", "--force", str(engine.directory)]
        subprocess.run(command, check=True)
    with pytest.raises(ConfigurationError, match="ours@nothing: "):
        parse_engine("ours@nothing", MODEL, 31000, tmp_path, [0])
    with pytest.raises(ConfigurationError, match="only ours"):
        parse_engine("vllm@HEAD", MODEL, 31000, tmp_path, [0])


def test_ours_gets_its_flags_and_an_empty_prefix_cache(tmp_path: Path) -> None:
    engine = parse_engine("ours --pp 4 --policy sarathi", MODEL, 31000, tmp_path, [0])
    command = list(engine.command)
    assert command[command.index("--pp") + 1] == "4"
    assert command[command.index("--port") + 1] == "31000"
    assert command[-2:] == ["--policy", "sarathi"]
    assert "--disable-radix-cache" in command
    assert engine.trace_path is not None
    assert command[command.index("--trace-path") + 1] == str(engine.trace_path)
    assert engine.label == "ours --pp 4 --policy sarathi"


@pytest.mark.parametrize("kind", ["ours", "sglang", "transformers --pp 1"])
def test_the_prefix_cache_stays_on_where_it_is_wanted(kind: str, tmp_path: Path) -> None:
    off = parse_engine(kind, MODEL, 31000, tmp_path, [0, 1])
    on = parse_engine(kind, MODEL, 31000, tmp_path, [0, 1], prefix_cache=True)
    (flag,) = set(off.command) - set(on.command)
    assert "cache" in flag
    assert [word for word in off.command if word != flag] == list(on.command)


def test_ours_serves_the_copy_of_the_model_in_the_named_format(tmp_path: Path) -> None:
    model = tmp_path / "0.27b"
    with pytest.raises(ConfigurationError) as missing:
        parse_engine("ours --weights int-quantized", model, 31000, tmp_path, [0])
    copy = tmp_path / "0.27b-int-quantized"
    command = f"python -m benchmark.models.quantize_model {model} {copy} --format int-quantized"
    assert str(missing.value).endswith(f"{copy} is missing; run {command}")
    copy.mkdir()
    engine = parse_engine("ours --weights int-quantized", model, 31000, tmp_path, [0])
    assert engine.command[engine.command.index("--model-path") + 1] == str(copy)
    assert "--weights" not in engine.command


@pytest.mark.parametrize("text", ["tgi --pp 2", "ours --pp two", ""])
def test_an_engine_that_is_not_known_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="ours, vllm, zentorch"):
        parse_engine(text, MODEL, 31000, tmp_path, [0, 1])


@pytest.mark.multiproc
def test_a_server_is_gone_with_its_children_when_its_turn_ends(tmp_path: Path, port: int) -> None:
    others = set(psutil.Process().children(recursive=True))
    with running(engine_of(SERVER, port), tmp_path / "log"):
        started = set(psutil.Process().children(recursive=True)) - others
        assert {"sleep"} <= {process.name() for process in started}
    assert not [process for process in started if process.is_running()]


@pytest.mark.multiproc
def test_a_server_that_ends_at_start_is_reported_with_its_log(tmp_path: Path, port: int) -> None:
    engine = engine_of("raise SystemExit('no such model')", port)
    expected = pytest.raises(EngineFailure, match=r"stand-in: ended with 1(?s:.*)no such model")
    with expected, running(engine, tmp_path / "log"):
        pytest.fail("a dead server was used")


@pytest.mark.multiproc
def test_a_taken_port_is_refused_before_anything_starts(tmp_path: Path, port: int) -> None:
    with (
        running(engine_of(SERVER, port), tmp_path / "log"),
        pytest.raises(ConfigurationError, match="is taken"),
        running(engine_of(SERVER, port), tmp_path / "second"),
    ):
        pytest.fail("two servers on one port")
