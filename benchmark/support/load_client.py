"""Runs `sglang.bench_serving`, the load generator that users know, with its own flags.

    python -m benchmark.support.load_client [--memory-of PID FILE] FLAGS [--then FLAGS]...
    python -m benchmark.support.load_client --under-policy POLICY FLAGS [--then FLAGS]...

Started by `measured_runs.py` as a process of its own, so that a client never shares an interpreter
with another engine's. Flags after a `THEN` are those of a further run. With `MEMORY_OF`, the memory
of that process and its descendants after each run is added to the file: MiB, a line for a run. With
`UNDER_POLICY` before the flags of a run, our server changes its policy first. Adds what a CPU
machine needs for the import, and llama.cpp's server as a backend.
"""

import sys
from pathlib import Path

import psutil
import requests

from benchmark.support.llama_client import add_llama_server
from benchmark.support.memory import tree_pss_mib
from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim

THEN = "--then"
MEMORY_OF = "--memory-of"
UNDER_POLICY = "--under-policy"
_ANSWER_S = 60.0


def main(words: list[str]) -> None:
    """One run for each part of `words`."""
    install_torchvision_shim()
    from sglang.benchmark import serving

    add_llama_server(serving)
    server, memory_path = None, Path()
    if words[:1] == [MEMORY_OF]:
        server, memory_path, words = psutil.Process(int(words[1])), Path(words[2]), words[3:]
    while words:
        end = words.index(THEN) if THEN in words else len(words)
        flags, words = words[:end], words[end + 1 :]
        if flags[:1] == [UNDER_POLICY]:
            _, policy, *flags = flags
            set_policy(flags[flags.index("--base-url") + 1], policy)
        sys.argv[1:] = flags
        serving.cli_main()
        if server is not None:
            with memory_path.open("a", encoding="utf-8") as file:
                file.write(f"{tree_pss_mib(server):.1f}\n")


def set_policy(url: str, policy: str) -> None:
    """Changes the policy of our server. Raises requests.RequestException where it does not."""
    knobs = {"policy": policy}
    requests.patch(f"{url}/pipeline/throttle", json=knobs, timeout=_ANSWER_S).raise_for_status()


if __name__ == "__main__":
    main(sys.argv[1:])
