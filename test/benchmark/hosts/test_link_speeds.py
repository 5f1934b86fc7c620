"""Rates over links, ours and vLLM's: the table, how tokens are counted, and how vLLM is started."""

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmark.hosts import link_speeds
from benchmark.hosts.completion_clients import CompletionClients
from benchmark.hosts.link_speeds import Measured, rate_table
from benchmark.hosts.namespaces import Host, Network
from benchmark.hosts.servers import HTTP_PORT, vllm_host_command, vllm_host_environment
from benchmark.moves import move_gains
from benchmark.moves.move_gains import ClosedLoop

MEASURED = Measured(
    gbit_per_s=0.1,
    delay_ms=10.0,
    slowness=1.25,
    tokens_per_s=600.0,
    predicted_tokens_per_s=630.0,
)
LOAD = ClosedLoop(clients=1, input_tokens=3, output_tokens=7)
CHUNK, END = b'data: {"choices":[{"text":"ab"}]}\n\n', b"data: [DONE]\n\n"
MEASURED_S = 1.0


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_beside_vllm_the_table_has_its_rate_and_ours_as_a_multiple_of_it() -> None:
    head, _, row = rate_table([replace(MEASURED, vllm_tokens_per_s=400.0)]).splitlines()
    assert cells(head)[-2:] == ["vLLM tokens/s", "ours / vLLM"]
    assert cells(row)[-4:] == ["630", "+5.0%", "400", "1.50"]
    assert len(cells(head)) == len(cells(row))


class Completions(ThreadingHTTPServer):
    """Answers with fewer chunks than tokens, then with one more, then only after `may_end`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.may_answer, self.may_end = threading.Event(), threading.Event()
        self.has_answered_two = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Completions

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        number = len(self.server.asked)
        if number > 2:
            self.server.has_answered_two.set()
            self.server.may_end.wait()
        self.server.may_answer.wait()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(CHUNK * (3 if number == 1 else LOAD.output_tokens + 1) + END)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def completions() -> Iterator[Completions]:
    server = Completions()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_every_token_counts_once_however_many_chunks_there_are(
    completions: Completions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two answers are measured: a second of this clock passes when the third is asked for."""
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        if seconds != MEASURED_S:
            time.sleep(seconds)
            return
        completions.may_answer.set()
        completions.has_answered_two.wait()
        now_s[0] += seconds

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: now_s[0])
    monkeypatch.setattr(move_gains, "time", clock)
    clients = CompletionClients(completions.url, LOAD, "the-model")
    rates = clients.rates(0.0, MEASURED_S)
    completions.may_end.set()
    clients.stop()
    assert rates == (2 * LOAD.input_tokens, 2 * LOAD.output_tokens)
    path, body = completions.asked[0]
    assert path == "/v1/completions"
    assert len(body.pop("prompt")) == LOAD.input_tokens
    assert body == {
        "model": "the-model",
        "max_tokens": LOAD.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


def two_hosts() -> Network:
    """As `hosts` makes them; nothing runs there."""
    network = Network("198.18.0.254")
    for number, cores in ((1, (0,)), (2, (2, 3))):
        address = f"198.18.0.{number}"
        network.hosts.append(Host(number, f"sglp-{number}", address, Path(), network, cores))
    return network


def test_vllm_is_started_on_both_hosts_and_the_first_one_answers() -> None:
    first, second = (vllm_host_command(two_hosts(), Path("models/one"), rank) for rank in (0, 1))
    assert first[-4:] == ["--host", "0.0.0.0", "--port", str(HTTP_PORT)]
    assert second[-1:] == ["--headless"]
    shared = first[:-4]
    rank = shared.index("--node-rank") + 1
    assert (shared.pop(rank), second.pop(rank)) == ("0", "1")
    assert shared == second[:-1]
    assert Path(shared[0]).name == "vllm"
    assert shared[1:3] == ["serve", "models/one"]
    flags = " ".join(shared)
    for flag in (
        "--served-model-name models/one",
        "--pipeline-parallel-size 2",
        "--nnodes 2",
        "--master-addr 198.18.0.1",
        "--dtype bfloat16",
        "--max-model-len 4096",
        "--no-enable-prefix-caching",
    ):
        assert flag in flags


def test_vllm_has_the_cores_and_the_address_of_its_host() -> None:
    assert [vllm_host_environment(two_hosts(), rank) for rank in (0, 1)] == [
        {
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_HOST_IP": address,
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        for cores, address in (("0", "198.18.0.1"), ("2-3", "198.18.0.2"))
    ]


def test_a_missing_vllm_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(link_speeds, "VLLM_DIRECTORY", tmp_path)
    monkeypatch.setattr(link_speeds, "hosts", None)
    assert link_speeds.main(["--beside", "vllm", "--no-save"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "vLLM is not installed" in line
    assert "install_vllm_cpu" in line
