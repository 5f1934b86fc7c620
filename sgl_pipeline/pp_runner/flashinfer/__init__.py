"""FlashInfer's kernels: which are compiled, attention, and a graph's plan."""
