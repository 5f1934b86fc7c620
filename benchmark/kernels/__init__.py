"""CPU kernels and stages beside torch and what the machine can do."""
