"""Who gets which stage, cores, GPU and link."""

import pytest
from msgspec import structs
from support.worker_messages import hello

from sgl_pipeline.args import PipelineArgs, SchedulingArgs, StageArgs
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pipeline.assignment import (
    assign,
    link_addresses,
    place_newcomers,
    split_cores,
    workers_of_host,
)
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.stage_messages import WorkerHello


def args_of(num_stages: int, device: str = "cpu", link: str = "auto") -> PipelineArgs:
    stages = StageArgs(
        num_stages=num_stages, model_path="m", dtype="float32", device=device, link=link
    )
    return PipelineArgs(stages=stages, run_directory="run")


def links_of(device: str, num_gpus: int, link: str = "auto") -> tuple[str, ...]:
    """Those of three stages."""
    hellos = [hello(worker, num_gpus=num_gpus) for worker in range(3)]
    return link_addresses(args_of(3, device, link), hellos)


@pytest.mark.parametrize(
    ("device", "num_gpus", "kind"),
    [("cpu", 0, "unix"), ("cuda", 1, "unix"), ("cuda", 3, "nccl"), ("cpu", 8, "unix")],
)
def test_stages_are_joined_by_nccl_only_where_each_has_a_gpu(
    device: str, num_gpus: int, kind: str
) -> None:
    links = links_of(device, num_gpus)
    assert [link.partition(":")[0] for link in links] == [kind, kind]
    if kind == "unix":
        assert len(set(links)) == 2


def test_fewer_stages_than_gpus_stay_on_the_links_that_more_had() -> None:
    hellos = [hello(worker, num_gpus=2) for worker in range(2)]
    (link,) = link_addresses(args_of(3, "cuda"), hellos, incarnation=2)
    assert link == "unix:run/link-2-0"


def test_a_link_that_was_asked_for_is_had_or_refused() -> None:
    assert links_of("cuda", 3, "host") == ("unix:run/link-0-0", "unix:run/link-0-1")
    with pytest.raises(ConfigurationError, match=r"3 stages.* 2"):
        links_of("cuda", 2, "nccl")
    with pytest.raises(ConfigurationError, match=r"'cuda-ipc'.*auto, host, nccl"):
        links_of("cuda", 1, "cuda-ipc")


@pytest.mark.parametrize(
    ("num_cores", "num_stages", "sizes"),
    [(2, 2, [1, 1]), (8, 3, [2, 3, 3]), (5, 1, [5]), (2, 4, [0, 0, 0, 0])],
)
def test_cores_are_split_over_the_stages_or_not_pinned_at_all(
    num_cores: int, num_stages: int, sizes: list[int]
) -> None:
    cores = list(range(10, 10 + num_cores))
    split = split_cores(cores, num_stages)
    assert [len(own) for own in split] == sizes
    if num_stages <= num_cores:
        assert [core for own in split for core in own] == cores


def test_the_stages_of_a_host_share_its_cores_and_gpus() -> None:
    workers = [("a", (0, 1, 2, 3), 1), ("b", (8, 9), 2), ("b", (8, 9), 2), ("a", (0, 1, 2, 3), 1)]
    hellos = [
        hello(number, host=host, cores=cores, num_gpus=num_gpus)
        for number, (host, cores, num_gpus) in enumerate(workers)
    ]
    plan = StagePlan(0, (1, 1, 1, 1))
    assigned = assign(hellos, plan, args_of(4))
    assert [one.stage for one in assigned] == [0, 1, 2, 3]
    assert [one.cpu_cores for one in assigned] == [(0, 1), (8,), (9,), (2, 3)]
    assert [one.cpu_threads for one in assigned] == [2, 1, 1, 2]
    assigned = assign(hellos, plan, args_of(4, "cuda", "host"))
    assert {one.cpu_cores for one in assigned} == {()}
    assert [one.cpu_threads for one in assigned] == [2, 1, 1, 2]
    assert [(one.gpu, one.stages_on_gpu) for one in assigned] == [(0, 2), (0, 1), (1, 1), (0, 2)]


def test_stages_that_outnumber_cores_have_a_thread_each_and_no_cores_of_their_own() -> None:
    hellos = [hello(worker) for worker in range(4)]
    assigned = assign(hellos, StagePlan(0, (1, 1, 1, 1)), args_of(4))
    assert {(one.cpu_cores, one.cpu_threads) for one in assigned} == {((), 1)}


def test_a_worker_is_told_every_argument_of_its_stage() -> None:
    stages = StageArgs(
        num_stages=1,
        layer_partition="even",
        model_path="model",
        load_format="dummy",
        dtype="bfloat16",
        device="cuda",
        attention_backend="flashinfer",
        prefill_kernels="fa2",
        graphs="off",
        link="host",
        layer_kernels="torch",
        quantization="awq",
        kv_cache_dtype="int8",
        max_total_tokens=999,
        memory_fraction=0.5,
        cpu_threads=2,
    )
    args = PipelineArgs(stages=stages, scheduling=SchedulingArgs(page_size=8))
    plan = StagePlan(3, (5,))
    (assignment,) = assign([hello(0, num_gpus=1)], plan, args)
    assert assignment.args == stages
    assert (assignment.plan, assignment.page_size) == (plan, 8)


