"""Either end of the streams between schedulers, on real sockets, and a prefill server's end in a
process of its own:

    python -m support.room_ends RUN_DIRECTORY
"""

import sys
import time
from dataclasses import replace
from typing import Any

import zmq
from support.paired_servers import IDENTITY
from support.pipelines import make_request, new_scheduler
from support.stored_pipeline import NUM_LAYERS

from sgl_pipeline.disaggregation.decode_rooms import DecodeRooms
from sgl_pipeline.disaggregation.prefill_rooms import PrefillRooms
from sgl_pipeline.disaggregation.room_limits import RoomLimits
from sgl_pipeline.managers.disaggregation.room_ends import DecodeEnd, PrefillEnd
from sgl_pipeline.requests import Request, Room
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.wire.store_orders import PeerStage

STAGES = (PeerStage("p:1/offers-0", (0, NUM_LAYERS)),)
TURN_MS = 10


class LiveEnd:
    """An end, its scheduler, and a loop that a test turns."""

    def __init__(
        self, run_directory: str, *, is_prefill: bool, silence_s: float = 4.0, **identity: Any
    ) -> None:
        self.scheduler: StepScheduler = new_scheduler(num_pages=32, num_stages=1)
        self.poller = zmq.Poller()
        mine = replace(IDENTITY, **identity)
        tier, limits = self.scheduler.tier, RoomLimits(silence_s=silence_s)
        self.end: PrefillEnd | DecodeEnd
        if is_prefill:
            prefill = PrefillRooms(self.scheduler, mine, limits, STAGES)
            self.end = PrefillEnd(prefill, tier, lambda: STAGES, run_directory, self.poller)
            self.rooms: PrefillRooms | DecodeRooms = prefill
        else:
            decode = DecodeRooms(self.scheduler, mine, limits)
            self.end = DecodeEnd(decode, tier, run_directory, self.poller)
            self.rooms = decode
        self.failed: list[Request] = []

    def submit(self, room: Room) -> Request:
        request = make_request(f"r{room.number}", range(10), 1)
        request.room = room
        self.end.check(request)
        self.scheduler.add(request)
        self.end.opened(request, time.monotonic())
        return request

    def turn(self) -> None:
        self.poller.poll(TURN_MS)
        self.failed += self.end.serve(time.monotonic())


def main() -> None:
    live = LiveEnd(sys.argv[1], is_prefill=True)
    print("ready", flush=True)
    while True:
        live.turn()


if __name__ == "__main__":
    main()
