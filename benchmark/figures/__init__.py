"""Figures of simulated serving, one file each: `python -m benchmark.figures NAME`.

A file has a `FIGURE`: it computes rows of numbers and draws them. `__main__.py` runs it and writes
the picture, the rows and their setting, dated, into `benchmark/results/`.
"""
