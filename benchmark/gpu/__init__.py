"""The parts of `benchmark/gpu/bench_gpu.py` and what they share; README.md says how they are used.

Nothing here may import sglang: the benchmark runs where only torch, msgspec and zmq are.
"""
