"""Models whose layers transformers computes give the tokens of its `generate`, at every depth."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.generic_families import (
    GENERIC_FAMILIES,
    VOCAB_SIZE,
    generated,
    generic_model,
    reference_logits,
    trace_once,
    write_model,
)
from support.local_pipeline import LocalPipeline
from support.stage_chain import StageChain, new_request
from support.tiny_models import tiny_model
from test_token_identity import CHUNKED

from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.pp_runner.model.generic.probe import probe
from sgl_pipeline.pp_runner.model.generic.spec import GenericSpec
from sgl_pipeline.pp_runner.model.generic.tested_families import TESTED_MODEL_TYPES
from sgl_pipeline.records.move_record import MoveOutcome
from sgl_pipeline.requests import GREEDY, Request, StopRules

pytestmark = pytest.mark.slow

COMPILED = {"dtype": "bfloat16", "attention_backend": "cpu", "layer_kernels": "cpu"}


@pytest.fixture(autouse=True)
def one_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    trace_once(monkeypatch)


@cache
def wide_model(name: str) -> Path:
    model_type, changes = WIDE_FAMILIES[name]
    return write_model(f"wide-{name}", model_type, {**WIDE, **changes})


@cache
def spec_of(path: Path) -> GenericSpec:
    return probe(path)


def make_requests(count: int = 4, num_tokens: int = 8) -> list[Request]:
    """Every other one begins like the first."""
    numbers = random.Random(count)
    shared = [numbers.randrange(VOCAB_SIZE) for _ in range(36)]
    requests = []
    for index in range(count):
        own = [numbers.randrange(VOCAB_SIZE) for _ in range(numbers.randrange(2, 18))]
        prompt = shared + own if index % 2 else own
        requests.append(Request(str(index), prompt, GREEDY, StopRules(num_tokens)))
    return requests


def pipeline(path: Path, layer_counts: tuple[int, ...], **arguments) -> LocalPipeline:
    return LocalPipeline(
        path,
        layer_counts,
        throttle=ThrottleArgs(**CHUNKED),
        spec=spec_of(path),
        num_pages=96,
        **arguments,
    )


def test_the_list_of_families_is_that_of_the_tests() -> None:
    assert {one.model_type for one in GENERIC_FAMILIES.values()} == TESTED_MODEL_TYPES


@pytest.mark.parametrize("name", GENERIC_FAMILIES)
def test_tokens_of_chunks_hits_and_a_move_are_those_of_generate(name: str) -> None:
    """Requests together in three stages; then, with their prefixes cached, again after a move. The
    layer that moved gives the same bits in either stage, and logits near those of transformers."""
    path = generic_model(name)
    wanted = [generated(path, list(one.prompt_ids), 4) for one in make_requests(4, 4)]
    assert len({token for tokens in wanted for token in tokens}) > 3
    served = pipeline(path, (2, 1, 1))
    assert served.run(make_requests(4, 4)) == wanted
    assert any(chunk.start for batch in served.microbatches for chunk in batch.chunks)
    assert served.finish_move((1, 2, 1)).outcome is MoveOutcome.DONE
    again = make_requests(4, 4)
    assert served.run(again) == wanted
    assert sum(one.cached_tokens for one in again) > 60
    prompt = [7 * place * place % VOCAB_SIZE for place in range(21)]
    served.runners[0].held_layers.hold(1)  # the layer that went from it
    models = [runner.held_layers.model for runner in served.runners]
    rows = []
    for counts in ((2, 1, 1), (1, 2, 1)):
        chain = StageChain(path, counts, spec=spec_of(path), stages=models)
        request = new_request(prompt)
        chain.generate(request, 4, 8)
        rows.append(torch.stack(chain.logits[request]))
    assert torch.equal(*rows)
    expected = reference_logits(path, prompt, request.output_ids[:-1])
    assert float((rows[0] - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "glm4"])
def test_tokens_are_those_of_our_own_layers(name: str) -> None:
    path = tiny_model(name)
    native = LocalPipeline(path, (2, 4), throttle=ThrottleArgs(**CHUNKED))
    generic = LocalPipeline(path, (2, 4), throttle=ThrottleArgs(**CHUNKED), spec=spec_of(path))
    assert generic.run(make_requests()) == native.run(make_requests())


# Rotary embeddings that depend on the length of a sequence.
BY_LENGTH: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("phi3", dict(GENERIC_FAMILIES["phi4-mini"].changes)),
    "dynamic": (
        "llama",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
        },
    ),
}


@pytest.mark.parametrize("name", BY_LENGTH)
def test_rotation_by_length_is_that_of_a_sequence_as_long_as_the_servers_context(
    name: str,
) -> None:
    """Up to the default context at all lengths; beyond it at the whole context, in any chunks."""
    path = write_model(f"by-length-{name}", *BY_LENGTH[name])
    spec = probe(path)
    default, longest = spec.own_context_lengths
    assert spec.context_length == default < longest
    prompt = [7 * place * place % VOCAB_SIZE for place in range(200)]
    chain = StageChain(path, (1, 3), spec=spec)
    for length in (9, default - 12):
        wanted = generated(path, prompt[:length], 12)
        assert chain.generate(new_request(prompt[:length]), 12, 20) == wanted
    rows = []
    chain = StageChain(path, (1, 3), spec=replace(spec, context_length=200))
    for chunk_length in (64, 200):
        request = new_request(prompt)
        chain.generate(request, 1, chunk_length)
        rows.append(chain.logits[request][0])
    (wanted_row,) = reference_logits(path, prompt, [])
    for row in rows:
        assert float((row - wanted_row).norm() / wanted_row.norm()) < 1e-4


# Plain layers, which are recorded.
# Softcaps, windows and narrow values; sinks, biases and experts; gelu and two geometries.
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("name", "kv_cache_dtype"),
    [
        ("qwen3", "auto"),
        ("phi3", "int8"),
        ("gemma2", "auto"),
        ("gpt-oss", "auto"),
        ("gemma4", "int8"),
        ("deepseek-v3", "int8"),
        ("minimax-m2", "fp8_e4m3"),
    ],
)
def test_tokens_in_bf16_do_not_depend_on_company_cuts_and_losses(
    name: str, kv_cache_dtype: str
) -> None:
    """Alone, together in other chunks and stages, and after a stage was lost."""
    path = generic_model(name)
    leaf = {**COMPILED, "kv_cache_dtype": kv_cache_dtype}
    single = LocalPipeline(path, (4,), spec=spec_of(path), num_pages=96, **leaf)
    alone = [single.run([one])[0] for one in make_requests()]
    served = pipeline(path, (1, 3), log_pages=96, **leaf)

    def after_step(number: int) -> None:
        if number == 6:
            assert served.scheduler.num_running
            served.lose(1)

    assert served.run(make_requests(), after_step) == alone


# Wide enough that torch's own products of one row and of many differ in their last bits.
WIDE = {"hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 64}
WIDE_EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 512}
WIDE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"intermediate_size": 1536}),
    "gemma3": ("gemma3_text", {"intermediate_size": 1536, "sliding_window": 8}),
    "qwen3-moe": ("qwen3_moe", {**WIDE_EXPERTS, "num_experts": 8}),
    "gpt-oss": ("gpt_oss", {**WIDE_EXPERTS, "num_local_experts": 8, "intermediate_size": 512}),
    "glm4-moe": (
        "glm4_moe",
        {**WIDE_EXPERTS, "n_routed_experts": 8, "n_group": 1, "topk_group": 1},
    ),
}


@pytest.mark.compiler
@pytest.mark.parametrize("name", WIDE_FAMILIES)
@pytest.mark.parametrize("kernels", ["cpu", "torch"])
def test_a_row_has_the_same_bits_in_any_microbatch(name: str, kernels: str) -> None:
    """In bf16: one prompt whole and alone, and in pieces beside two others that decode."""
    path = wide_model(name)
    prompt = [5 * place % VOCAB_SIZE for place in range(19)]
    rows = []
    chain = StageChain(
        path,
        (2,),
        spec=spec_of(path),
        dtype=torch.bfloat16,
        attention="cpu",
        kernels=kernels,
        num_pages=32,
    )
    for others in (0, 2):
        request, beside = new_request(prompt), [new_request([3 + one, 9]) for one in range(others)]
        for one in beside:
            chain.step((one, 2))
        while len(request.output_ids) < 4:
            left = request.num_tokens - request.num_scheduled
            chain.step(*[(one, 1) for one in beside], (request, min(left, 7) if others else left))
        rows.append(torch.stack(chain.logits[request]))
    assert torch.equal(*rows)
