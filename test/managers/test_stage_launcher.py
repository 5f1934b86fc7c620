"""Which link joins the stages, and what a worker is told of its own."""

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq
from support.tiny_models import tiny_model

from sgl_pipeline.args import PipelineArgs, StageArgs
from sgl_pipeline.channels import WorkerChannel
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.stage_launcher import StageLauncher, link_addresses
from sgl_pipeline.managers.stage_processes import stage_address
from sgl_pipeline.messages import StageAssignment, StageLoaded, StageReady, WorkerHello
from sgl_pipeline.pp_runner.model_spec import read_model_spec


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


def stand_in_worker(context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> StageAssignment:
    """Gets ready without doing anything; returns what it was told to do."""
    with WorkerChannel(context, address, 0) as channel:
        channel.send(WorkerHello(0))
        assignment = channel.receive()
        channel.send(
            StageLoaded(stage=0, num_pages=9, weight_bytes=1, page_bytes=1, load_seconds=0.0)
        )
        channel.receive()
        channel.send(StageReady(0, "flashinfer", "torch"))
    assert isinstance(assignment, StageAssignment)
    return assignment


def test_a_worker_is_told_every_argument_of_its_stage(tmp_path: Path) -> None:
    """None of them has its default value, so none can be forgotten on the way."""
    stages = StageArgs(
        num_stages=1,
        layer_partition="even",
        model_path=str(tiny_model("qwen3")),
        load_format="dummy",
        dtype="bfloat16",
        device="cuda",
        attention_backend="flashinfer",
        prefill_kernels="fa2",
        graphs="off",
        link="host",
        layer_kernels="torch",
        max_total_tokens=999,
        memory_fraction=0.5,
        cpu_threads=2,
    )
    defaults = {field.name: field.default for field in dataclasses.fields(StageArgs)}
    told = set(StageAssignment.__struct_fields__) & set(defaults)
    assert all(getattr(stages, name) != defaults[name] for name in told)
    args = PipelineArgs(stages=stages, run_directory=str(tmp_path))
    with zmq.Context() as context, ThreadPoolExecutor() as threads:
        spec = read_model_spec(stages.model_path)
        launcher = StageLauncher(args, spec, (), [os.getpid()], context)
        worker = threads.submit(stand_in_worker, context, stage_address(args.run_directory))
        launcher.start()
        launcher.channel.close()
        assignment = worker.result()
    expected = {name: getattr(stages, name) for name in told}
    assert {name: getattr(assignment, name) for name in told} == expected
