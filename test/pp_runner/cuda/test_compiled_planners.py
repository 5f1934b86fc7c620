"""FlashInfer's compiled planners, fed as the stages feed them, for an H200 that is not there.

A CUDA graph is recorded with one plan and replayed with others: that is right only if all that the
host hands to the kernels stays the same whatever the step. Slow, and in need of wheels that the CPU
set lacks: `make check-cuda` runs it.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from support.compiled_kernels import (
    HostWrappers,
    NoEvent,
    blocks_per_multiprocessor,
    planners,
    run_by_check_cuda,
)
from support.paged_attention import attention_shape
from support.plan_contents import PlanContents, hopper_work, plan_contents

from benchmark.gpu.compiled_planners import PLANNERS
from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.base.step_inputs import PagedLayout
from sgl_pipeline.pp_runner.flashinfer.flashinfer_attention import (
    FlashInferAttention,
    workspace_bytes,
)
from sgl_pipeline.pp_runner.flashinfer.flashinfer_graph import GraphDecodeAttention

pytestmark = [pytest.mark.cuda_toolkit, pytest.mark.slow, run_by_check_cuda]

PAGE_SIZE = 16
PADDING_PAGE = 7
MOST_TOKENS = 40960
NUM_MULTIPROCESSORS = 132  # of an H200, as the stand-in reports
FA3_TILE_ROWS = 128
# Query and KV heads. The first two take the decode kernel, the others tensor cores.
HEADS = [(16, 8), (32, 32), (32, 8), (40, 8), (64, 8), (32, 4)]
ROWS = [1, 2, 8, 32, 64, 128, 192, 256]
# Blocks of the decode kernel that a multiprocessor holds: which it is depends on the compiler.
OCCUPANCIES = [1, 4, 16]
INDICES = torch.zeros(max(ROWS) * MOST_TOKENS // PAGE_SIZE, dtype=torch.int32)

E4M3 = torch.float8_e4m3fn
all_pages = pytest.mark.parametrize("coded", [None, E4M3], ids=["bf16", "e4m3"])
all_heads = pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0]}-{heads[1]}")


@pytest.fixture(scope="module", autouse=True)
def compiled_planners() -> Iterator[None]:
    with planners(*PLANNERS):
        yield


def shape_of(heads: tuple[int, int], coded: torch.dtype | None = None) -> AttentionShape:
    """With pages of bf16, or of e4m3 codes."""
    shape = attention_shape(*heads, 128, PAGE_SIZE, torch.bfloat16)
    return replace(shape, coded_dtype=coded)


def layout_of(key_counts: Sequence[int], rows: int | Sequence[int] = 1) -> PagedLayout:
    """A step of chunks that see so many keys, of `rows` rows each."""
    keys = torch.tensor(key_counts, dtype=torch.int32)
    lengths = torch.tensor(rows, dtype=torch.int32).expand(len(keys))
    pages = (keys + PAGE_SIZE - 1) // PAGE_SIZE

    def indptr(counts: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()

    return PagedLayout(
        page_size=PAGE_SIZE,
        num_decodes=len(keys) if rows == 1 else 0,
        query_indptr=indptr(lengths),
        page_indptr=indptr(pages),
        page_indices=torch.arange(int(pages.sum()), dtype=torch.int32),
        last_page_lengths=keys - (pages - 1) * PAGE_SIZE,
        kv_lengths=keys,
    )


def steps_of(rows: int) -> list[list[int]]:
    """How many keys each decode sees, in steps of up to `rows` decodes."""
    generator = random.Random(rows)
    some = max(1, rows // 2)
    return [
        [1] * rows,
        [PAGE_SIZE] * rows,
        [PAGE_SIZE + 1] * rows,
        [1000] * rows,
        [MOST_TOKENS] * rows,
        [MOST_TOKENS] + [1] * (rows - 1),
        [1] * (rows - 1) + [MOST_TOKENS],
        list(range(1, rows + 1)),
        [generator.randint(1, MOST_TOKENS) for _ in range(rows)],
        [round(2 ** generator.uniform(0, math.log2(MOST_TOKENS))) for _ in range(rows)],
        [MOST_TOKENS],
        [generator.randint(1, MOST_TOKENS) for _ in range(some)],
    ]


def check_blocks(
    contents: PlanContents, shape: AttentionShape, key_counts: Sequence[int], rows: Sequence[int]
) -> None:
    """Every tile of a request's rows meets every chunk of its keys in one block."""
    # FA2 is compiled for these alone; a tile of 32 rows would be a symbol that nothing defines.
    assert contents.tile_rows in (1, 16, 64, 128)
    group = shape.num_query_heads // shape.num_kv_heads
    expected = set()
    for request, (keys, own_rows) in enumerate(zip(key_counts, rows, strict=True)):
        whole_pages = math.ceil(keys / PAGE_SIZE) * PAGE_SIZE  # are dealt out
        # The decode kernel takes one row of a KV head's query heads at a time, in one block.
        packed_rows = 1 if contents.tile_rows == 1 else own_rows * group
        for tile in range(math.ceil(packed_rows / contents.tile_rows)):
            for chunk in range(math.ceil(whole_pages / contents.chunk_tokens)):
                expected.add((request, tile, chunk))
    assert set(contents.blocks) == expected
    assert set(contents.blocks.values()) == {1}


