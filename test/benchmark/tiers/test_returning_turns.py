"""What the command refuses before it starts a server, and what its clients send one."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmark.support.engine import EngineFailure
from benchmark.tiers.conversations import Conversations, random_tokens
from benchmark.tiers.returning_turns import main
from benchmark.tiers.tiered_servers import STORE_VARIABLE, Pool, store_mib, tiered_engine
from benchmark.tiers.turn_clients import TurnClients

LOAD = Conversations(sessions=6, turns=3, first_tokens=8, user_tokens=4, output_tokens=3, clients=2)
PLANNED = LOAD.planned(random_tokens(10, 500))


class Answering(BaseHTTPRequestHandler):
    """Streams three tokens, the first of which is the prompt's length."""

    asked: list[dict[str, Any]]
    output_tokens = 3

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        self.send_response(200)
        self.end_headers()
        ids = [len(body["input_ids"]), 7, 8][: self.output_tokens]
        info = {"cached_tokens": 2, "cached_tokens_details": {"device": 2, "storage_backend": "x"}}
        for end in range(1, len(ids) + 1):
            part = json.dumps({"output_ids": ids[:end], "meta_info": info})
            self.wfile.write(f"data: {part}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def handler() -> type[Answering]:
    return type("Handler", (Answering,), {"asked": []})


@pytest.fixture
def url(handler: type[Answering]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_turn_sends_all_that_was_said_before(url: str, handler: type[Answering]) -> None:
    answers = TurnClients(url, LOAD.most_at_once, LOAD.output_tokens).send(PLANNED)
    said: dict[int, tuple[int, ...]] = {}
    for planned, one in zip(PLANNED, answers.turns, strict=True):
        assert one.prompt == said.get(one.session, ()) + planned.user_tokens
        assert one.output == (LOAD.prompt_tokens(one.turn), 7, 8)
        assert len(one.gaps_ms) == 2
        assert one.cached_details == {"device": 2}
        said[one.session] = one.transcript
    assert answers.transcripts == said
    sent = [tuple(body["input_ids"]) for body in handler.asked]
    assert sorted(sent) == sorted(one.prompt for one in answers.turns)
    sampling = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}
    assert all(body["sampling_params"] == sampling for body in handler.asked)
    returns = TurnClients(url, 2, 3).send(LOAD.returns(random_tokens(10, 500)), said)
    assert all(one.prompt[:-4] == said[one.session] for one in returns.turns)


def test_an_answer_that_is_not_whole_ends_the_load(url: str, handler: type[Answering]) -> None:
    handler.output_tokens = 2
    with pytest.raises(EngineFailure, match=r"session \d, turn 1: an answer that is not whole"):
        TurnClients(url, 2, 3).send(PLANNED)


def test_an_engine_gets_its_pool_and_a_folder(tmp_path: Path) -> None:
    engine = tiered_engine("ours --pp 1 --policy sarathi", tmp_path, 1, Pool(96, 16), tmp_path)
    assert engine.label == "ours --pp 1 --policy sarathi"
    assert engine.environment[STORE_VARIABLE] == str(tmp_path)
    assert "--max-total-tokens 96 --page-size 16" in " ".join(engine.command)
    assert "--disable-radix-cache" not in engine.command


def test_the_store_is_all_that_lies_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a").write_bytes(bytes(2**19))
    (tmp_path / "deep" / "b").write_bytes(bytes(2**20))
    assert store_mib(tmp_path) == 1.5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--no-reuse", "--restart"], "choose one of"),
        (["--restart-engine", "ours"], "needs --restart"),
        (["--output-tokens", "1"], "at least 2"),
        (["--sessions", "8"], "raise --sessions"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 1
    assert message in capsys.readouterr().err
