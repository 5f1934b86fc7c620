"""The messages between the scheduler and a stage worker, besides the orders of `stage_orders.py`.

A worker's life: it connects and sends `WorkerHello`; answers each `MeasureCosts`, which comes if
the layers are split by time, with `MeasuredCosts`; gets a `StageAssignment`; loads its weights,
with a `StillLoading` now and then, and sends `StageLoaded`; gets a `PoolSize`, the smallest
capacity of all stages; allocates, opens its links, rehearses steps and sends `StageReady`. Then
come the `SealedOrder`s, with a `StageReport` for every step in them and the reports of
`move_orders.py` for every layer move, those of `store_orders.py` for transfers of pages, and a
`ProfileReply` for `StartProfile` and `StopProfile`, until `Shutdown` or a `WorkerFailed`. When
another stage is lost, a `Regroup` comes in between, which is answered with `Regrouped`; when the
number of stages changes, another `StageAssignment`, with which the worker starts over and keeps
only its weights. A serving worker that is asked to go sends `WorkerLeaves` and continues, until
another worker is ready for its stage: then it gets `HandPagesOver` and the other `TakePagesOver`,
which it answers with `PagesCopied`; `FinishHandover`, between two steps, brings the `PagesTaken` of
the other, and the leaver its `Shutdown`. Frozen, tagged structs; never pickled.
"""

from typing import Annotated

import msgspec

from sgl_pipeline.args import StageArgs
from sgl_pipeline.costs.stage_costs import MadeUpStep, PartCosts
from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.requests import LogprobRows
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.lease_orders import OffloadedWork, PagesLent
from sgl_pipeline.wire.move_orders import MoveDone, MoveFailed, MoveReady
from sgl_pipeline.wire.stage_orders import SealedOrder
from sgl_pipeline.wire.store_orders import PagesLoaded, PagesSaved

Count = Annotated[int, msgspec.Meta(ge=0)]


class WorkerHello(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A worker is up and waits for its position.

    It may use the CPU `cores` of `host`; `num_gpus` and `memory_bytes` are the whole host's.
    `version` is that of its sgl_pipeline, `transformers` that of the package (empty: not there).
    Its host's sockets are in `run_directory`, the model is at `model_path` (empty: where the
    scheduler has it). `host_address` is the host's cluster port, where other hosts reach it; empty
    where there are no other hosts.
    """

    worker: int
    host: str
    cores: tuple[int, ...]
    num_gpus: int
    memory_bytes: int
    version: str
    transformers: str = ""
    run_directory: str = ""
    model_path: str = ""
    host_address: str = ""

    @property
    def host_key(self) -> str:
        """A key that all workers of one host share, and no worker of another."""
        return self.host_address or self.host


class StageAssignment(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The position that a worker fills, and all it needs to load and run it.

    `args` are those of the server, with the model's path on the worker's host. `links` has one
    address per stage boundary: `links[s]` joins stage `s` to stage `s + 1`. `gpu` is the index of
    the GPU on the worker's host, which `stages_on_gpu` stages share. `cpu_threads` is the number of
    compute threads; `cpu_cores` are the cores to pin them to (empty: do not pin). With
    `fewer_pages_do` pages and state slots that do not fit into memory get as many as do.
    Layers that move: `max_layers` is the most that the stage may hold at once (None: those of
    `plan`), `spare_layers` are those whose weights it loads beside its own, `page_links` where it
    meets each stage to hand over pages: a directory of this host, or a host's cluster port.
    `log_mib` bounds the memory for the rows that the stage has sent; 0: it keeps none.
    """

    stage: int
    plan: StagePlan
    args: StageArgs
    gpu: int = 0
    stages_on_gpu: int = 1
    page_size: int
    fewer_pages_do: bool = False
    links: tuple[str, ...]
    cpu_threads: int
    cpu_cores: tuple[int, ...]
    max_layers: int | None = None
    spare_layers: tuple[int, ...] = ()
    page_links: tuple[str, ...] = ()
    log_mib: int = 0


class MeasureCosts(msgspec.Struct, frozen=True, tag=True):
    """Time the parts of a model in `steps` before the stages are handed out; without steps, report
    only how large the parts are. `assignment` is what the worker would get if all stages had
    equally many layers."""

    assignment: StageAssignment
    steps: tuple[MadeUpStep, ...]


class MeasuredCosts(msgspec.Struct, frozen=True, tag=True):
    """The times of the steps on this worker, one sample for each."""

    worker: int
    costs: PartCosts


class StillLoading(msgspec.Struct, frozen=True, tag=True):
    """The worker gets on with what it was asked for; said now and then while that takes long.
    `num_layers` are the layers of its stage that it has read."""

    worker: int
    num_layers: Count = 0


