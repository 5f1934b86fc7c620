"""The stage models, chained in one process, against transformers on tiny seeded checkpoints."""

from collections import Counter
from functools import cache

import pytest
import torch
from support.stage_chain import StageChain, new_request
from support.tiny_models import (
    NUM_LAYERS,
    TINY_MODELS,
    VOCAB_SIZE,
    same_model_for_transformers,
    tiny_model,
)
from transformers import AutoModelForCausalLM, PreTrainedModel

# Where the reference's two best logits are nearer than this, either token counts as right.
TIE = 1e-4
NUM_NEW_TOKENS = 12
PROMPT_LENGTHS = (37, 5, 18)
SPLITS = ((6,), (3, 3), (2, 2, 1, 1), (1, 5), (4, 1, 1))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in PROMPT_LENGTHS
    ]


@cache
def reference_model(name: str, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        same_model_for_transformers(name), dtype=dtype, attn_implementation="eager"
    )


def next_logits(name: str, ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The reference's logits [V] in fp32 after `ids`, computed from the whole sequence."""
    return _next_logits(name, tuple(ids), dtype)


@cache
@torch.inference_mode()
def _next_logits(name: str, ids: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return reference_model(name, dtype)(torch.tensor([ids])).logits[0, -1].float()


@cache
def reference(name: str, prompt: tuple[int, ...]) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens in fp32 and their logits [NUM_NEW_TOKENS, V]."""
    ids, rows = list(prompt), []
    for _ in range(NUM_NEW_TOKENS):
        rows.append(next_logits(name, ids))
        ids.append(int(rows[-1].argmax()))
    return ids[len(prompt) :], torch.stack(rows)


def assert_same_tokens(chain: StageChain, name: str, request) -> None:
    """Tokens equal the reference's up to its first tie; until then the logits are near too."""
    expected, expected_logits = reference(name, tuple(request.prompt_ids))
    for index, (got, want) in enumerate(zip(request.output_ids, expected, strict=True)):
        difference = (chain.logits[request][index] - expected_logits[index]).abs().max()
        assert difference < 2e-4 * expected_logits[index].abs().max()
        if got != want:
            best, second = expected_logits[index].topk(2).values
            assert best - second < TIE, f"token {index} of {name}: {got} is not {want}"
            print(f"tie counted: {name}, token {index}")
            return


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY_MODELS)
def test_greedy_tokens_equal_transformers(name):
    """Each split is that of several models; that splits have the same tokens is for
    test_token_identity.py."""
    chain = StageChain(tiny_model(name), SPLITS[TINY_MODELS.index(name) % len(SPLITS)])
    request = new_request(prompts()[0])
    chain.generate(request, NUM_NEW_TOKENS)
    assert_same_tokens(chain, name, request)


@pytest.mark.parametrize("name", ["qwen3", "llama3-rope", "glm4", "chatglm", "qwen3-layer-types"])
@pytest.mark.compiler
def test_compiled_kernels_give_the_tokens_of_transformers(name):
    chain = StageChain(tiny_model(name), (2, 4), page_size=16, attention="cpu", kernels="cpu")
    request = new_request(prompts()[0])
    chain.generate(request, NUM_NEW_TOKENS, chunk_length=10)
    assert_same_tokens(chain, name, request)


# Each length of chunks meets each model and each size of pages.
@pytest.mark.parametrize("name", ["qwen3", "qwen2-moe", "glm4"])
@pytest.mark.parametrize("chunk_length", [1, 7, 16])
def test_chunked_prefill_gives_the_tokens_of_whole_prefill(chunk_length, name):
    page_size = 16 if (chunk_length == 7) == (name == "glm4") else 1
    chain = StageChain(tiny_model(name), (3, 3), page_size=page_size)
    request = new_request(prompts()[0])
    chain.generate(request, NUM_NEW_TOKENS, chunk_length)
    assert_same_tokens(chain, name, request)


@pytest.mark.parametrize("name", ["llama3-rope", "qwen3-moe"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_requests_that_share_steps_get_the_tokens_they_get_alone(page_size, name):
    chain = StageChain(tiny_model(name), (2, 4), page_size=page_size)
    long, short, late = requests = [new_request(prompt) for prompt in prompts()]
    chain.step((long, 20), (short, 5))
    chain.step((short, 1), (long, 10))
    chain.step((short, 1), (long, 7), (late, 9))
    chain.step((long, 1), (short, 1), (late, 9))
    while any(len(request.output_ids) < NUM_NEW_TOKENS for request in requests):
        chain.step(*((r, 1) for r in requests if len(r.output_ids) < NUM_NEW_TOKENS))
    for request in requests:
        assert_same_tokens(chain, name, request)


@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize("kernels", ["torch", pytest.param("cpu", marks=pytest.mark.compiler)])
def test_bf16_logits_are_as_near_to_fp32_as_those_of_transformers(kernels, name):
    # Tolerance: at most 1.5 times the root mean square error of transformers' own bf16 logits,
    # because the error of random weights depends on the model far more than on who computes it: a
    # rounding that sends one token to another expert changes it for good.
    chain = StageChain(tiny_model(name), (3, 3), dtype=torch.bfloat16, kernels=kernels)
    requests = [new_request(prompt) for prompt in prompts()]
    for request in requests:
        chain.generate(request, 1)
    exact = torch.stack([next_logits(name, r.prompt_ids) for r in requests])
    theirs = torch.stack([next_logits(name, r.prompt_ids, torch.bfloat16) for r in requests])
    ours = torch.stack([chain.logits[r][0] for r in requests])
    error = (ours - exact).square().mean().sqrt()
    assert error <= 1.5 * (theirs - exact).square().mean().sqrt()
    assert error <= 0.15 * exact.square().mean().sqrt()


def test_a_step_without_samples_gives_no_logits():
    chain = StageChain(tiny_model("llama"), (6,))
    request = new_request(prompts()[0])
    chain.step((request, 10))
    assert request not in chain.logits


@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "mistral-sharded"])
def test_a_stage_loads_its_own_tensors_and_no_others(name):
    chain = StageChain(tiny_model(name), (1, 3, 2))
    layers_of_stage = (range(1), range(1, 4), range(4, NUM_LAYERS))
    for stage, layers in zip(chain.stages, layers_of_stage, strict=True):
        in_layers = {tensor for tensor in stage.loaded if tensor.startswith("model.layers.")}
        assert {int(tensor.split(".")[2]) for tensor in in_layers} == set(layers)
    head = "model.embed_tokens.weight" if name == "qwen2-tied" else "lm_head.weight"
    outside_layers = [
        {tensor for tensor in stage.loaded if not tensor.startswith("model.layers.")}
        for stage in chain.stages
    ]
    assert outside_layers == [{"model.embed_tokens.weight"}, set(), {head, "model.norm.weight"}]
    assert list(chain.stages[1].layers) == [1, 2, 3]


def test_a_stage_loads_the_experts_of_its_own_layers_and_no_others():
    """`qwen3-moe`: layers 0 and 4 are dense, the others have 8 experts of 3 * 64 * 64 weights."""
    chain = StageChain(tiny_model("qwen3-moe"), (2, 1, 3))
    experts_per_layer = [
        Counter(int(name.split(".")[2]) for name in stage.loaded if ".experts." in name)
        for stage in chain.stages
    ]
    assert experts_per_layer == [{1: 24}, {2: 24}, {3: 24, 5: 24}]
    middle = chain.stages[1].loaded
    assert sum(size for name, size in middle.items() if ".mlp." in name) == 4 * (
        8 * 3 * 64 * 64 + 8 * 64
    )


def test_a_stage_has_experts_where_one_of_its_own_layers_has():
    splits = {"qwen3-moe": (1, 2, 1, 2), "qwen3": (3, 3)}
    found = {
        name: [stage.has_experts for stage in StageChain(tiny_model(name), counts).stages]
        for name, counts in splits.items()
    }
    # Layers 0 (stage 0) and 4 of qwen3-moe are dense, 4 and 5 share a stage; layer 3 has its own.
    assert found == {"qwen3-moe": [False, True, True, True], "qwen3": [False, False]}


def test_a_stage_of_a_chatglm_checkpoint_loads_its_own_tensors():
    first, last = StageChain(tiny_model("chatglm"), (2, 4)).stages
    layer = "transformer.encoder.layers.1."
    assert {name for name in first.loaded if name.startswith(layer)} == {
        layer + name
        for name in (
            "input_layernorm.weight",
            "self_attention.query_key_value.weight",
            "self_attention.query_key_value.bias",
            "self_attention.dense.weight",
            "post_attention_layernorm.weight",
            "mlp.dense_h_to_4h.weight",
            "mlp.dense_4h_to_h.weight",
        )
    }
    assert {name for name in last.loaded if ".layers." not in name} == {
        "transformer.encoder.final_layernorm.weight",
        "transformer.output_layer.weight",
    }


@pytest.mark.parametrize("name", ["qwen3", "qwen2-moe"])
def test_dummy_weights_give_one_model_however_it_is_split(tmp_path, name):
    (tmp_path / "config.json").write_text((tiny_model(name) / "config.json").read_text())
    outputs = []
    for split in ((6,), (2, 3, 1)):
        chain = StageChain(tmp_path, split, load_format="dummy")
        outputs.append(chain.generate(new_request(prompts()[1]), 8))
    assert outputs[0] == outputs[1]
