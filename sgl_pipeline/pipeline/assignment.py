"""Assigns stages, cores, GPUs and links to workers, from the facts in their greetings.

Pure functions. The workers of a host share its cores and its GPUs.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from sgl_pipeline.args import PipelineArgs, require
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.stage_messages import StageAssignment, WorkerHello

_LAST_PORT = 65535


def assign(
    hellos: Sequence[WorkerHello],
    plan: StagePlan,
    args: PipelineArgs,
    *,
    first_plan: StagePlan | None = None,
    incarnation: int = 0,
    fewer_pages_do: bool = False,
    gpus: Sequence[int | None] = (),
) -> tuple[StageAssignment, ...]:
    """The assignment of each stage's worker; the worker of `hellos[s]` fills stage `s` of `plan`.

    `first_plan` is the plan of the server's start, if layers have moved since: it limits the layers
    that a stage may hold. `incarnation` is that of the next stream of orders. `fewer_pages_do`:
    where memory does not hold as many pages as `args` ask for, fewer are enough. `gpus` are the
    workers' present GPUs, None for a worker without one.

    Raises ConfigurationError where the GPUs do not allow the link that `--stage-link` asks for.
    """
    links = link_addresses(args, hellos, incarnation)
    plans = (plan, first_plan or plan)
    on_gpus = _choose_gpus(hellos, gpus or [None] * plan.num_stages)
    sharing = Counter(zip((hello.host_key for hello in hellos), on_gpus, strict=True))
    return tuple(
        msgspec.structs.replace(
            _assignment(stage, hellos, plans, args, links),
            gpu=on_gpus[stage],
            stages_on_gpu=sharing[hellos[stage].host_key, on_gpus[stage]],
            fewer_pages_do=fewer_pages_do,
        )
        for stage in range(plan.num_stages)
    )


def _choose_gpus(hellos: Sequence[WorkerHello], gpus: Sequence[int | None]) -> list[int]:
    """The GPU of each stage's worker: its entry of `gpus`, or for a newcomer (None) the first of
    its host's GPUs that the fewest stages use. 0 where there is no GPU."""
    shared = Counter(
        (hello.host_key, gpu) for hello, gpu in zip(hellos, gpus, strict=True) if gpu is not None
    )
    chosen = []
    for hello, gpu in zip(hellos, gpus, strict=True):
        if gpu is None:
            counts = [shared[hello.host_key, one] for one in range(max(1, hello.num_gpus))]
            gpu = counts.index(min(counts))
            shared[hello.host_key, gpu] += 1
        chosen.append(gpu)
    return chosen


def link_addresses(
    args: PipelineArgs, hellos: Sequence[WorkerHello], incarnation: int = 0
) -> tuple[str, ...]:
    """One address for each boundary between the stages of `hellos`, of the link that `--stage-link`
    means; addresses of two incarnations never coincide.

    Raises ConfigurationError where the GPUs do not allow it.
    """
    num_stages = len(hellos)
    link = args.stages.link
    boundaries = range(num_stages - 1)
    on_host = Counter(hello.host_key for hello in hellos)
    lacking = [hello for hello in hellos if hello.num_gpus < on_host[hello.host_key]]
    has_gpu_each = args.stages.device == "cuda" and not lacking
    if link == "auto":
        # A regrouped pipeline never used NCCL, even if it is short enough now.
        link = "nccl" if has_gpu_each and not incarnation else "host"
    if link == "nccl":
        require(has_gpu_each, _no_gpu_each(lacking, on_host))
        return (f"nccl:{_rendezvous(args, hellos, len(on_host))}",) * (num_stages - 1)
    if len(on_host) > 1:
        return tuple(_host_link(hellos, boundary, incarnation) for boundary in boundaries)
    path = f"unix:{args.run_directory}/link-{incarnation}"
    return tuple(f"{path}-{boundary}" for boundary in boundaries)


def _no_gpu_each(lacking: Sequence[WorkerHello], on_host: Mapping[str, int]) -> str:
    """The reason why stages cannot be joined by NCCL; "" if every stage has a GPU."""
    if not lacking:
        return ""
    hello = lacking[0]
    num_stages = on_host[hello.host_key]
    where = f" on {hello.host}" if len(on_host) > 1 else ""
    return (
        f"--stage-link nccl needs a GPU for each of the {num_stages} stages{where}, there are "
        f"{hello.num_gpus}; use --stage-link host"
    )


