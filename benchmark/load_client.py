"""Runs `sglang.bench_serving`, the load generator that users know, with its own flags.

Started by `bench_serving.py` as a process of its own, so that a client never shares an interpreter
with another run. Adds only what a CPU machine needs for the import.
"""

from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim

if __name__ == "__main__":
    install_torchvision_shim()
    from sglang.benchmark.serving import cli_main

    cli_main()
