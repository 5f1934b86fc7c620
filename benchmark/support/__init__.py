"""Shared support of the benchmarks: engines, loads, reports and dated results."""
