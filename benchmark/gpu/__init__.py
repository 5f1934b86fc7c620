"""The parts of `benchmark/bench_gpu.py`: limits of a card, stages alone, checks, whole pipelines.

Nothing here may import sglang: the benchmark runs where only torch, msgspec and zmq are.
"""
