"""The network between hosts of namespaces: a switch in a process of its own, with a cable to each.

`python -m benchmark.hosts.switch TAP...` makes the TAP devices, says "ready" and hands frames from
one to the other, later by what the cables between them take. Lines of JSON on its standard input
(`Setting`) change a cable; at their end the switch ends, and its devices go with it. In place of
`tc netem`, which many kernels are built without; only TUN/TAP is needed (Linux,
Documentation/networking/tuntap.rst).
"""

import ctypes
import fcntl
import heapq
import os
import select
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import msgspec

_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
# Checksums are left out and TCP comes in frames of up to 64 KiB, as on a veth.
_CHECKSUM_AND_TCP_SEGMENTS = 0x01 | 0x02 | 0x04
_VNET_HEADER_BYTES = 10
_LARGEST_FRAME = _VNET_HEADER_BYTES + 14 + 65535
# Per TCP segment: preamble, Ethernet header, checksum and gap, IP and TCP headers.
_SEGMENT_OVERHEAD_BYTES = 8 + 14 + 4 + 12 + 52
_PR_SET_TIMERSLACK = 29
_FRAMES_A_TURN = 32


class Setting(msgspec.Struct, kw_only=True):
    """Settings of one port's cable from now on. A frame takes `delay_ms` of both cables that it
    passes; a cable carries `gbit_per_s` each way at once (0: any amount) and loses a share of the
    frames that it brings to its host. A cut cable loses all, both ways, silently."""

    port: int
    delay_ms: float = 0.0
    gbit_per_s: float = 0.0
    loss: float = 0.0
    is_cut: bool = False


@dataclass(slots=True)
class Port:
    """A TAP device and its cable; `sends_until_s` and `brings_until_s` say when it is free."""

    tap: int
    cable: Setting
    sends_until_s: float = 0.0
    brings_until_s: float = 0.0


@dataclass(slots=True)
class Switch:
    """Frames under way, and where they go: the last byte of a MAC address is a port's number."""

    ports: list[Port]
    rng: Random = field(default_factory=lambda: Random(0))
    _due: list[tuple[float, int, int, bytes]] = field(default_factory=list)
    _count: int = 0

    def take(self, source: int, frame: bytes, now_s: float) -> None:
        """Puts a frame from that port on its way."""
        place = frame[_VNET_HEADER_BYTES + 5]
        is_for_all = frame[_VNET_HEADER_BYTES] & 1
        targets = range(len(self.ports)) if is_for_all else (place,)
        for target in targets:
            if target != source and target < len(self.ports):
                self._send(source, target, frame, now_s)

    def _send(self, source: int, target: int, frame: bytes, now_s: float) -> None:
        sender, receiver = self.ports[source], self.ports[target]
        if sender.cable.is_cut or receiver.cable.is_cut:
            return
        if receiver.cable.loss and self.rng.random() < receiver.cable.loss:
            return
        bits = 8 * wire_bytes(frame)
        sent_s = max(now_s, sender.sends_until_s)
        sender.sends_until_s = sent_s + bits * _s_per_bit(sender.cable)
        brought_s = max(sent_s, receiver.brings_until_s)
        receiver.brings_until_s = brought_s + bits * _s_per_bit(receiver.cable)
        due_s = max(sender.sends_until_s, receiver.brings_until_s)
        due_s += (sender.cable.delay_ms + receiver.cable.delay_ms) * 1e-3
        self._count += 1
        heapq.heappush(self._due, (due_s, self._count, target, frame))

    def deliver(self, now_s: float) -> None:
        """Brings what is due to its port, unless its cable has been cut."""
        while self._due and self._due[0][0] <= now_s:
            _, _, target, frame = heapq.heappop(self._due)
            if not self.ports[target].cable.is_cut:
                # A host whose device is down loses it, as on any network.
                with suppress(OSError):
                    os.write(self.ports[target].tap, frame)

    def wait_s(self, now_s: float) -> float | None:
        """Until the next frame is due."""
        return max(0.0, self._due[0][0] - now_s) if self._due else None


def wire_bytes(frame: bytes) -> int:
    """The bytes that a frame (with its virtio header) takes of a cable: TCP's, with the headers of
    every segment that a network card would make of it."""
    segment_bytes = int.from_bytes(frame[4:6], sys.byteorder)
    num_bytes = len(frame) - _VNET_HEADER_BYTES
    if not segment_bytes:
        return num_bytes + 8 + 4 + 12
    segments = -(-num_bytes // segment_bytes)
    return num_bytes + segments * _SEGMENT_OVERHEAD_BYTES


def _s_per_bit(cable: Setting) -> float:
    return 1e-9 / cable.gbit_per_s if cable.gbit_per_s else 0.0


def open_tap(name: str) -> int:
    """A new TAP device, which lives as long as the file descriptor that is returned."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(tap, _TUNSETVNETHDRSZ, struct.pack("i", _VNET_HEADER_BYTES))
    fcntl.ioctl(tap, _TUNSETOFFLOAD, _CHECKSUM_AND_TCP_SEGMENTS)
    return tap


def main(names: list[str]) -> None:
    """Switches until standard input ends."""
    # Timers of this process are as exact as the kernel's, not rounded by 50 us.
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    switch = Switch([Port(open_tap(name), Setting(port=n)) for n, name in enumerate(names)])
    print("ready", flush=True)
    port_of = {port.tap: number for number, port in enumerate(switch.ports)}
    commands = b""
    while True:
        wait_s = switch.wait_s(time.monotonic())
        readable, _, _ = select.select([0, *port_of], [], [], wait_s)
        switch.deliver(time.monotonic())
        for tap in readable:
            if tap == 0:
                if not (part := os.read(0, 65536)):
                    return
                *lines, commands = (commands + part).split(b"\n")
                for line in lines:
                    setting = msgspec.json.decode(line, type=Setting)
                    switch.ports[setting.port].cable = setting
                    print("set", flush=True)
                continue
            _drain(switch, tap, port_of[tap])


def _drain(switch: Switch, tap: int, port: int) -> None:
    for _ in range(_FRAMES_A_TURN):
        try:
            frame = os.read(tap, _LARGEST_FRAME)
        except OSError:
            return
        now_s = time.monotonic()
        switch.take(port, frame, now_s)
        switch.deliver(now_s)


if __name__ == "__main__":
    main(sys.argv[1:])
