"""How many pages fit, on a machine without a GPU."""

import dataclasses

import msgspec
import pytest
import torch
from support.worker_messages import hello

from sgl_pipeline.args import MigrationArgs, PipelineArgs, SchedulingArgs, StageArgs
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pipeline.assignment import assign
from sgl_pipeline.pp_runner import kv_capacity
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.attention.state_pool import StatePool
from sgl_pipeline.pp_runner.base.layer_counts import most_layers
from sgl_pipeline.pp_runner.cuda.gpu_memory import CardMemory
from sgl_pipeline.pp_runner.kv_capacity import (
    DEFAULT_CPU_KV_TOKENS,
    KvCapacity,
    kv_page_capacity,
)
from sgl_pipeline.pp_runner.model.model_spec import model_spec
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.stage_messages import StageAssignment

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GIB = 2**30
SPEC = model_spec(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
)


def assignment(max_total_tokens: int | None, page_size: int = 16) -> StageAssignment:
    return StageAssignment(
        stage=1,
        plan=StagePlan(0, (4, 2)),
        args=StageArgs(
            model_path="",
            load_format="dummy",
            dtype="float32",
            max_total_tokens=max_total_tokens,
        ),
        page_size=page_size,
        links=(),
        cpu_threads=1,
        cpu_cores=(),
    )


