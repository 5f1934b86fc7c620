"""Our calls of torch on each machine that we know, and the record of FlashInfer's signatures.

The record has what those versions accept; `support/recorded_signatures.py` says how it is made.
`test_flashinfer_contract.py` makes our calls of FlashInfer.
"""

from pathlib import Path

import pytest
from support.our_calls import OurCall, Uses, uses_of
from support.real_flashinfer import import_flashinfer
from support.recorded_signatures import (
    FLASHINFER_NAMES,
    Signatures,
    installed,
    read_signatures,
    recorded,
    signature_of,
    torch_uses,
)

from benchmark.gpu.kernel_wheels import CUDA_REQUIREMENTS, pins
from benchmark.gpu.standin import REQUIREMENTS as LENT_MACHINE

ROOT = Path(__file__).parents[2]
RECORD = recorded()
USES = torch_uses()
every_torch = pytest.mark.parametrize("version", [name for name in RECORD if "torch" in name])


def misfits(uses: Uses, signatures: Signatures) -> list[str]:
    """The calls that no recorded signature of their function takes."""
    found = []
    for call in uses.calls:
        texts = signatures.get(call.name, [])
        if texts and not any(binds(call, text) for text in texts):
            found.append(f"{call.place}: {call.name}{' or '.join(texts)}")
    return found


def binds(call: OurCall, text: str) -> bool:
    try:
        call.bind(signature_of(text))
    except TypeError:
        return False
    return True


def test_the_record_is_of_the_pinned_versions() -> None:
    """Of the CPU set, the CUDA set and the lent machine."""
    sets = (ROOT / "requirements" / "cpu.txt", CUDA_REQUIREMENTS, LENT_MACHINE)
    flashinfer = pins(CUDA_REQUIREMENTS)["flashinfer-python"]
    assert set(RECORD) == {
        *(f"torch {pins(path)['torch'].partition('+')[0]}" for path in sets),
        f"flashinfer {flashinfer}",
    }
    assert pins(ROOT / "requirements" / "contract.txt")["flashinfer-python"] == flashinfer


@every_torch
def test_torch_has_all_that_stages_use(version: str) -> None:
    assert len(USES.names) > 100
    assert sorted(USES.names - RECORD[version].keys()) == []


@every_torch
def test_torch_takes_every_call_of_the_stages(version: str) -> None:
    assert misfits(USES, RECORD[version]) == []


@every_torch
def test_the_calls_that_only_a_gpu_makes_are_held_to_signatures(version: str) -> None:
    """A name without one could be called in any way."""
    called = {call.name for call in USES.calls}
    for name in (
        "torch.nn.functional.grouped_mm",
        "torch.nn.functional.scaled_mm",
        "torch._int_mm",
        "torch.cuda.CUDAGraph.capture_begin",
        "torch.cuda.MemPool",
        "torch.cuda.Event",
        "torch.cuda.Stream.wait_stream",
        "torch.distributed.TCPStore",
        "torch.distributed.new_group",
    ):
        assert name in called and RECORD[version][name], name


def test_a_call_that_torch_would_not_take_is_told(tmp_path: Path) -> None:
    (tmp_path / "calls.py").write_text(
        "import torch\nimport torch.nn.functional as F\nfrom torch.cuda import Event as Mark\n"
        "F.scaled(a, b)\nF.scaled(a)\nF.scaled(a, b, fast=1)\ntorch.fill(*size, value=1)\n"
        "torch.fill(*size, other=1)\nMark(enable_timing=True)\ngraph.begin(pool=1)\n"
        "graph.begin(room=1)\nother.begun(3)\n"
    )
    uses = uses_of("torch", tmp_path, {"begin": "torch.Graph.begin"})
    signatures = {
        "torch.nn.functional.scaled": ["(a, b, *, bias=None)", "(a, b, c, *, out)"],
        "torch.fill": ["(size, value)"],
        "torch.cuda.Event": ["(enable_timing=False, *, kind='none')"],
        "torch.Graph.begin": ["(pool=None)"],
    }
    assert set(signatures) < uses.names
    found = [line.partition(": ")[0] for line in misfits(uses, signatures)]
    assert sorted(found) == [f"calls.py:{line}" for line in (11, 5, 6, 8)]


def test_the_record_is_what_torch_has() -> None:
    if (version := installed("torch")) not in RECORD:
        pytest.skip(f"{version} is not recorded")
    assert read_signatures("torch", USES.names) == RECORD[version]


def test_the_record_is_what_flashinfer_has() -> None:
    import_flashinfer()
    version = installed("flashinfer")
    assert read_signatures("flashinfer", FLASHINFER_NAMES) == RECORD[version]