class StageLoaded(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Weights are in memory. `num_pages` is how many KV pages this stage can hold, `page_bytes`
    what one takes in as many layers as the stage may ever hold, `num_state_slots` how many state
    slots it can hold beside them."""

    stage: int
    num_pages: Count
    weight_bytes: Count
    page_bytes: Count
    load_seconds: float
    num_state_slots: Count = 0


class PoolSize(msgspec.Struct, frozen=True, tag=True):
    """The numbers of pages and state slots that all stages use: the minima over their
    capacities."""

    num_pages: int
    num_state_slots: int = 0


class StageReady(msgspec.Struct, frozen=True, tag=True):
    """The pool is allocated, the links are open, and steps have been rehearsed, which took
    `rehearsal_s`. `attention_backend` and `layer_kernels` are those in use; `notices` are for the
    user and shown once, however many stages send them. Of `log_pages` pages the stage can keep the
    rows that it sends."""

    stage: int
    attention_backend: str
    layer_kernels: str
    notices: tuple[str, ...] = ()
    log_pages: int = 0
    rehearsal_s: float = 0.0


class StageReport(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One stage ran one step. The last stage adds the sampled token ids, in chunk order, and the
    rows of log-probabilities of each chunk whose request wants any, in chunk order as well. A chunk
    with drafts has `Chunk.num_samples` of both.

    Of a step with chunks of leases (`lease_orders.py`) each stage reports its part of the attention
    as `offloaded`, and in `lost_leases` the numbers of those that it could not use: what their rows
    have become has no meaning.
    """

    stage: int
    step_id: int
    epoch: int
    timing: StageTiming
    token_ids: tuple[Count, ...] | None = None
    logprobs: tuple[LogprobRows, ...] = ()
    offloaded: OffloadedWork | None = None
    lost_leases: tuple[Count, ...] = ()


class Regroup(msgspec.Struct, frozen=True, tag=True):
    """A stage was lost: drop all steps and orders before this, which are not awaited any more, and
    join the stages anew. Taken before orders that have arrived already.

    The stage keeps its weights, holds its layers of `plan`, and opens `links`, as in its
    `StageAssignment`, for the stream of orders `incarnation`. `page_links` are as there.
    """

    incarnation: int
    plan: StagePlan
    links: tuple[str, ...]
    page_links: tuple[str, ...] = ()


class Regrouped(msgspec.Struct, frozen=True, tag=True):
    """The stage has let go of the old stream and opened the links of `incarnation`."""

    stage: int
    incarnation: int


class WorkerLeaves(msgspec.Struct, frozen=True, tag=True):
    """The worker was asked to go (SIGTERM). It serves until its stage is another one's."""

    worker: int


class HandPagesOver(msgspec.Struct, frozen=True, tag=True):
    """Copy what `pages` and the state slots `slots` hold of all layers of the stage to the worker
    that will fill it, at `address`, beside the steps to come; then answer with `PagesCopied`.

    `handover` is unique for the life of the server, `address` as in `StageAssignment.links`,
    `pages` and `slots` are int32 arrays. It takes the place of a handover before it.
    """

    handover: int
    address: str
    pages: bytes
    slots: bytes


class TakePagesOver(msgspec.Struct, frozen=True, tag=True):
    """Take the pages that come at `address`, as in `HandPagesOver`, and answer with `PagesTaken` at
    the end."""

    handover: int
    address: str


class FinishHandover(msgspec.Struct, frozen=True, tag=True):
    """No step is under way, and none will come before the handover is over or given up: send what
    the other worker lacks."""

    handover: int


class PagesCopied(msgspec.Struct, frozen=True, tag=True):
    """All pages were sent once, and what steps have written since is little."""

    stage: int
    handover: int


class PagesTaken(msgspec.Struct, frozen=True, tag=True):
    """The worker has the keys, values and states of the stage that it is to fill."""

    stage: int
    handover: int


class StartProfile(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Record the steps from now on with torch's profiler, until `StopProfile` or for `num_steps`.

    `path` is the gzipped Chrome trace to write; `activities` are of "CPU" and "GPU".
    """

    path: str
    activities: tuple[str, ...]
    with_stack: bool
    record_shapes: bool
    num_steps: int | None


class StopProfile(msgspec.Struct, frozen=True, tag=True):
    """End the recording, if there is one, and write it."""


class ProfileReply(msgspec.Struct, frozen=True, tag=True):
    """A recording was started or ended, by request or after its last step. `error` describes a
    failure: the stage goes on without the recording."""

    stage: int
    is_recording: bool
    error: str = ""


class WorkerFailed(msgspec.Struct, frozen=True, tag=True):
    """A worker cannot go on. `is_configuration` marks what the user can fix with a flag."""

    worker: int
    message: str
    is_configuration: bool


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Finish and leave."""


ToWorker = (
    MeasureCosts
    | StageAssignment
    | PoolSize
    | SealedOrder
    | Regroup
    | HandPagesOver
    | TakePagesOver
    | FinishHandover
    | StartProfile
    | StopProfile
    | Shutdown
)
FromWorker = (
    WorkerHello
    | MeasuredCosts
    | StillLoading
    | StageLoaded
    | StageReady
    | Regrouped
    | WorkerLeaves
    | PagesCopied
    | PagesTaken
    | StageReport
    | MoveReady
    | MoveDone
    | MoveFailed
    | PagesLent
    | PagesSaved
    | PagesLoaded
    | ProfileReply
    | WorkerFailed
)
