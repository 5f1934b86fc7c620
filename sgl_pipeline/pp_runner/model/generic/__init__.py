"""The generic backend: transformers' own code computes the layers, our kernels inside."""