def _rendezvous(args: PipelineArgs, hellos: Sequence[WorkerHello], num_hosts: int) -> str:
    """The meeting point of the stages' torch.distributed: a file on one host; with several, the
    port after the cluster port on the host of stage 0.

    Raises ConfigurationError if there is no such port.
    """
    if num_hosts == 1:
        return f"{args.run_directory}/rendezvous"
    host, _, port = hellos[0].host_address.rpartition(":")
    require(
        int(port) < _LAST_PORT,
        f"--dist-init-addr: over NCCL the port after {port} is used too; choose a lower one",
    )
    return f"tcp://{host}:{int(port) + 1}"


def page_links(args: PipelineArgs, hellos: Sequence[WorkerHello], stage: int) -> tuple[str, ...]:
    """The addresses at which `stage` meets each stage of `hellos` to hand over KV pages."""
    own = hellos[stage]
    return tuple(
        f"unix:{own.run_directory or args.run_directory}"
        if other.host_key == own.host_key
        else f"tcp:{other.host_address}"
        for other in hellos
    )


def place_newcomers(
    vacant: Sequence[int],
    spares: Mapping[int, WorkerHello],
    hellos: Mapping[int, WorkerHello],
) -> dict[int, int]:
    """Assigns workers of `spares`, by number, to `vacant` stages, as far as they go.

    `hellos` belong to the newest worker of each stage, lost workers included. A stage gets a worker
    on its neighbors' hosts, so that few links lead from host to host; among equals one on the host
    where the stage was, then the worker with the lowest number.
    """
    hosts = {stage: hello.host_key for stage, hello in hellos.items() if stage not in vacant}
    placed: dict[int, int] = {}
    free = dict(spares)
    for stage in vacant:
        if not free:
            break
        before = hellos[stage].host_key if stage in hellos else None
        around = [hosts[other] for other in (stage - 1, stage + 1) if other in hosts]
        costs = [
            (sum(host != other for other in around), host != before, worker)
            for worker, host in ((number, hello.host_key) for number, hello in free.items())
        ]
        placed[stage] = min(costs)[-1]
        hosts[stage] = free.pop(placed[stage]).host_key
    return placed


def workers_of_host(num_stages: int, num_hosts: int, rank: int) -> range:
    """The numbers of the workers that a host starts with: equal runs, in the order of the hosts, so
    that the first stages to be filled lie on one host after the other."""
    return range(rank * num_stages // num_hosts, (rank + 1) * num_stages // num_hosts)


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
    """The stage's place among its host's stages, and their number."""
    host = hellos[stage].host_key
    stages = [other for other, hello in enumerate(hellos) if hello.host_key == host]
    return stages.index(stage), len(stages)


def _assignment(
    stage: int,
    hellos: Sequence[WorkerHello],
    plans: tuple[StagePlan, StagePlan],
    args: PipelineArgs,
    links: tuple[str, ...],
) -> StageAssignment:
    plan, first_plan = plans
    stages = args.stages
    hello = hellos[stage]
    place, num_places = _place_on_host(stage, hellos)
    cores = split_cores(hello.cores, num_places)[place]
    return StageAssignment(
        stage=stage,
        plan=plan,
        args=replace(
            stages,
            model_path=hello.model_path or stages.model_path,
            num_state_slots=args.scheduling.num_state_slots,
        ),
        page_size=args.scheduling.page_size,
        links=links,
        cpu_threads=num_threads(cores, stages.cpu_threads),
        # On a GPU the threads of driver and NCCL, and a compiler that a stage starts, would share
        # the cores that it is pinned to.
        cpu_cores=cores if stages.device == "cpu" else (),
        # A limit would have any layer's memory hold the largest pages, though none comes.
        max_layers=(
            None if args.migration.mode == "off" else args.migration.max_layers(first_plan)[stage]
        ),
        spare_layers=_spare_layers(stage, plan, first_plan, args),
        page_links=page_links(args, hellos, stage),
        log_mib=args.log_mib,
    )


def _host_link(hellos: Sequence[WorkerHello], boundary: int, incarnation: int) -> str:
    """The link behind stage `boundary`: within a host, or to the cluster port of the next one."""
    upstream, downstream = hellos[boundary], hellos[boundary + 1]
    name = f"link-{incarnation}-{boundary}"
    if upstream.host_key == downstream.host_key:
        return f"unix:{downstream.run_directory}/{name}"
    return f"tcp:{downstream.host_address}/{name}"


def _spare_layers(
    stage: int, plan: StagePlan, first_plan: StagePlan, args: PipelineArgs
) -> tuple[int, ...]:
    """Layers whose weights the stage loads beside its own: if weights are resident, all that it has
    had in memory since the server's start."""
    spare = args.migration.layers_to_load(first_plan, stage)
    if not spare:
        return ()
    own = plan.layers_of(stage)
    return tuple(sorted({*spare, *first_plan.layers_of(stage)} - {*own}))
