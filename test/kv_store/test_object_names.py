"""Digests and names are upstream's, and whatever changes keys and values changes the digest."""

import pytest

from sgl_pipeline.kv_store.object_names import (
    MEMORY_LAYOUT,
    OBJECT_NAME,
    model_id,
    namespace_digest,
    object_name,
)


def one(layer: int) -> range:
    return range(layer, layer + 1)


IDENTITY = {"model_id": "name/ab-cd", "dtype": "bfloat16", "page_size": 16, "num_kv_heads": 8}


@pytest.mark.parametrize("layers", [(0, 1), (5, 9)])
@pytest.mark.parametrize("layout", [None, MEMORY_LAYOUT])
def test_names_are_those_of_upstreams_scheme(layers: tuple[int, int], layout: str | None) -> None:
    scheme = pytest.importorskip("sglang.srt.mem_cache.hicache_key_scheme")
    changes = {} if layout is None else {"object_layout": layout}
    namespace = scheme.derive_namespace(
        model_id="name/ab-cd",
        dtype=scheme.normalize_dtype("torch.bfloat16"),
        page_size=16,
        rank_replicated=False,
        total_kv_heads=8,
        head_group=8,
        layer_partition=1,
        **changes,
    )
    chunks, _ = scheme._layer_chunks(1, *layers, is_final_stage=False)
    digest = namespace_digest(**IDENTITY, **({} if layout is None else {"layout": layout}))
    assert digest == scheme.namespace_digest(namespace)
    names = [object_name(bytes(range(32)), digest, one(layer)) for layer in range(*layers)]
    assert names == [f"{bytes(range(32)).hex()}_{digest}_{chunk}_H0" for chunk in chunks]
    assert [OBJECT_NAME.fullmatch(name)[2] for name in names] == [digest] * len(names)


def test_a_plan_of_upstreams_has_our_names() -> None:
    scheme = pytest.importorskip("sglang.srt.mem_cache.hicache_key_scheme")
    plan = scheme.plan_unified_kv(
        model_id="name/ab-cd",
        dtype="bfloat16",
        page_size=16,
        rank_replicated=False,
        local_kv_heads=8,
        attn_tp_rank=0,
        attn_tp_size=1,
        attn_cp_size=1,
        start_layer=2,
        end_layer=5,
        is_final_stage=True,
        layer_partition=1,
    )
    digest = namespace_digest(**IDENTITY)
    hash_hex = bytes(32).hex()
    assert [f"{hash_hex}_{suffix}" for suffix in plan.suffixes] == [
        object_name(bytes(32), digest, one(layer)) for layer in (2, 3, 4)
    ]


def test_the_layers_of_a_stage_have_the_name_of_upstreams_stages() -> None:
    scheme = pytest.importorskip("sglang.srt.mem_cache.hicache_key_scheme")
    (chunk,), _ = scheme._layer_chunks(0, 2, 5, is_final_stage=False)
    digest = namespace_digest(**IDENTITY)
    name = object_name(bytes(32), digest, range(2, 5))
    assert name == f"{bytes(32).hex()}_{digest}_{chunk}_H0"
    assert OBJECT_NAME.fullmatch(name).groups() == (bytes(32).hex(), digest, "2", "5")


@pytest.mark.parametrize(
    "change",
    [
        {"model_id": "name/ab-ce"},
        {"dtype": "float16"},
        {"page_size": 32},
        {"num_kv_heads": 4},
        {"layout": MEMORY_LAYOUT},
    ],
)
def test_each_part_of_the_identity_counts(change: dict[str, object]) -> None:
    assert namespace_digest(**IDENTITY) != namespace_digest(**(IDENTITY | change))


def test_a_model_is_what_computes_it() -> None:
    name = model_id("served", "c-l-b", {"dtype": "bfloat16", "device": "cpu"})
    assert name == model_id("served", "c-l-b", {"device": "cpu", "dtype": "bfloat16"})
    assert name != model_id("served", "c-l-x", {"dtype": "bfloat16", "device": "cpu"})
    assert name != model_id("served", "c-l-b", {"dtype": "float16", "device": "cpu"})
