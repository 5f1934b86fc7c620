"""What a stage keeps free of its GPU, against what its steps really keep alive."""

from hypothesis import given
from hypothesis import strategies as st

from sgl_pipeline.pp_runner.cuda.gpu_memory import (
    CONTEXT_BYTES,
    CardMemory,
    StageNeeds,
    kv_room,
)
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec, model_spec

MIB, GIB = 2**20, 2**30
NO_NEEDS = StageNeeds(0, 0, 0, 0)


def spec_of(**changes: object) -> DecoderSpec:
    """Qwen3-8B's sizes, with two layers."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    }
    return model_spec(config | changes)


SPECS = {
    "dense": spec_of(),
    "30B-A3B": spec_of(
        architectures=["Qwen3MoeForCausalLM"],
        hidden_size=2048,
        intermediate_size=6144,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
}


def test_weights_and_pages_of_a_gpu_of_its_own_take_the_fraction_that_was_asked_for():
    # 141 GiB of which a context of 0.4 GiB and weights of 16 GiB are used; steps need 3 GiB.
    card = CardMemory(141 * GIB, 141 * GIB - 16 * GIB - 400 * MIB, 16 * GIB)
    room = kv_room(card, StageNeeds(GIB, 0, GIB, GIB), 0.88, num_sharing=1)
    assert room.num_bytes == int(141 * GIB * 0.88) - 16 * GIB
    assert room.has_more


def test_what_steps_need_and_what_other_programs_hold_is_never_given_to_pages():
    needs = StageNeeds(GIB, 100 * MIB, 300 * MIB, 1200 * MIB)
    # Another program holds 5 of 24 GiB, the context takes 400 MiB.
    card = CardMemory(24 * GIB, 24 * GIB - 5 * GIB - 400 * MIB - 8 * GIB, 8 * GIB)
    room = kv_room(card, needs, 0.88, num_sharing=1)
    assert room.num_bytes == card.free_bytes - (GIB + 1600 * MIB)
    assert not room.has_more


def test_four_stages_on_a_small_gpu_count_a_context_each():
    needs = StageNeeds(GIB, 0, 300 * MIB, 0)
    card = CardMemory(24 * GIB, 24 * GIB - 4 * (2 * GIB + CONTEXT_BYTES), 2 * GIB)
    room = kv_room(card, needs, 0.95, num_sharing=4)
    assert room.num_bytes == 6 * GIB - CONTEXT_BYTES - 2 * GIB - needs.total_bytes
    assert not room.has_more


@given(
    weights=st.lists(st.integers(0, 4000 * MIB), min_size=1, max_size=5),
    others_bytes=st.integers(0, 3 * GIB),
    needs_bytes=st.integers(0, 2 * GIB),
    fraction=st.floats(0.1, 0.99),
)
def test_stages_that_have_all_loaded_never_promise_more_than_there_is(
    weights: list[int], others_bytes: int, needs_bytes: int, fraction: float
):
    """The pool is that of the stage with the least room, as pages are the same everywhere."""
    num_sharing, total_bytes = len(weights), 40 * GIB
    used_bytes = sum(weights) + num_sharing * CONTEXT_BYTES + others_bytes
    needs = StageNeeds(needs_bytes, 0, 0, 0)
    rooms = [
        kv_room(
            CardMemory(total_bytes, total_bytes - used_bytes, own), needs, fraction, num_sharing
        )
        for own in weights
    ]
    pool_bytes = min(room.num_bytes for room in rooms)
    taken_bytes = used_bytes + num_sharing * (pool_bytes + needs_bytes)
    assert pool_bytes <= 0 or taken_bytes <= total_bytes
    statics = sum(weights) + num_sharing * pool_bytes
    assert pool_bytes <= 0 or statics <= total_bytes * fraction
    for own, room in zip(weights, rooms, strict=True):
        card = CardMemory(total_bytes, total_bytes - used_bytes, own)
        most = kv_room(card, needs, 0.995, num_sharing)
        assert (most.num_bytes > room.num_bytes) is room.has_more
