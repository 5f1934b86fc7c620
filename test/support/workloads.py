"""Workloads whose every request is known, for tests of what is built on them."""

from sgl_pipeline.simulator.workload import SimulatedRequest, TokenIds


def fixed_lengths(
    num_requests: int, input_tokens: int, output_tokens: int
) -> list[SimulatedRequest]:
    """Equal requests that share nothing."""
    ids = TokenIds()
    return [
        SimulatedRequest(
            arrival_s=0.0, prompt=(ids.fresh(input_tokens),), output=ids.fresh(output_tokens)
        )
        for _ in range(num_requests)
    ]
