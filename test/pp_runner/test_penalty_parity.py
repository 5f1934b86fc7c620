"""The same logits as SGLang's own penalizers make, fed the same output tokens one after the other.

Without its overlapped scheduler, which feeds them a token late.
"""

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim
from sgl_pipeline.pp_runner.output.logit_adjustments import plan_logit_adjustments
from sgl_pipeline.requests import SamplingSpec
from sgl_pipeline.wire.step_order import MirroredChunk, MirroredRequest

VOCAB_SIZE = 50
STOP_IDS = (2, 3, 4)
SPECS = [
    SamplingSpec(),
    SamplingSpec(frequency_penalty=1.5),
    SamplingSpec(presence_penalty=-0.5),
    SamplingSpec(repetition_penalty=1.75),
    SamplingSpec(min_new_tokens=6, masked_token_ids=STOP_IDS),
    SamplingSpec(
        frequency_penalty=-0.25,
        presence_penalty=1.5,
        repetition_penalty=0.5,
        min_new_tokens=3,
        masked_token_ids=STOP_IDS,
    ),
]


@pytest.fixture(scope="module")
def penaltylib() -> Any:
    """SGLang's module, which takes some seconds to import."""
    install_torchvision_shim()
    from sglang.srt.sampling import penaltylib

    return penaltylib


def upstream_request(spec: SamplingSpec) -> SimpleNamespace:
    params = SimpleNamespace(
        frequency_penalty=spec.frequency_penalty,
        presence_penalty=spec.presence_penalty,
        repetition_penalty=spec.repetition_penalty,
        min_new_tokens=spec.min_new_tokens,
        stop_token_ids={2},
    )
    tokenizer = SimpleNamespace(eos_token_id=3, additional_stop_token_ids=None)
    return SimpleNamespace(sampling_params=params, eos_token_ids={4}, tokenizer=tokenizer)


class UpstreamRequests:
    """What SGLang's orchestrator reads of its ScheduleBatch."""

    def __init__(self) -> None:
        self.reqs = [upstream_request(spec) for spec in SPECS]
        self.device = "cpu"


def test_every_step_gives_the_logits_of_sglangs_penalizers(penaltylib):
    upstream_requests = UpstreamRequests()  # the orchestrator holds a weak reference
    penalizers = [  # in the order of the overlapped scheduler: what scales comes last
        penaltylib.BatchedFrequencyPenalizer,
        penaltylib.BatchedMinNewTokensPenalizer,
        penaltylib.BatchedPresencePenalizer,
        penaltylib.BatchedRepetitionPenalizer,
    ]
    orchestrator = penaltylib.BatchedPenalizerOrchestrator(
        VOCAB_SIZE, upstream_requests, penalizers
    )
    requests = [MirroredRequest(0, spec, 2, array("i", [9, 9]), array("i")) for spec in SPECS]
    numbers = random.Random(1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(12):
        logits = torch.randn((len(SPECS), VOCAB_SIZE), generator=generator) * 4
        expected = logits.clone()
        with torch.compiler.set_stance("force_eager"):
            orchestrator.apply(expected)
        chunks = [MirroredChunk(r, len(r.tokens) - 1, 1, samples=True) for r in requests]
        adjustments = plan_logit_adjustments(chunks, torch.device("cpu"))
        if adjustments is not None:
            adjustments.apply_to(logits)
        torch.testing.assert_close(logits, expected)
        drawn = [numbers.randrange(12) for _ in SPECS]
        orchestrator.cumulate_output_tokens(torch.tensor(drawn))
        for request, token in zip(requests, drawn, strict=True):
            request.tokens.append(token)
