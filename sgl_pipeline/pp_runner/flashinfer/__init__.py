"""FlashInfer's kernels: their builds, attention, layer kernels, and a graph's plan."""
