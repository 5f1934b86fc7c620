"""A recorder's graphs on a card whose calls are emulated (`support/emulated_graphs.py`)."""

import torch
from support.emulated_graphs import EmulatedCuda

from sgl_pipeline.pp_runner.cuda.graph_recorder import CudaGraphRecorder, Graph

CPU = torch.device("cpu")


def record(recorder: CudaGraphRecorder, numbers: torch.Tensor) -> Graph:
    with recorder.session():
        recorder.begin()
        numbers.add_(1)
        return recorder.end()


def test_a_pool_ends_after_its_graphs_though_its_recorder_goes_first() -> None:
    """The emulation tells a pool that ends before a graph, as torch does."""
    cuda, numbers = EmulatedCuda(), torch.zeros(3)
    with cuda.installed():
        recorder = CudaGraphRecorder(CPU)
        graphs = [record(recorder, numbers) for _ in range(2)]
        del recorder
        while graphs:
            graphs.pop().replay()
    assert numbers.tolist() == [4.0, 4.0, 4.0], "each ran while it was recorded, and once more"


def test_a_recording_after_the_last_graph_begins_a_pool_of_its_own() -> None:
    cuda, numbers = EmulatedCuda(), torch.zeros(3)
    with cuda.installed():
        recorder = CudaGraphRecorder(CPU)
        graphs = [record(recorder, numbers) for _ in range(2)]
        assert cuda.num_pools == 1
        graphs.clear()
        graphs.append(record(recorder, numbers))
        assert cuda.num_pools == 2
