"""vLLM's FA3 as a rival: what it is called with, by its interface and its operators' schemas."""

import io
import lzma
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.vllm_interface import OperatorCalls, attend_by_definition, import_vllm_interface

from benchmark.gpu import pack_vllm_attention, part_kernels, vllm_attention
from benchmark.gpu.attention_times import VLLM, prefill_choices, rival_choices, time_attention
from benchmark.gpu.checks import ATTENTION_BOUND, random_layout, row_error
from benchmark.gpu.pack_vllm_attention import FILES, pack
from benchmark.gpu.session import Budget, Session
from benchmark.gpu.shapes import Extent, Step, decode_step, mixed_step, prefill_step
from benchmark.gpu.vllm_attention import VllmAttention, VllmFunctions, page_table
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape

SHAPE = AttentionShape(
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=64,
    value_dim=64,
    page_size=16,
    scale=0.125,
    dtype=torch.bfloat16,
    device=torch.device("cpu"),
)
STEPS = (decode_step(5, 40), prefill_step(30, 20), prefill_step(40), mixed_step(3, 17, 40))
every_step = pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)


def expected(step: Step) -> torch.Tensor:
    return time_attention(SHAPE, step, prefill_choices(SHAPE.device)["torch"]).output


def schedule(*, batch_size: int, cache_seqlens: torch.Tensor, **given: Any) -> torch.Tensor:
    return torch.full((batch_size,), int(cache_seqlens.max()), dtype=torch.int32)


def attend(
    *,
    out: torch.Tensor,
    block_table: torch.Tensor,
    scheduler_metadata: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    num_splits: int,
    fa_version: int,
    **given: Any,
) -> torch.Tensor:
    assert causal and fa_version == 3 and num_splits == 0
    assert max_seqlen_q == given["cu_seqlens_q"].diff().max()
    assert scheduler_metadata[0] == max_seqlen_k == given["seqused_k"].max()
    return out.copy_(attend_by_definition(page_table=block_table, **given))


@every_step
def test_it_attends_to_our_pages(step: Step) -> None:
    def rival(shape: AttentionShape, layout: object) -> VllmAttention:
        return VllmAttention(shape, lambda: VllmFunctions(schedule, attend))

    found = time_attention(SHAPE, step, rival)
    assert row_error(found.output, expected(step)) < ATTENTION_BOUND
    assert found.plan_ms > 0


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> OperatorCalls:
    """The pack's own interface, whose operators have kernels for CPUs."""
    interface = import_vllm_interface(tmp_path_factory.mktemp("driver"))
    assert interface.FA3_AVAILABLE, interface.FA3_UNAVAILABLE_REASON
    return OperatorCalls()


@every_step
def test_the_packs_interface_and_schemas_take_its_calls(calls: OperatorCalls, step: Step) -> None:
    found = time_attention(SHAPE, step, lambda shape, layout: VllmAttention(shape))
    assert row_error(found.output, expected(step)) < ATTENTION_BOUND
    scheduled, run = calls.schedule, calls.forward
    assert scheduled["batch_size"] == len(step.chunks)
    assert (scheduled["num_heads"], scheduled["num_heads_k"]) == (4, 2)
    assert (scheduled["page_size"], scheduled["headdim"], scheduled["headdim_v"]) == (16, 64, 64)
    assert scheduled["qkv_dtype"] == torch.bfloat16 and scheduled["is_causal"]
    assert run["is_causal"] and run["softmax_scale"] == SHAPE.scale
    assert (run["window_size_left"], run["window_size_right"], run["softcap"]) == (-1, -1, 0.0)
    assert run["scheduler_metadata"] is not None
    for name in ("cu_seqlens_q", "seqused_k", "page_table"):
        assert run[name].dtype == torch.int32 and run[name].is_contiguous(), name


def test_a_page_table_has_a_row_for_each_chunk() -> None:
    layout = random_layout([Extent(4, 1), Extent(0, 8), Extent(0, 3)], page_size=4, seed=0)
    table, pages = page_table(layout), layout.page_indices.tolist()
    assert table.tolist() == [pages[:2], pages[2:4], [pages[4], 0]]


@pytest.mark.parametrize(
    ("major", "module", "reason"),
    [
        (8, SimpleNamespace(), "Hopper"),
        (9, ModuleNotFoundError("no vllm"), "pack_vllm_attention"),
        (9, ImportError("undefined symbol"), "cannot be loaded: undefined symbol"),
        (9, SimpleNamespace(), ""),
    ],
)
def test_without_it_the_reason_is_named_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, major: int, module: object, reason: str
) -> None:
    def load(name: str) -> object:
        if isinstance(module, Exception):
            raise module
        return module

    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(vllm_attention, "importlib", SimpleNamespace(import_module=load))
    device = torch.device("cuda")
    assert list(rival_choices(device)) == ([] if reason else [VLLM])
    session = Session(device, ["tiny"], [1], [0], Budget(1.0))
    part_kernels._name_what_is_not_there(session, SHAPE, "4/2 heads")
    named = [each.why for each in session.not_measured if VLLM in each.what]
    assert len(named) == bool(reason) and reason in "".join(named)


def test_the_rival_races_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_kernels, "rival_choices", lambda device: {VLLM: None})
    tried: list[tuple[str, str]] = []
    monkeypatch.setattr(
        part_kernels._Race, "time", lambda race, step, name, make: tried.append((step.name, name))
    )
    session = Session(torch.device("cpu"), ["tiny"], [1], [0], Budget(1000.0, lambda: 0.0))
    part_kernels.run(session)
    steps = {step for step, _ in tried}
    assert len(steps) == 4 and all((step, VLLM) in tried for step in steps)


def wheel_of(folder: Path, *names: str) -> Path:
    path = folder / "vllm.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name in names:
            wheel.writestr(name, name * 3)
    return path


def test_a_pack_holds_the_kernel_what_calls_it_and_the_licence_alone(tmp_path: Path) -> None:
    licence = "vllm-0.dist-info/licenses/LICENSE"
    wheel = wheel_of(tmp_path, *FILES, licence, "vllm/_C.abi3.so", "vllm/__init__.py")
    pack(wheel, tmp_path / "pack.tar.xz")
    content = lzma.decompress((tmp_path / "pack.tar.xz").read_bytes())
    with tarfile.open(fileobj=io.BytesIO(content)) as packed:
        names = packed.getnames()
        assert sorted(names) == sorted([*FILES, licence])
        for name in names:
            member = packed.extractfile(name)
            assert member and member.read() == name.encode() * 3
    assert [path.name for path in tmp_path.glob("*.partial")] == []
    ignored = (pack_vllm_attention.ROOT / ".gitignore").read_text().split()
    assert f"{pack_vllm_attention.ARCHIVE.parent.name}/" in ignored


@pytest.mark.parametrize(
    ("names", "missing"), [(FILES, "licence"), ((*FILES[:2], "a/b.dist-info/licenses/L"), "fa3_C")]
)
def test_a_wheel_without_what_is_packed_is_refused(
    tmp_path: Path, names: tuple[str, ...], missing: str
) -> None:
    with pytest.raises(ConfigurationError, match=missing):
        pack(wheel_of(tmp_path, *names), tmp_path / "pack.tar.xz")
