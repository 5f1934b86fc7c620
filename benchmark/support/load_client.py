"""Runs `sglang.bench_serving`, the load generator that users know, with its own flags.

Started by `bench_serving.py` as a process of its own, so that a client never shares an interpreter
with another engine's. Flags after a `THEN` are those of a further run. Adds only what a CPU machine
needs for the import.
"""

import sys

from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim

THEN = "--then"


def main(words: list[str]) -> None:
    """One run for each part of `words`."""
    install_torchvision_shim()
    from sglang.benchmark.serving import cli_main

    while words:
        end = words.index(THEN) if THEN in words else len(words)
        sys.argv[1:], words = words[:end], words[end + 1 :]
        cli_main()


if __name__ == "__main__":
    main(sys.argv[1:])
