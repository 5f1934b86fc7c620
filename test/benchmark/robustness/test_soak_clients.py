"""The pace of a soak's clients."""

import asyncio
import time
from itertools import pairwise
from typing import Any

import aiohttp
import pytest

from benchmark.robustness.soak_clients import SoakClients
from benchmark.robustness.soak_mix import Ask, RequestMix


class _Clients(SoakClients):
    """Ask no server: each request takes `takes_s`."""

    def __init__(self, takes_s: float, period_s: float) -> None:
        super().__init__("", num_clients=1, departing_share=0.0, seed=1, period_s=period_s)
        self._takes_s = takes_s
        self.asked_s: list[float] = []

    async def _ask(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        self.asked_s.append(time.monotonic())
        await asyncio.sleep(self._takes_s)

    async def run_alone(self, seconds: float) -> None:
        session: Any = None
        end_s = time.monotonic() + seconds
        await self._client(session, RequestMix(1, {}, 0.0), starts_after_s=0.0, end_s=end_s)


@pytest.mark.parametrize(("takes_s", "period_s"), [(0.0, 0.05), (0.05, 0.0), (0.05, 0.02)])
def test_a_client_asks_after_its_period_and_its_answer(takes_s: float, period_s: float) -> None:
    clients = _Clients(takes_s, period_s)
    asyncio.run(clients.run_alone(0.3))
    moments_s = clients.asked_s
    assert 2 <= len(moments_s) <= 7
    gaps_s = [later - earlier for earlier, later in pairwise(moments_s)]
    # Sleep may end a clock's tick early.
    assert min(gaps_s) > 0.9 * max(takes_s, period_s)
