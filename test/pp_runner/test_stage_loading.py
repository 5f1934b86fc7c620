"""A worker that is given another stage keeps the weights that it has, and reads the others."""

import pytest
import torch
from support.assignments import tiny_assignment

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner import kv_capacity, stage_loading
from sgl_pipeline.pp_runner.attention.kv_pool import kv_page_bytes
from sgl_pipeline.pp_runner.base.kv_format import CODED_DTYPES
from sgl_pipeline.pp_runner.stage_loading import load_stage
from sgl_pipeline.wire.stage_messages import StageAssignment


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (tiny_assignment(1, 2, 2, 2), tiny_assignment(0, 6)),
        (tiny_assignment(0, 6), tiny_assignment(1, 3, 3)),
        (tiny_assignment(0, 2, 4), tiny_assignment(0, 3, 3)),
        (tiny_assignment(1, 3, 3), tiny_assignment(1, 2, 2, 2)),
    ],
)
def test_it_has_what_a_fresh_worker_would_have(
    before: StageAssignment, after: StageAssignment
) -> None:
    old = load_stage(before)
    kept = dict(old.model.layers)
    new, fresh = load_stage(after, old), load_stage(after)
    assert sorted(new.model.layers) == sorted(fresh.model.layers)
    for layer in set(kept) & set(new.model.layers):
        assert new.model.layers[layer] is kept[layer]
    assert new.model.loaded == fresh.model.loaded and new.capacity == fresh.capacity
    assert (new.model.is_first, new.model.is_last) == (fresh.model.is_first, fresh.model.is_last)
    if new.model.is_last:
        rows = torch.rand(3, new.rows.hidden_size)
        assert torch.equal(new.model.logits(rows), fresh.model.logits(rows))


@pytest.mark.parametrize("kv_cache_dtype", CODED_DTYPES)
def test_its_pages_hold_what_it_was_told(kv_cache_dtype: str) -> None:
    loaded = load_stage(tiny_assignment(0, 2, 4, kv_cache_dtype=kv_cache_dtype))
    assert loaded.shapes[0].page_dtype == CODED_DTYPES[kv_cache_dtype]
    assert loaded.capacity.page_bytes == kv_page_bytes(loaded.shapes, range(2))
    assert loaded.capacity.page_bytes < load_stage(tiny_assignment(0, 2, 4)).capacity.page_bytes / 2


def test_it_gets_on_with_each_tensor_that_it_reads() -> None:
    read: list[int] = []
    old = load_stage(tiny_assignment(0, 3, 3), on_read=lambda: read.append(0))
    load_stage(tiny_assignment(0, 6), old, on_read=lambda: read.append(1))
    load_stage(tiny_assignment(0, 6), on_read=lambda: read.append(2))
    # Another three layers and the head; of the rest it has all.
    assert 0 < read.count(1) < read.count(2) <= read.count(0) + read.count(1)


def test_layers_that_do_not_fit_are_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = load_stage(tiny_assignment(0, 3, 3))
    monkeypatch.setattr(stage_loading, "usable_memory_bytes", lambda *one: 1000)
    monkeypatch.setattr(type(old.model), "read_layer", lambda *one: pytest.fail("it was read"))
    with pytest.raises(ConfigurationError, match=r"no room for 3 more layers of .* MiB in all"):
        load_stage(tiny_assignment(0, 6), old)


@pytest.mark.parametrize(
    ("stage", "layer_counts", "missing"),
    [(1, (2, 4), "3 more layers"), (1, (5, 1), "embedding or head")],
)
def test_a_stage_that_does_not_fit_a_fresh_worker_is_refused_after_its_first_layer(
    monkeypatch: pytest.MonkeyPatch, stage: int, layer_counts: tuple[int, ...], missing: str
) -> None:
    """As one that takes over a dead host's stage: the kernel would kill it, and say nothing."""
    read: list[str] = []
    whole = load_stage(tiny_assignment(0, 6)).model.loaded
    monkeypatch.setattr(stage_loading, "usable_memory_bytes", lambda *one: 1000)
    with pytest.raises(ConfigurationError, match=f"no room for {missing} .*of stage 1; use more"):
        load_stage(tiny_assignment(stage, *layer_counts), on_read=lambda: read.append("tensor"))
    assert len(read) == sum("layers.0." in name for name in whole)


def test_room_that_others_take_meanwhile_is_missed_before_the_next_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room_bytes = iter([2**30, 2**30, 0])
    monkeypatch.setattr(stage_loading, "usable_memory_bytes", lambda *one: next(room_bytes))
    # Layers 0 to 2 were read, and the fourth was about to be.
    with pytest.raises(ConfigurationError, match="no room for 3 more layers"):
        load_stage(tiny_assignment(0, 6))


def test_fewer_pages_than_asked_for_do_where_the_worker_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page_bytes = load_stage(tiny_assignment(0, 6)).capacity.page_bytes
    # There is room for the weights, and then for few pages.
    monkeypatch.setattr(stage_loading, "usable_memory_bytes", lambda *one: 2**40)
    monkeypatch.setattr(kv_capacity, "available_memory_bytes", lambda: 4 * page_bytes)
    with pytest.raises(ConfigurationError, match="lower --max-total-tokens"):
        load_stage(tiny_assignment(0, 6))
    assert load_stage(tiny_assignment(0, 6, fewer_pages_do=True)).capacity.num_pages == 4
    monkeypatch.setattr(kv_capacity, "available_memory_bytes", lambda: page_bytes - 1)
    with pytest.raises(ConfigurationError, match="KV cache"):
        load_stage(tiny_assignment(0, 6, fewer_pages_do=True))
