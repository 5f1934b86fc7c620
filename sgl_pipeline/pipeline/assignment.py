"""Who does what: from what the workers said of themselves to what each of them is told.

Pure functions, used by `worker_roster.py`. The workers of a host share its cores and its GPUs.
"""

from collections.abc import Sequence

from sgl_pipeline.args import PipelineArgs, StageArgs, require
from sgl_pipeline.messages import StageAssignment, WorkerHello
from sgl_pipeline.stage_plan import StagePlan


def assign(
    hellos: Sequence[WorkerHello],
    plan: StagePlan,
    args: PipelineArgs,
    *,
    first_plan: StagePlan | None = None,
    incarnation: int = 0,
) -> tuple[StageAssignment, ...]:
    """What the worker of each stage is told; that of `hellos[s]` fills stage `s` of `plan`.

    `first_plan` is that of the server's start, where layers have moved since: it says how many a
    stage may hold. `incarnation` is that of the stream of orders to come.

    Raises ConfigurationError where the GPUs do not allow the link that `--stage-link` asks for.
    """
    links = link_addresses(args, hellos, incarnation)
    plans = (plan, first_plan or plan)
    return tuple(
        _assignment(stage, _place_on_host(stage, hellos), hellos[stage], plans, args, links)
        for stage in range(plan.num_stages)
    )


def link_addresses(
    args: PipelineArgs, hellos: Sequence[WorkerHello], incarnation: int = 0
) -> tuple[str, ...]:
    """One address for each boundary between the stages of `hellos`, of the link that
    `--stage-link` means; those of two incarnations have nothing in common.

    Raises ConfigurationError where the GPUs do not allow it.
    """
    num_stages, num_gpus = len(hellos), hellos[0].num_gpus
    link = args.stages.link
    boundaries = range(num_stages - 1)
    has_gpu_each = args.stages.device == "cuda" and num_gpus >= num_stages
    if link == "auto":
        link = "nccl" if has_gpu_each else "host"
    if link == "nccl":
        require(
            has_gpu_each,
            f"--stage-link nccl needs a GPU for each of the {num_stages} stages, there are "
            f"{num_gpus}; use --stage-link host",
        )
        return tuple(f"nccl:{args.run_directory}/rendezvous" for _ in boundaries)
    if link == "cuda-ipc":
        require(
            num_gpus == 1,
            f"--stage-link cuda-ipc is for stages that share one GPU, there are {num_gpus}; set "
            "CUDA_VISIBLE_DEVICES to one, or use --stage-link auto",
        )
    kind = {"host": "unix", "cuda-ipc": "cuda-ipc"}[link]
    path = f"{kind}:{args.run_directory}/link-{incarnation}"
    return tuple(f"{path}-{boundary}" for boundary in boundaries)


def split_cores(cores: Sequence[int], num_stages: int) -> list[tuple[int, ...]]:
    """The cores of each stage: equal runs, or none (no pinning) where stages outnumber cores."""
    if num_stages > len(cores):
        return [()] * num_stages
    bounds = [stage * len(cores) // num_stages for stage in range(num_stages + 1)]
    return [tuple(cores[bounds[s] : bounds[s + 1]]) for s in range(num_stages)]


def num_threads(cores: Sequence[int], cpu_threads: int | None) -> int:
    """Compute threads of a stage with these cores: as many as asked for, else one a core."""
    return cpu_threads or max(1, len(cores))


def _place_on_host(stage: int, hellos: Sequence[WorkerHello]) -> tuple[int, int]:
    """The stage's place among the stages of its host, and how many those are."""
    host = hellos[stage].host
    stages = [other for other, hello in enumerate(hellos) if hello.host == host]
    return stages.index(stage), len(stages)


def _assignment(
    stage: int,
    place_on_host: tuple[int, int],
    hello: WorkerHello,
    plans: tuple[StagePlan, StagePlan],
    args: PipelineArgs,
    links: tuple[str, ...],
) -> StageAssignment:
    plan, first_plan = plans
    stages: StageArgs = args.stages
    place, num_places = place_on_host
    cores = split_cores(hello.cores, num_places)[place]
    gpu = place % hello.num_gpus if hello.num_gpus else 0
    return StageAssignment(
        stage=stage,
        plan=plan,
        model_path=stages.model_path,
        load_format=stages.load_format,
        dtype=stages.dtype,
        device=stages.device,
        gpu=gpu,
        stages_on_gpu=len(range(gpu, num_places, max(1, hello.num_gpus))),
        attention_backend=stages.attention_backend,
        prefill_kernels=stages.prefill_kernels,
        graphs=stages.graphs,
        layer_kernels=stages.layer_kernels,
        page_size=args.scheduling.page_size,
        max_total_tokens=stages.max_total_tokens,
        memory_fraction=stages.memory_fraction,
        links=links,
        cpu_threads=num_threads(cores, stages.cpu_threads),
        # On a GPU the threads of driver and NCCL, and a compiler that a stage starts, would share
        # the cores that it is pinned to.
        cpu_cores=cores if stages.device == "cpu" else (),
        max_layers=args.migration.max_layers(first_plan)[stage],
        spare_layers=_spare_layers(stage, plan, first_plan, args),
        page_links=args.run_directory,
    )


def _spare_layers(
    stage: int, plan: StagePlan, first_plan: StagePlan, args: PipelineArgs
) -> tuple[int, ...]:
    """Those whose weights the stage loads beside its own: where weights are resident, all that it
    has had in memory since the server's start."""
    spare = args.migration.layers_to_load(first_plan, stage)
    if not spare:
        return ()
    own = plan.layers_of(stage)
    return tuple(sorted({*spare, *first_plan.layers_of(stage)} - {*own}))
