"""What the benchmarks share: engines, loads, reports and dated results."""
