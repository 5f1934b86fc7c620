"""Rows on a shared GPU arrive whole, and no copy overtakes a kernel or the other way round.

On CPU the GPU's memory is stood in for by the host's, and streams and events by a journal of what
was launched when. On a GPU two processes do it for real.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.cuda.device_memory import HANDLE_BYTES, SharedRegion
from sgl_pipeline.pp_runner.links.activation_link import ActivationShape
from sgl_pipeline.pp_runner.links.cuda_ipc_link import CudaIpcLink

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]


@dataclass
class Journal:
    """What was launched, with the stream it went to; and all memory and events by handle."""

    lines: list[str] = field(default_factory=list)
    stream: str = "compute"
    regions: dict[bytes, torch.Tensor] = field(default_factory=dict)
    num_events: int = 0

    def note(self, what: str) -> None:
        self.lines.append(f"{self.stream}: {what}")

    @contextmanager
    def own_stream(self, source: torch.Tensor) -> Iterator[None]:
        self.stream = "copy"
        yield
        self.stream = "compute"


class FakeEvent:
    def __init__(self, journal: Journal, number: int) -> None:
        self._journal = journal
        self._number = number

    def record(self) -> None:
        self._journal.note(f"record {self._number}")

    def wait(self) -> None:
        self._journal.note(f"wait for {self._number}")

    def handle(self) -> bytes:
        return self._number.to_bytes(HANDLE_BYTES, "little")


class FakeMemory:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def allocate(self, num_bytes: int) -> SharedRegion:
        handle = (1000 + len(self._journal.regions)).to_bytes(HANDLE_BYTES, "little")
        self._journal.regions[handle] = torch.zeros(num_bytes, dtype=torch.uint8)
        return SharedRegion(self._journal.regions[handle], handle)

    def open(self, handle: bytes, num_bytes: int) -> torch.Tensor:
        region = self._journal.regions[handle]
        assert region.numel() == num_bytes
        return region

    def new_event(self) -> FakeEvent:
        self._journal.num_events += 1
        return FakeEvent(self._journal, self._journal.num_events)

    def open_event(self, handle: bytes) -> FakeEvent:
        return FakeEvent(self._journal, int.from_bytes(handle, "little"))


def links(
    tmp_path: Path, dtype: torch.dtype = torch.float32
) -> tuple[Journal, CudaIpcLink, CudaIpcLink]:
    """Upstream and downstream of one boundary."""
    journal = Journal()
    shape, path = ActivationShape(8, dtype, CPU), str(tmp_path / "link")
    parts = (FakeMemory(journal), journal.own_stream)
    downstream = CudaIpcLink(shape, path, None, *parts)
    return journal, CudaIpcLink(shape, None, path, *parts), downstream


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_cross_bit_for_bit_and_in_order(tmp_path, dtype):
    _, upstream, downstream = links(tmp_path, dtype)
    sent = [torch.randn(rows, 8).to(dtype) for rows in (1, 5, 300, 64, 65)]
    for step_id, hidden in enumerate(sent):
        upstream.send(step_id, hidden)
    for step_id, hidden in enumerate(sent):
        assert torch.equal(downstream.receive(step_id, len(hidden)), hidden)
    upstream.close()
    downstream.close()


def test_copies_and_kernels_wait_for_each_other(tmp_path):
    """Event 1 says that a buffer is written, event 2 that it was read."""
    journal, upstream, downstream = links(tmp_path)
    upstream.send(0, torch.zeros(4, 8))
    downstream.receive(0, 4)
    assert journal.lines == ["copy: record 1", "compute: wait for 1"]
    journal.lines.clear()
    upstream.send(1, torch.ones(4, 8))  # to a second buffer: the first has not come back
    assert journal.lines == ["copy: record 3"]
    journal.note("kernels of step 0")
    downstream.receive(1, 4)
    upstream.send(2, torch.ones(4, 8))
    assert journal.lines[1:] == [
        "compute: kernels of step 0",
        "compute: record 2",
        "compute: wait for 3",
        "copy: wait for 2",
        "copy: record 1",
    ]


def test_rows_stay_as_they_are_until_the_next_are_asked_for(tmp_path):
    _, upstream, downstream = links(tmp_path)
    upstream.send(0, torch.zeros(4, 8))
    held = downstream.receive(0, 4)
    for step_id in range(1, 6):
        upstream.send(step_id, torch.ones(4, 8))
    assert torch.equal(held, torch.zeros(4, 8))


def test_two_buffers_serve_steps_that_fit_them(tmp_path):
    journal, upstream, downstream = links(tmp_path)
    for step_id, num_rows in enumerate((3, 64, 1, 50, 17)):
        upstream.send(step_id, torch.full((num_rows, 8), float(step_id)))
        rows = downstream.receive(step_id, num_rows)
        assert torch.equal(rows, torch.full((num_rows, 8), float(step_id)))
    assert len(journal.regions) == 2


@pytest.mark.parametrize(("step_id", "num_rows"), [(1, 4), (0, 3)])
def test_another_steps_rows_are_a_protocol_error(tmp_path, step_id, num_rows):
    _, upstream, downstream = links(tmp_path)
    upstream.send(0, torch.randn(4, 8))
    with pytest.raises(ProtocolError, match="received 4 rows of step 0"):
        downstream.receive(step_id, num_rows)


def test_what_is_sent_to_a_neighbor_that_is_gone_is_dropped(tmp_path):
    _, upstream, downstream = links(tmp_path)
    upstream.send(0, torch.ones(4, 8))
    downstream.receive(0, 4)
    downstream.close()
    for step_id in range(1, 4):
        upstream.send(step_id, torch.ones(4, 8))


STAGE = """
import sys, torch
from sgl_pipeline.pp_runner.links.activation_link import ActivationShape
from sgl_pipeline.pp_runner.links.open_link import open_activation_link
stage, path = int(sys.argv[1]), sys.argv[2]
device = torch.device("cuda", 0)
torch.cuda.set_device(device)
link = open_activation_link(
    ActivationShape(4096, torch.bfloat16, device), (f"cuda-ipc:{path}",), stage
)
work = torch.randn(4096, 4096, device=device)
for step_id in range(200):
    rows = (1, 5, 300, 1024)[step_id % 4]
    expected = (torch.arange(rows, device=device)[:, None] % 97 + step_id).expand(rows, 4096)
    expected = expected.bfloat16()
    if stage == 0:
        work = (work @ work).tanh()  # so that rows are sent long before they are computed
        link.send(step_id, expected + 0 * work[0].sum().nan_to_num())
    else:
        found = link.receive(step_id, rows)
        work = (work @ work).tanh()  # and read long after they are received
        assert torch.equal(found + 0 * work[0].sum().nan_to_num(), expected), step_id
torch.cuda.synchronize()
print("done", flush=True)
sys.stdin.read()  # the other one may still be reading this one's memory
link.close()
"""


@pytest.mark.gpu
def test_rows_cross_between_processes_on_one_gpu(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    path = tmp_path / "link"
    downstream = start_stage(1, path)
    deadline = time.monotonic() + 120
    while not path.exists():  # it listens
        assert downstream.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    stages = [downstream, start_stage(0, path)]
    try:
        for process in stages:
            assert process.stdout is not None
            assert process.stdout.readline() == "done\n"
        for process in stages:
            process.communicate("", timeout=60)
        assert [process.returncode for process in stages] == [0, 0]
    finally:
        for process in stages:
            process.kill()


def start_stage(stage: int, path: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", STAGE, str(stage), str(path)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
