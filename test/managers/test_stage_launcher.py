"""Which link joins the stages."""

import pytest

from sgl_pipeline.args import PipelineArgs, StageArgs
from sgl_pipeline.managers.stage_launcher import link_addresses


@pytest.mark.parametrize(
    ("device", "num_gpus", "kind"),
    [("cpu", 0, "unix"), ("cuda", 1, "unix"), ("cuda", 3, "nccl"), ("cpu", 8, "unix")],
)
def test_stages_are_joined_by_nccl_only_where_each_has_a_gpu(device, num_gpus, kind):
    stages = StageArgs(num_stages=3, model_path="m", dtype="float32", device=device)
    links = link_addresses(PipelineArgs(stages=stages, run_directory="run"), num_gpus)
    assert [link.partition(":")[0] for link in links] == [kind, kind]
    if kind == "unix":
        assert len(set(links)) == 2
