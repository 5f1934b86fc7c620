"""Which link joins the stages, and what each of them is told."""

import pytest
import zmq
from support.tiny_models import tiny_model

from sgl_pipeline.args import PipelineArgs, StageArgs
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.stage_launcher import StageLauncher, link_addresses
from sgl_pipeline.pp_runner.model_spec import read_model_spec
from sgl_pipeline.stage_plan import StagePlan


def links_of(device: str, num_gpus: int, link: str = "auto") -> tuple[str, ...]:
    """Those of three stages."""
    stages = StageArgs(num_stages=3, model_path="m", dtype="float32", device=device, link=link)
    return link_addresses(PipelineArgs(stages=stages, run_directory="run"), num_gpus)


@pytest.mark.parametrize(
    ("device", "num_gpus", "kind"),
    [("cpu", 0, "unix"), ("cuda", 1, "unix"), ("cuda", 3, "nccl"), ("cpu", 8, "unix")],
)
def test_stages_are_joined_by_nccl_only_where_each_has_a_gpu(device, num_gpus, kind):
    links = links_of(device, num_gpus)
    assert [link.partition(":")[0] for link in links] == [kind, kind]
    if kind == "unix":
        assert len(set(links)) == 2


def test_a_link_that_was_asked_for_is_had_or_refused():
    assert links_of("cuda", 3, "host") == ("unix:run/link-0", "unix:run/link-1")
    assert links_of("cuda", 1, "cuda-ipc") == ("cuda-ipc:run/link-0", "cuda-ipc:run/link-1")
    with pytest.raises(ConfigurationError, match="a GPU for each of the 3 stages, there are 2"):
        links_of("cuda", 2, "nccl")
    with pytest.raises(ConfigurationError, match=r"share one GPU.*CUDA_VISIBLE_DEVICES"):
        links_of("cuda", 2, "cuda-ipc")
    with pytest.raises(ConfigurationError, match="--stage-link cuda-ipc needs --device cuda"):
        links_of("cpu", 0, "cuda-ipc")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_stages_on_a_cpu_are_told_to_stay_on_their_cores(device, tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {2, 3})
    stages = StageArgs(num_stages=2, model_path="m", dtype="bfloat16", device=device)
    args = PipelineArgs(stages=stages, run_directory=str(tmp_path))
    with zmq.Context() as context:
        launcher = StageLauncher(args, read_model_spec(tiny_model("qwen3")), ("",), (), context)
        assignments = launcher._assignments(StagePlan(0, (3, 3)))
        launcher.stop()
    cores = {"cpu": [(2,), (3,)], "cuda": [(), ()]}[device]
    assert [assignment.cpu_cores for assignment in assignments] == cores
