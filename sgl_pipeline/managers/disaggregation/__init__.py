"""The scheduler process's streams to the schedulers of prefill or decode servers.

Dialed by decode servers, through the port of the prefill server's host. The scheduler's loop never
waits for any of them; what arrives goes to `sgl_pipeline/disaggregation/`.
"""
