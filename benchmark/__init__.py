"""Real servers and kernels, measured; nothing here is imported by the package."""
