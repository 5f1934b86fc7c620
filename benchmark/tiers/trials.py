"""One run of an engine on a folder of its own: a load, and maybe one turn more of every session
after a restart or on a second replica."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmark.support.engine import Engine
from benchmark.support.engines import running
from benchmark.support.paths import SCRATCH
from benchmark.tiers.conversations import Conversations, PlannedTurn, TokenSource
from benchmark.tiers.tiered_servers import (
    Pool,
    check_pool,
    empty_store,
    router_before,
    store_mib,
    tiered_engine,
)
from benchmark.tiers.turn_clients import Answers, TurnClients
from benchmark.tiers.turn_report import TurnRun

_WARM_UP_SEED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The facts that all runs share.

    Args:
        planned: the turns of `load` that are sent.
        settle_s: before sessions return to another server, for what is being saved.
    """

    load: Conversations
    planned: Sequence[PlannedTurn]
    source: TokenSource
    model: Path
    pool: Pool
    port: int
    settle_s: float

    def run(self, text: str, round_number: int) -> TurnRun:
        """The engine `text` gets the load."""
        with empty_store() as store:
            first = self._engine(text, store)
            with running(first, _log_path("first")):
                self._warm_up(first)
                answers = self._send_load(first.base_url)
            return _run(text, round_number, answers, store)

    def run_and_restart(self, text: str, then: str, round_number: int) -> TurnRun:
        """The engine `text` gets the load and is ended; `then` is started on its folder."""
        with empty_store() as store:
            first, second = self._engine(text, store), self._engine(then, store)
            with running(first, _log_path("first")):
                self._warm_up(first)
                answers = self._send_load(first.base_url)
                time.sleep(self.settle_s)
            with running(second, _log_path("second")):
                self._warm_up(second)
                revisit = self._send_returns(second.base_url, answers)
            return _run(text, round_number, answers, store, revisit, then)

    def run_and_replace(self, text: str, round_number: int) -> TurnRun:
        """Two replicas of `text` on one folder: the router sends the load to the first, and then
        all that returns to the second."""
        with empty_store() as store:
            first, second = (self._engine(text, store, self.port + number) for number in (0, 1))
            with (
                running(first, _log_path("first")),
                running(second, _log_path("second")),
                router_before(first.base_url, self.port + 2) as router,
            ):
                for engine in (first, second):
                    self._warm_up(engine)
                answers = self._send_load(router.url)
                time.sleep(self.settle_s)
                router.replace_worker(second.base_url)
                revisit = self._send_returns(router.url, answers)
            return _run(text, round_number, answers, store, revisit, "a second replica")

    def _engine(self, text: str, store: Path, port: int | None = None) -> Engine:
        return tiered_engine(text, self.model, port or self.port, self.pool, store)

    def _clients(self, url: str) -> TurnClients:
        return TurnClients(url, self.load.most_at_once, self.load.output_tokens)

    def _warm_up(self, engine: Engine) -> None:
        """A turn of each client that is not counted."""
        check_pool(engine, self.pool)
        seed, clients = self.load.seed + _WARM_UP_SEED, self.load.clients
        load = replace(self.load, sessions=clients, turns=1, turns_per_s=math.inf, seed=seed)
        self._clients(engine.base_url).send(load.planned(self.source))

    def _send_load(self, url: str) -> Answers:
        return self._clients(url).send(self.planned)

    def _send_returns(self, url: str, before: Answers) -> Answers:
        return self._clients(url).send(self.load.returns(self.source), before.transcripts)


def _run(
    text: str,
    round_number: int,
    answers: Answers,
    store: Path,
    revisit: Answers | None = None,
    revisited_by: str = "",
) -> TurnRun:
    return TurnRun(
        engine=text,
        round=round_number,
        answers=answers,
        store_mib=store_mib(store),
        revisit=revisit,
        revisited_by=revisited_by,
    )


def _log_path(which: str) -> Path:
    return SCRATCH / f"returning_turns_{which}.log"
