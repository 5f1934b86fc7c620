"""Prefill and decode on pipelines of their own, in virtual time.

A router gives each half of a request to a server, both at once, as that of a real deployment. The
prefill server computes the prompt and one token, and holds its whole pages until the decode server
has read them. The decode server finds them as a hit, computes the rest of the prompt, a page of
tokens at most, and decodes. With offload, some requests leave their pages where they are, and their
attention is computed there.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from sgl_pipeline.requests import Request, Room
from sgl_pipeline.simulator.fleet import VirtualFleet, least
from sgl_pipeline.simulator.room_servers import DecodeServer, PrefillServer
from sgl_pipeline.simulator.simulation import ServedRequest
from sgl_pipeline.simulator.workload import Segment, SimulatedRequest


class DisaggregatedFleet(VirtualFleet):
    """Prefill servers, decode servers, the streams between them, and a router that picks one of
    each: the least tokens to prefill, the least requests.

    `prefill_s` is what each request took to the end of its prefill, `handover_s` from there to its
    first token for the client.
    """

    def __init__(self, prefills: Sequence[PrefillServer], decodes: Sequence[DecodeServer]) -> None:
        super().__init__([one.pipeline for one in prefills] + [one.pipeline for one in decodes])
        self.prefills, self.decodes = tuple(prefills), tuple(decodes)
        self.prefill_s: list[float] = []
        self.handover_s: list[float] = []
        self._numbers = count()
        self._streams: list[tuple[DecodeServer, PrefillServer]] = []  # by their sessions
        self._prefilled_s: dict[int, float] = {}  # by the numbers of rooms
        for prefill in prefills:
            prefill.send = partial(self._send, prefill)
            prefill.on_end = partial(self._prefilled, prefill)
        for decode in decodes:
            decode.send = partial(self._send, decode)
            decode.on_end = partial(self._decoded, decode)
            decode.dial = partial(self._dial, decode)

    def route(self, asked: SimulatedRequest, now_s: float) -> None:
        """As `VirtualFleet`."""
        prefill = self.prefills[least([one.waiting_tokens for one in self.prefills])]
        decode = self.decodes[least([one.num_requests for one in self.decodes])]
        prefill.waiting_tokens += asked.input_tokens
        decode.num_requests += 1
        number = next(self._numbers)
        one_token = replace(asked, output=Segment(asked.output.first, 1), follow_up=None)
        prefill.pipeline.clients.expect(one_token, now_s, Room(number))
        decode.pipeline.clients.expect(asked, now_s, Room(number, prefill.name))

    # Streams

    def _dial(self, decode: DecodeServer, name: str, now_s: float) -> None:
        prefill = next(one for one in self.prefills if one.name == name)
        session = len(self._streams)
        self._streams.append((decode, prefill))
        prefill.rooms.connected(session, now_s)
        decode.rooms.connected(name, session, now_s)

    def _send(
        self, sender: PrefillServer | DecodeServer, session: int, message: Any, now_s: float
    ) -> None:
        decode, prefill = self._streams[session]
        other = prefill if sender is decode else decode
        moment_s = now_s + decode.reads.link.latency_s
        self.at(moment_s, partial(other.hear, session, message))

    # Ends of halves

    def _prefilled(
        self, prefill: PrefillServer, request: Request, served: ServedRequest, now_s: float
    ) -> None:
        prefill.waiting_tokens -= served.asked.input_tokens
        if not served.error:
            assert request.room is not None
            self._prefilled_s[request.room.number] = now_s

    def _decoded(
        self, decode: DecodeServer, request: Request, served: ServedRequest, now_s: float
    ) -> None:
        decode.num_requests -= 1
        if not served.error:
            assert request.room is not None
            prefilled_s = self._prefilled_s[request.room.number]
            self.prefill_s.append(prefilled_s - served.arrival_s)
            self.handover_s.append(served.token_times_s[0] - prefilled_s)
        self.end(served, now_s)
