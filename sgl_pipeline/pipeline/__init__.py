"""What becomes of requests, steps and workers, without I/O and clock: one loop for all drivers."""