@all_heads
@all_pages
@pytest.mark.parametrize("rows", ROWS)
def test_a_decode_graph_has_one_plan_whatever_the_step(
    heads: tuple[int, int],
    coded: torch.dtype | None,
    rows: int,
    record_property: Callable[[str, int], None],
) -> None:
    shape = shape_of(heads, coded)
    most_bytes = 0
    parts = HostWrappers()(shape)
    for occupancy in OCCUPANCIES:
        wrapper = parts.open_graph_decode(rows, INDICES)
        graph = GraphDecodeAttention(shape, wrapper, NoEvent(), rows, PADDING_PAGE, INDICES)
        infos = set()
        with blocks_per_multiprocessor("decode-128-e4m3" if coded else "decode-128", occupancy):
            for key_counts in steps_of(rows):
                graph.plan(layout_of(key_counts))  # throws where the workspace does not suffice
                contents = plan_contents(wrapper, shape)
                padded = [*key_counts, *[1] * (rows - len(key_counts))]  # they see one key
                check_blocks(contents, shape, padded, [1] * rows)
                assert contents.partial_bytes <= workspace_bytes(shape)
                most_bytes = max(most_bytes, contents.partial_bytes)
                infos.add(contents.info)
        assert len(infos) == 1, f"{occupancy} blocks a multiprocessor: {infos}"
    record_property(f"needed {heads[0]}/{heads[1]}", most_bytes)
    record_property(f"given {heads[0]}/{heads[1]}", workspace_bytes(shape))


@all_heads
@all_pages
def test_without_a_graph_the_plan_follows_the_step(
    heads: tuple[int, int], coded: torch.dtype | None
) -> None:
    """So the test above can fail, and steps outside graphs are planned within the workspace too."""
    shape = shape_of(heads, coded)
    wrappers = HostWrappers()
    attention = FlashInferAttention(shape, open_parts=wrappers)
    infos = set()
    for rows in (1, 64, 1000):
        for key_counts in steps_of(rows):
            attention.plan(layout_of(key_counts))
            contents = plan_contents(wrappers.parts.decode, shape)
            check_blocks(contents, shape, key_counts, [1] * len(key_counts))
            assert contents.partial_bytes <= workspace_bytes(shape)
            infos.add((len(key_counts), contents.info))
    assert len(infos) > len({rows for rows, _ in infos})


@all_heads
def test_planners_refuse_a_workspace_that_is_too_small(heads: tuple[int, int]) -> None:
    """So a plan that is made shows that ours is large enough."""
    import flashinfer

    shape = shape_of(heads)
    layout = layout_of([MOST_TOKENS])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(64 * 2**10, dtype=torch.uint8),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=heads[0] // heads[1] > 2,
        paged_kv_indptr_buffer=torch.zeros(9, dtype=torch.int32),
        paged_kv_indices_buffer=INDICES,
        paged_kv_last_page_len_buffer=torch.zeros(8, dtype=torch.int32),
    )
    graph = GraphDecodeAttention(shape, wrapper, NoEvent(), 8, PADDING_PAGE, INDICES)
    with pytest.raises(Exception, match=r"batch_\w+_tmp_v .*Increase the workspace"):
        graph.plan(layout)


def prefill_steps() -> Iterator[tuple[list[int], list[int]]]:
    """Keys and rows of each chunk, in steps of 1 to 1000 chunks of 2 rows to 8194."""
    generator = random.Random(5)
    for num_chunks in (1, 2, 10, 100, 999, 1000):
        for most_rows in (2, 8192 // num_chunks + 2):
            rows = [generator.randint(2, most_rows) for _ in range(num_chunks)]
            yield [own + generator.choice((0, 5, 4096)) for own in rows], rows


@all_heads
@all_pages
def test_fa2_prefill_takes_1_to_1000_chunks(
    heads: tuple[int, int], coded: torch.dtype | None
) -> None:
    shape = shape_of(heads, coded)
    wrappers = HostWrappers()
    attention = FlashInferAttention(shape, "fa2", open_parts=wrappers)
    for key_counts, rows in prefill_steps():
        attention.plan(layout_of(key_counts, rows))
        assert wrappers.parts.prefill._backend == "fa2"
        contents = plan_contents(wrappers.parts.prefill, shape)
        check_blocks(contents, shape, key_counts, rows)
        assert contents.partial_bytes <= workspace_bytes(shape)


@pytest.mark.parametrize("rows", [33, 128])
@all_heads
@all_pages
def test_fa2_prefill_splits_the_keys_of_a_short_chunk_within_the_workspace(
    heads: tuple[int, int], coded: torch.dtype | None, rows: int
) -> None:
    """The planner throws where it does not suffice."""
    shape = shape_of(heads, coded)
    wrappers = HostWrappers()
    FlashInferAttention(shape, "fa2", open_parts=wrappers).plan(layout_of([16_384 + rows], [rows]))
    contents = plan_contents(wrappers.parts.prefill, shape)
    check_blocks(contents, shape, [16_384 + rows], [rows])
    assert 0 < contents.partial_bytes <= workspace_bytes(shape)


@all_heads
def test_fa3_prefill_takes_1_to_1000_chunks(heads: tuple[int, int]) -> None:
    shape = shape_of(heads)
    wrappers = HostWrappers()
    attention = FlashInferAttention(shape, "fa3", open_parts=wrappers)
    for key_counts, rows in prefill_steps():
        attention.plan(layout_of(key_counts, rows))
        assert wrappers.parts.prefill._backend == "fa3"
        work = hopper_work(wrappers.parts.prefill, NUM_MULTIPROCESSORS)
        assert work.keys == dict(enumerate(key_counts))
        assert set(work.tiles.values()) == {1}
        assert set(work.tiles) == {
            (request, head, tile)
            for request, own_rows in enumerate(rows)
            for head in range(heads[0])
            for tile in range(math.ceil(own_rows / FA3_TILE_ROWS))
        }


def test_on_hopper_the_library_itself_takes_fa3_for_prefill() -> None:
    wrappers = HostWrappers()
    FlashInferAttention(shape_of((32, 8)), open_parts=wrappers).plan(layout_of([100], 50))
    assert wrappers.parts.prefill._backend == "fa3"
