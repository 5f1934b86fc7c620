"""Viewers of the live page in a process of their own, which reads events as the page does.

Started by `viewer_cost.py` with the server's address and the number of viewers. When its standard
input ends it prints what they have read.
"""

import json
import sys
import threading
import urllib.request

_READ_BYTES = 2**16


def look(url: str, num_viewers: int) -> dict[str, int]:
    """Reads the events of `num_viewers` pages until the standard input ends, and counts them."""
    counts = {"ticks": 0, "dropped": 0}
    lock = threading.Lock()

    def read() -> None:
        rest = b""
        with urllib.request.urlopen(f"{url}/pipeline/events") as stream:
            while data := stream.read1(_READ_BYTES):
                events = (rest + data).split(b"\n\n")
                rest = events.pop()
                with lock:
                    for event in events:
                        counts["ticks"] += event.startswith(b"event: tick")
                        if event.startswith(b"event: dropped"):
                            counts["dropped"] += json.loads(event.split(b"data: ")[1])["events"]

    for _ in range(num_viewers):
        threading.Thread(target=read, daemon=True).start()
    sys.stdin.read()
    with lock:
        return dict(counts)


if __name__ == "__main__":
    print(json.dumps(look(sys.argv[1], int(sys.argv[2]))))
