"""transformers as the judge of log-probabilities: one pass over prompt and output."""

from pathlib import Path

import numpy as np
import torch
from support.adjusted_logits import adjusted_by_hand
from support.greedy_oracle import reference_model

from sgl_pipeline.requests import Request

# In fp32 our kernels and transformers' add up in different orders.
TOLERANCE = 1e-4


@torch.inference_mode()
def reference_logprobs(path: Path, request: Request) -> torch.Tensor:
    """[N, V]: row p tells of the token at p + 1, of the prompt or drawn by the request's rules."""
    prompt_length, sampling = len(request.prompt_ids), request.sampling
    tokens = torch.tensor([request.prompt_ids + request.output_ids])
    logits = reference_model(path)(tokens).logits[0].clone()
    for count, position in enumerate(range(prompt_length - 1, logits.shape[0])):
        row = adjusted_by_hand(logits[position].tolist(), sampling, request.output_ids[:count])
        temperature = 1.0 if sampling.is_greedy else sampling.temperature
        logits[position] = torch.tensor(row) / temperature
    return logits.log_softmax(dim=-1)


def assert_logprobs(path: Path, request: Request) -> None:
    """Fails unless all that came back to `request` is what transformers gives, each row once."""
    spec = request.logprobs
    assert spec is not None
    reference = reference_logprobs(path, request)
    start = min(spec.prompt_start, len(request.prompt_ids) - 1)
    end = len(request.prompt_ids) - 1 + max(1, len(request.output_ids))
    tokens = request.prompt_ids + request.output_ids
    reference = reference[start:end].clamp_min(torch.finfo(torch.float32).min)
    chosen, top, top_ids, of_token_ids = rows_of(request)
    assert len(chosen) == request.num_logprob_rows == len(reference)
    for row, token in enumerate(tokens[start + 1 : end + 1]):
        assert_close(chosen[row], reference[row, token])
    assert_close(top, reference.topk(spec.num_top).values)
    assert_close(top, reference.gather(1, torch.tensor(top_ids, dtype=torch.int64)))
    assert_close(of_token_ids, reference[:, list(spec.token_ids)])
    assert all(len(set(row)) == spec.num_top for row in top_ids.tolist())


def assert_close(numbers: np.ndarray, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(numbers, expected.numpy(), atol=TOLERANCE, rtol=TOLERANCE)


def rows_of(request: Request) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Chosen [N], top [N, num_top], their ids, and those of the named ids: all runs together."""
    spec = request.logprobs
    assert spec is not None

    def joined(field: str, dtype: type, width: int) -> np.ndarray:
        parts = [getattr(run, field) for run in request.logprob_runs]
        return np.frombuffer(b"".join(parts), dtype).reshape(request.num_logprob_rows, width)

    return (
        joined("chosen", np.float32, 1)[:, 0],
        joined("top", np.float32, spec.num_top),
        joined("top_ids", np.int32, spec.num_top),
        joined("of_token_ids", np.float32, len(spec.token_ids)),
    )
