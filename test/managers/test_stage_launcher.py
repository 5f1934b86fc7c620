"""How stages share the cores, and which link joins them."""

import pytest

from sgl_pipeline.args import PipelineArgs, StageArgs
from sgl_pipeline.managers.stage_launcher import link_addresses, split_cores


@pytest.mark.parametrize(
    ("num_cores", "num_stages", "sizes"),
    [(2, 2, [1, 1]), (8, 3, [2, 3, 3]), (5, 1, [5]), (2, 4, [0, 0, 0, 0])],
)
def test_cores_are_split_over_the_stages_or_not_pinned_at_all(num_cores, num_stages, sizes):
    cores = list(range(10, 10 + num_cores))
    split = split_cores(cores, num_stages)
    assert [len(own) for own in split] == sizes
    if num_stages <= num_cores:
        assert [core for own in split for core in own] == cores


@pytest.mark.parametrize(
    ("device", "num_gpus", "kind"),
    [("cpu", 0, "ipc"), ("cuda", 1, "ipc"), ("cuda", 3, "nccl"), ("cpu", 8, "ipc")],
)
def test_stages_are_joined_by_nccl_only_where_each_has_a_gpu(device, num_gpus, kind):
    stages = StageArgs(num_stages=3, model_path="m", dtype="float32", device=device)
    links = link_addresses(PipelineArgs(stages=stages, run_directory="run"), num_gpus)
    assert [link.partition(":")[0] for link in links] == [kind, kind]
    if kind == "ipc":
        assert len(set(links)) == 2