HYBRID = model_spec(
    {
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "layer_types": ["full_attention", *["linear_attention"] * 4, "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
    }
)


def hybrid_assignment(counts: tuple[int, ...], **settings: int) -> StageAssignment:
    """Of stage 1."""
    plain = assignment(160)
    args = dataclasses.replace(plain.args, **settings)
    return msgspec.structs.replace(plain, plan=StagePlan(0, counts), args=args)


def test_layers_with_states_have_no_pages_and_their_states_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Four heads of 16 x 8 fp32 numbers, and three inputs of 2 * 2 * 16 + 4 * 8 channels.
    slot_bytes = 4 * 16 * 8 * 4 + 3 * 96 * 4
    assert [spec and spec.bytes_per_slot("float32") for spec in HYBRID.states] == [
        *(None, slot_bytes, slot_bytes, slot_bytes, slot_bytes, None)
    ]
    page_bytes = 2 * 16 * 2 * 8 * 4
    mixed, of_states = hybrid_assignment((3, 3), num_state_slots=7), hybrid_assignment((1, 4, 1))
    assert kv_page_capacity(mixed, HYBRID, CPU, torch.float32) == KvCapacity(10, page_bytes, 7)
    assert kv_page_capacity(of_states, HYBRID, CPU, torch.float32) == KvCapacity(10, 0)
    # Half of the layers get half of the memory: for the states of two, and for ten pages.
    enough = 2 * (7 * 2 * slot_bytes + 10 * page_bytes)
    monkeypatch.setattr(kv_capacity, "available_memory_bytes", lambda: enough)
    assert kv_page_capacity(mixed, HYBRID, CPU, torch.float32).num_pages == 10
    monkeypatch.setattr(kv_capacity, "available_memory_bytes", lambda: enough - 2)
    with pytest.raises(ConfigurationError, match=r"7 state slots take .* lower --max-mamba-cache"):
        kv_page_capacity(mixed, HYBRID, CPU, torch.float32)
    # When a host is lost: the same share of each, one of each at least.
    fewer = msgspec.structs.replace(mixed, fewer_pages_do=True)
    half = enough // 2
    for room, slots, pages in ((enough, 7, 10), (half, 3, 5), (2 * page_bytes, 1, None)):
        monkeypatch.setattr(kv_capacity, "available_memory_bytes", lambda room=room: room)
        if pages is None:
            with pytest.raises(ConfigurationError, match=r"1 state slots take"):
                kv_page_capacity(fewer, HYBRID, CPU, torch.float32)
            continue
        capacity = kv_page_capacity(fewer, HYBRID, CPU, torch.float32)
        assert capacity.num_state_slots == slots and capacity.num_pages >= pages
        used = slots * 2 * slot_bytes + capacity.num_pages * page_bytes
        assert used <= room // 2


@pytest.mark.parametrize("counts", [(3, 3), (2, 4), (1, 4, 1), (6,)])
@pytest.mark.parametrize("spare_layers", [1, 2])
def test_a_stage_has_room_for_the_layers_of_each_kind_that_may_come(
    counts: tuple[int, ...], spare_layers: int
) -> None:
    """Under every plan that may follow another: found by trying all of them."""
    have_states = [one is not None for one in HYBRID.states]
    for count in counts:
        limit = min(count + spare_layers, 6)
        runs = [range(start, end) for start in range(7) for end in range(start, 7)]
        held = [{*one, *other} for one in runs for other in runs]
        most = most_layers(have_states, limit)
        of_plans = [one for one in held if len(one) <= limit]
        assert most.with_states == max(sum(have_states[i] for i in one) for one in of_plans)
        assert most.with_pages == max(sum(not have_states[i] for i in one) for one in of_plans)
        shapes = HYBRID.attention_shapes(16, torch.float32, CPU)
        pool = KvPool(range(count), shapes, 10, max_layers=most.with_pages)
        assert pool.num_bytes == most.with_pages * 10 * shapes[0].page_bytes
        states = StatePool(
            range(count), HYBRID.states, 3, torch.float32, CPU, max_layers=most.with_states
        )
        slot_bytes = HYBRID.states[1].bytes_per_slot("float32")
        assert states.num_bytes == most.with_states * 3 * slot_bytes


@pytest.mark.parametrize("counts", [(3, 3), (2, 4), (1, 4, 1), (6,)])
def test_a_server_has_pages_of_the_layers_without_states_alone(counts: tuple[int, ...]) -> None:
    """As its workers are told: nobody else sets what a stage may hold."""
    stages = dataclasses.replace(assignment(160).args, num_stages=len(counts))
    args = PipelineArgs(
        stages=stages, scheduling=SchedulingArgs(num_state_slots=7, radix_cache=False)
    )
    hellos = [hello(worker) for worker in range(len(counts))]
    shapes = HYBRID.attention_shapes(args.scheduling.page_size, torch.float32, CPU)
    for own in assign(hellos, StagePlan(0, counts), args):
        layers = own.plan.layers_of(own.stage)
        page_bytes = sum(shapes[layer].page_bytes for layer in layers)
        capacity = kv_page_capacity(own, HYBRID, CPU, torch.float32)
        assert capacity.page_bytes == page_bytes
        pool = KvPool(layers, shapes, capacity.num_pages, max_layers=own.max_layers or 0)
        assert pool.num_bytes == capacity.num_pages * page_bytes


@pytest.mark.parametrize("mode", ["off", "manual"])
def test_a_server_without_states_has_pages_of_all_layers_that_it_may_hold(mode: str) -> None:
    args = PipelineArgs(
        stages=dataclasses.replace(assignment(160).args, num_stages=2),
        migration=MigrationArgs(mode=mode, spare_layers=1),
    )
    for own in assign([hello(0), hello(1)], StagePlan(0, (4, 2)), args):
        shapes = SPEC.attention_shapes(own.page_size, torch.float32, CPU)
        layers = own.plan.layers_of(own.stage)
        most = len(layers) + (mode == "manual")
        capacity = kv_page_capacity(own, SPEC, CPU, torch.float32)
        assert capacity.page_bytes == most * shapes[0].page_bytes
        pool = KvPool(layers, shapes, capacity.num_pages, max_layers=own.max_layers or 0)
        assert pool.num_bytes == capacity.num_pages * capacity.page_bytes


def test_capacity_on_a_cpu_is_a_fixed_size_or_what_was_asked_for():
    default = kv_page_capacity(assignment(None), SPEC, CPU, torch.float32)
    assert default.num_pages * 16 == DEFAULT_CPU_KV_TOKENS
    # Two layers of keys and values for 16 tokens, 2 heads of 8 fp32 numbers.
    assert default.page_bytes == 2 * 2 * 16 * 2 * 8 * 4
    assert kv_page_capacity(assignment(100), SPEC, CPU, torch.float32).num_pages == 6


def test_pages_are_those_of_the_most_layers_that_a_stage_may_hold():
    fixed = kv_page_capacity(assignment(None), SPEC, CPU, torch.float32)
    may_hold_four = msgspec.structs.replace(assignment(None), max_layers=4)
    moving = kv_page_capacity(may_hold_four, SPEC, CPU, torch.float32)
    assert moving.page_bytes == 2 * fixed.page_bytes


@pytest.mark.parametrize(("kv_cache_dtype", "row_bytes"), [("int8", 8 + 4), ("fp8_e4m3", 8)])
def test_memory_holds_as_many_more_tokens_as_their_codes_are_smaller(
    kv_cache_dtype: str, row_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_capacity, "available_memory_bytes", lambda: GIB)
    most = msgspec.structs.replace(assignment(10**9), fewer_pages_do=True)
    plain = kv_page_capacity(most, SPEC, CPU, torch.float32)
    coded_args = dataclasses.replace(most.args, kv_cache_dtype=kv_cache_dtype)
    coded_assignment = msgspec.structs.replace(most, args=coded_args)
    coded = kv_page_capacity(coded_assignment, SPEC, CPU, torch.float32)
    assert coded.page_bytes == 2 * 2 * 16 * 2 * row_bytes
    assert coded.num_pages == pytest.approx(plain.num_pages * 8 * 4 / row_bytes, abs=2)


def test_less_than_a_page_names_the_knobs():
    with pytest.raises(ConfigurationError, match=r"--max-total-tokens 15 .* --page-size"):
        kv_page_capacity(assignment(15), SPEC, CPU, torch.float32)


def test_more_than_memory_holds_names_the_limit_and_the_knob():
    with pytest.raises(ConfigurationError, match=r"room for \d+ MiB.*lower --max-total-tokens"):
        kv_page_capacity(assignment(10**13), SPEC, CPU, torch.float32)


STAGE_FIELDS = {field.name for field in dataclasses.fields(StageArgs)}


def on_a_gpu(
    card: CardMemory,
    stages_on_gpu: int = 1,
    max_total_tokens: int | None = None,
    layer_bytes: int = 0,
    **changes: object,
) -> KvCapacity:
    plain = assignment(max_total_tokens)
    arguments = {name: changes.pop(name) for name in STAGE_FIELDS & {*changes}}
    args = dataclasses.replace(
        plain.args,
        device="cuda",
        dtype="bfloat16",
        attention_backend="flashinfer",
        **{"memory_fraction": 0.8, **arguments},
    )
    own = msgspec.structs.replace(plain, args=args, stages_on_gpu=stages_on_gpu, **changes)
    return kv_page_capacity(
        own, SPEC, CUDA, torch.bfloat16, lambda _: card, layer_bytes=layer_bytes
    )


ROOMY = CardMemory(24 * GIB, 22 * GIB, 1 * GIB)


def test_a_gpu_keeps_room_for_layers_that_may_come():
    """Two may, and the weights of one of them are here already."""
    fixed = on_a_gpu(ROOMY)
    may_come = {"max_layers": 4, "spare_layers": (1,)}
    pages_only = on_a_gpu(ROOMY, **may_come)
    assert pages_only.num_pages == fixed.num_pages // 2
    with_weights = on_a_gpu(ROOMY, layer_bytes=GIB, **may_come)
    lost_bytes = (pages_only.num_pages - with_weights.num_pages) * with_weights.page_bytes
    assert abs(lost_bytes - GIB) <= with_weights.page_bytes


def test_a_gpu_is_filled_to_the_fraction_that_was_asked_for():
    capacity = on_a_gpu(ROOMY)
    assert capacity.page_bytes == 2 * 2 * 16 * 2 * 8 * 2
    assert capacity.num_pages == (int(24 * GIB * 0.8) - GIB) // capacity.page_bytes
    shared = on_a_gpu(ROOMY, stages_on_gpu=2)
    assert shared.num_pages == (int(24 * GIB * 0.8) // 2 - GIB) // capacity.page_bytes


def test_pages_of_e4m3_hold_twice_the_tokens_of_a_gpu():
    plain, coded = on_a_gpu(ROOMY), on_a_gpu(ROOMY, kv_cache_dtype="fp8_e4m3")
    assert coded.page_bytes == plain.page_bytes // 2
    assert coded.num_pages == pytest.approx(2 * plain.num_pages, abs=2)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [({"graphs": "off"}, "attention_bytes"), ({"links": ("nccl:path",)}, "link_bytes")],
)
def test_graphs_and_nccl_take_from_the_pages_of_a_full_gpu(changes, kind):
    full = CardMemory(24 * GIB, 4 * GIB, 19 * GIB)
    with_graphs = on_a_gpu(full, memory_fraction=0.99)
    other = on_a_gpu(full, memory_fraction=0.99, **changes)
    grows = kind == "attention_bytes"
    assert (other.num_pages > with_graphs.num_pages) is grows
    assert abs(other.num_pages - with_graphs.num_pages) * other.page_bytes > GIB // 8


def test_a_full_gpu_is_refused_with_the_room_and_the_knobs_that_help():
    by_fraction = CardMemory(24 * GIB, 4 * GIB, 20 * GIB)
    with pytest.raises(
        ConfigurationError,
        match=r"^stage 1 has room for 0 MiB .*; raise --mem-fraction-static, or spread",
    ):
        on_a_gpu(by_fraction)
    by_needs = CardMemory(24 * GIB, GIB // 16, 23 * GIB)
    with pytest.raises(ConfigurationError, match=r"room for 0 MiB of .* MiB; spread .* \(--pp\)$"):
        on_a_gpu(by_needs, memory_fraction=0.99)
    with pytest.raises(ConfigurationError, match=r"; lower --max-total-tokens, or raise"):
        on_a_gpu(ROOMY, max_total_tokens=10**10)
