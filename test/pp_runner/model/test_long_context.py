"""Models whose context is stretched, beyond the lengths of their training, against transformers.

`dynamic` and `longrope` rotate by the length of the sequence there and by the server's context
here: the tests say where the two are the same and where they are not.
"""

from functools import cache

import pytest
import torch
from support.local_pipeline import LocalPipeline
from support.stage_chain import StageChain, new_request
from support.tiny_models import VOCAB_SIZE, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.requests import GREEDY, Request, StopRules

NUM_NEW_TOKENS = 16
CHUNK_LENGTH = 30
# Where the reference's two best logits are nearer than this, either token counts as right.
TIE = 1e-4
KERNELS = ("torch", pytest.param("cpu", marks=pytest.mark.compiler))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompt_of(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


@cache
def reference_model(name: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model(name), dtype=torch.float32, attn_implementation="eager"
    )
    model.generation_config.eos_token_id = None
    return model


@torch.inference_mode()
def generated(name: str, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """The tokens of transformers' `generate`, and their logits [NUM_NEW_TOKENS, V]."""
    output = reference_model(name).generate(
        torch.tensor([prompt]),
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    assert output.logits is not None
    return output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits)


def served(
    name: str, prompt: list[int], context_length: int | None, kernels: str = "torch"
) -> tuple[list[int], torch.Tensor]:
    """The same of two stages that prefill in chunks."""
    chain = StageChain(
        tiny_model(name),
        (2, 4),
        page_size=16,
        attention=kernels,
        kernels=kernels,
        context_length=context_length,
    )
    request = new_request(prompt)
    tokens = chain.generate(request, NUM_NEW_TOKENS, CHUNK_LENGTH)
    return tokens, torch.stack(chain.logits[request])


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a share of the largest logit."""
    return float((found - expected).abs().max() / expected.abs().max())


def assert_same(
    found: tuple[list[int], torch.Tensor], expected: tuple[list[int], torch.Tensor]
) -> None:
    """Equal tokens and near logits, up to the reference's first tie."""
    for index, (got, want) in enumerate(zip(found[0], expected[0], strict=True)):
        assert error_of(found[1][index], expected[1][index]) < 2e-4
        if got != want:
            best, second = expected[1][index].topk(2).values
            assert best - second < TIE, f"token {index}: {got} is not {want}"
            return


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("length", [20, 100])
@pytest.mark.parametrize("name", ["qwen2-yarn", "qwen3-yarn-mscale", "glm4-yarn"])
def test_yarn_gives_the_tokens_of_generate_within_and_beyond_the_original_context(
    name: str, length: int, kernels: str
) -> None:
    prompt = prompt_of(length)
    assert_same(served(name, prompt, None, kernels), generated(name, prompt))


@pytest.mark.parametrize("name", ["llama-longrope", "llama-dynamic"])
def test_up_to_its_own_context_a_model_of_either_kind_gives_the_tokens_of_generate(
    name: str,
) -> None:
    """64 tokens, the last of which is never an input."""
    prompt = prompt_of(65 - NUM_NEW_TOKENS)
    assert_same(served(name, prompt, None), generated(name, prompt))


@pytest.mark.parametrize("kernels", KERNELS)
def test_longrope_beyond_its_original_context_gives_the_tokens_of_generate(kernels: str) -> None:
    """Where the prompt alone is longer: `generate` has rotated all of its keys by long factors."""
    name, prompt = "llama-longrope", prompt_of(100)
    assert_same(served(name, prompt, 256, kernels), generated(name, prompt))


def test_longrope_with_a_long_context_rotates_short_prompts_otherwise_than_generate() -> None:
    name, prompt = "llama-longrope", prompt_of(20)
    expected = generated(name, prompt)[1][0]
    assert error_of(served(name, prompt, 64)[1][0], expected) < 2e-4
    assert error_of(served(name, prompt, 256)[1][0], expected) > 0.01


@pytest.mark.parametrize("kernels", KERNELS)
def test_dynamic_gives_the_logits_of_a_sequence_as_long_as_the_context(kernels: str) -> None:
    name, prompt = "llama-dynamic", prompt_of(200)
    with torch.inference_mode():
        expected = reference_model(name)(torch.tensor([prompt])).logits[0, -1]
    assert error_of(served(name, prompt, 200, kernels)[1][0], expected) < 2e-4
    # transformers would rotate by another base, this server rotates by that of its context.
    assert error_of(served(name, prompt, 256)[1][0], expected) > 0.01


def test_requests_of_all_lengths_share_steps_and_prefixes_of_a_stretched_context() -> None:
    """The whole runtime: lengths within and beyond the original context, then prefix hits."""
    pipeline = LocalPipeline(
        tiny_model("qwen2-yarn"),
        (3, 3),
        throttle=ThrottleArgs(max_prefill_tokens=24, min_prefill_tokens=4),
    )
    assert pipeline.scheduler.limits.context_length == 128, "4 times the published 32"
    lengths = (10, 50, 100)
    for turn in range(2):
        stops = StopRules(max_new_tokens=NUM_NEW_TOKENS)
        requests = [
            Request(f"{turn}-{length}", prompt_of(length), GREEDY, stops) for length in lengths
        ]
        pipeline.run(requests)
        for request in requests:
            expected, logits = generated("qwen2-yarn", list(request.prompt_ids))
            margins = logits.topk(2).values.diff().abs()
            assert float(margins.min()) > TIE, "a tie: choose other prompts"
            assert request.output_ids == expected
        assert (max(request.cached_tokens for request in requests) > 0) == bool(turn)