def test_who_has_a_gpu_keeps_it_and_a_newcomer_gets_one_that_is_free() -> None:
    args = args_of(3, device="cuda", link="host")
    hellos = [hello(worker, num_gpus=4) for worker in range(3)]
    plan = StagePlan(1, (2, 2, 2))
    kept = assign(hellos, plan, args, gpus=(2, 0, None))
    assert [one.gpu for one in kept] == [2, 0, 1]
    assert [one.stages_on_gpu for one in kept] == [1, 1, 1]
    shared = assign(
        [hello(worker, num_gpus=2) for worker in range(3)], plan, args, gpus=(1, 1, None)
    )
    assert [(one.gpu, one.stages_on_gpu) for one in shared] == [(1, 2), (1, 2), (0, 1)]


def on_host(worker: int, rank: int, num_gpus: int = 0) -> WorkerHello:
    """A worker of one of several hosts."""
    return structs.replace(
        hello(worker, num_gpus=num_gpus),
        run_directory=f"run-{rank}",
        model_path=f"model-{rank}",
        host_address=f"10.0.0.{rank}:5000",
    )


def test_links_within_a_host_are_its_own_and_between_hosts_lead_to_the_next_ones_port() -> None:
    hellos = [on_host(worker, rank) for worker, rank in enumerate((0, 0, 1, 1, 2))]
    assignments = assign(hellos, StagePlan(0, (1,) * 5), args_of(5), incarnation=3)
    assert assignments[0].links == (
        "unix:run-0/link-3-0",
        "tcp:10.0.0.1:5000/link-3-1",
        "unix:run-1/link-3-2",
        "tcp:10.0.0.2:5000/link-3-3",
    )
    assert assignments[2].page_links == (
        "tcp:10.0.0.0:5000",
        "tcp:10.0.0.0:5000",
        "unix:run-1",
        "unix:run-1",
        "tcp:10.0.0.2:5000",
    )
    assert [one.args.model_path for one in assignments] == [
        f"model-{rank}" for rank in (0, 0, 1, 1, 2)
    ]
    # Hosts of the same name are still two: each stage of host 2 has all its cores.
    assert [one.cpu_cores for one in assignments] == [(0,), (1,), (0,), (1,), (0, 1)]


def test_gpus_of_several_hosts_meet_behind_the_cluster_port_of_the_host_of_stage_0() -> None:
    hellos = [on_host(worker, rank, num_gpus=2) for worker, rank in enumerate((1, 1, 0))]
    for link in ("auto", "nccl"):
        assert link_addresses(args_of(3, "cuda", link), hellos) == ("nccl:tcp://10.0.0.1:5001",) * 2
    # In place of a worker of NCCL's none can come, but a start that was asked for by TCP can go on.
    between = ("unix:run-1/link-0-0", "tcp:10.0.0.0:5000/link-0-1")
    assert link_addresses(args_of(3, "cuda", "host"), hellos) == between
    assert link_addresses(args_of(3, "cuda"), hellos, incarnation=1)[1].startswith("tcp:")


def test_stages_of_several_hosts_that_share_a_gpu_are_joined_over_tcp() -> None:
    hellos = [on_host(worker, rank, num_gpus=1) for worker, rank in enumerate((0, 1, 1))]
    links = link_addresses(args_of(3, "cuda"), hellos)
    assert [link.partition(":")[0] for link in links] == ["tcp", "unix"]
    with pytest.raises(ConfigurationError, match=r"2 stages on here.* 1;"):
        link_addresses(args_of(3, "cuda", "nccl"), hellos)


def test_the_last_port_has_none_behind_it_for_gpus_to_meet() -> None:
    hellos = [
        structs.replace(on_host(rank, rank, num_gpus=1), host_address=f"[::{rank}]:65535")
        for rank in range(2)
    ]
    with pytest.raises(ConfigurationError, match="the port after 65535"):
        link_addresses(args_of(2, "cuda"), hellos)
    before = [structs.replace(one, host_address="[::1]:65534") for one in hellos[:1]] + hellos[1:]
    assert link_addresses(args_of(2, "cuda"), before) == ("nccl:tcp://[::1]:65535",)


@pytest.mark.parametrize(
    ("num_stages", "num_hosts", "shares"), [(4, 2, [2, 2]), (5, 3, [1, 2, 2]), (3, 3, [1, 1, 1])]
)
def test_hosts_start_with_runs_of_workers(
    num_stages: int, num_hosts: int, shares: list[int]
) -> None:
    runs = [workers_of_host(num_stages, num_hosts, rank) for rank in range(num_hosts)]
    assert [len(run) for run in runs] == shares
    assert [worker for run in runs for worker in run] == [*range(num_stages)]


def test_at_the_start_stages_follow_the_hosts_whatever_the_numbers() -> None:
    spares = {number: on_host(number, rank) for number, rank in ((0, 0), (1, 1), (2, 0), (3, 1))}
    placed = place_newcomers([0, 1, 2, 3], spares, {})
    assert placed == {0: 0, 1: 2, 2: 1, 3: 3}


def test_a_newcomer_goes_where_the_fewest_links_lead_from_host_to_host() -> None:
    hellos = {stage: on_host(stage, rank) for stage, rank in enumerate((0, 0, 1, 1))}
    # Stage 0 was on host 0, like its neighbor; stage 3 on host 1, like its own.
    spares = {7: on_host(7, 1), 8: on_host(8, 0)}
    assert place_newcomers([0, 3], spares, hellos) == {0: 8, 3: 7}
    # In the middle either costs one link: it stays on its host.
    assert place_newcomers([1], spares, hellos) == {1: 8}
    assert place_newcomers([2], spares, hellos) == {2: 7}
    # Whoever is there is better than nobody.
    assert place_newcomers([0, 1], {7: on_host(7, 1)}, hellos) == {0: 7}
