"""One stage of a model by itself: the real `StageRunner`, fed one step again and again.

Its neighbors are stood in for by a link that has the rows of upstream ready and drops what goes
downstream, so that times are those of the stage alone.
"""

from array import array
from dataclasses import dataclass

import torch

from benchmark.gpu.device_times import Kernel, profile_kernels, repeat_ms
from benchmark.gpu.shapes import PAGE_SIZE, Step
from sgl_pipeline.args import StageArgs
from sgl_pipeline.pp_runner.kernel_choice import choose_layer_kernels, make_layer_kernels
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import LayerKernels
from sgl_pipeline.pp_runner.links.activation_link import ActivationShape
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec, ModelSpec
from sgl_pipeline.pp_runner.model.native_stage import NativeStageModel
from sgl_pipeline.pp_runner.stage_runner import StageRunner
from sgl_pipeline.requests import GREEDY, LogprobSpec, SamplingSpec
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.stage_messages import StageAssignment, StageReport
from sgl_pipeline.wire.step_order import (
    INT32,
    ChunkOrder,
    MirrorSnapshot,
    RequestOpen,
    StepOrder,
)


def kernels_for(
    device: torch.device,
    dtype: torch.dtype,
    name: str = "auto",
    spec: ModelSpec | None = None,
) -> LayerKernels:
    """The kernels that `--stage-kernels name` chooses; see `make_layer_kernels`."""
    return make_layer_kernels(choose_layer_kernels(name, dtype, device), spec=spec)


class StandInLink:
    """An `ActivationLink` without another end; `rows`, random and fixed, come from upstream."""

    def __init__(self, shape: ActivationShape, max_rows: int) -> None:
        self.rows = torch.randn(max_rows, shape.hidden_size, device=shape.device).to(shape.dtype)
        self.sent: torch.Tensor | None = None

    def send(self, step_id: int, hidden: torch.Tensor) -> None:
        self.sent = hidden

    def receive(self, step_id: int, num_rows: int) -> torch.Tensor:
        return self.rows[:num_rows]

    def has_room(self) -> bool:
        return True

    def has_rows(self) -> bool:
        return True

    @property
    def descriptor(self) -> int | None:
        return None

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class StagePlace:
    """Stage `stage` of a model whose layers are split as `plan` says."""

    spec: DecoderSpec
    plan: StagePlan
    stage: int

    @property
    def num_layers(self) -> int:
        return self.plan.layer_counts[self.stage]

    @property
    def is_last(self) -> bool:
        return self.stage == self.plan.num_stages - 1

    def assignment(
        self, device: torch.device, dtype: torch.dtype, page_size: int, backend: str, graphs: str
    ) -> StageAssignment:
        return StageAssignment(
            stage=self.stage,
            plan=self.plan,
            args=StageArgs(
                model_path="",
                load_format="dummy",
                dtype=str(dtype).removeprefix("torch."),
                device=device.type,
                attention_backend=backend,
                graphs=graphs,
            ),
            page_size=page_size,
            links=(),
            cpu_threads=1,
            cpu_cores=(),
        )


class LoneStage:
    """A stage with random weights and a pool of `num_pages`.

    Args:
        max_rows: the most rows of a step.
        backend, graphs: as `--stage-attention-backend` and `--stage-graphs`.
        model: weights to use in place of the dummy ones.
    """

    def __init__(
        self,
        place: StagePlace,
        device: torch.device,
        *,
        num_pages: int,
        max_rows: int,
        dtype: torch.dtype = torch.bfloat16,
        page_size: int = PAGE_SIZE,
        backend: str = "auto",
        graphs: str = "auto",
        model: NativeStageModel | None = None,
    ) -> None:
        self.place = place
        self.device = device
        self._num_pages = num_pages
        self._page_size = page_size
        self.model = model or NativeStageModel.load(
            place.spec,
            "",
            layers=place.plan.layers_of(place.stage),
            is_first=place.stage == 0,
            is_last=place.is_last,
            dtype=dtype,
            device=device,
            kernels=kernels_for(device, dtype, spec=place.spec),
            load_format="dummy",
        )
        self.link = StandInLink(ActivationShape(place.spec.hidden_size, dtype, device), max_rows)
        self.runner = StageRunner(
            place.assignment(device, dtype, page_size, backend, graphs),
            self.model,
            place.spec.attention_shapes(page_size, dtype, device),
            num_pages,
            self.link,
        )
        self._plans: list[StepOrder] = []

    def prepare(
        self,
        step: Step,
        repeats: int,
        sampling: SamplingSpec = GREEDY,
        logprob_ids: tuple[int, ...] = (),
    ) -> None:
        """Opens the requests of `step`, on shuffled pages that none of them share, and makes
        `repeats` plans of it. Each chunk's last row tells the log-probabilities of `logprob_ids`.
        """
        order = torch.randperm(self._num_pages, generator=torch.Generator().manual_seed(0)).tolist()
        opens, contents, chunks = [], [], []
        for handle, extent in enumerate(step.chunks):
            end = extent.start + extent.length
            num_pages = -(-end // self._page_size)
            pages = array(INT32, [order.pop() for _ in range(num_pages)]).tobytes()
            token_ids = (torch.arange(end) * 31 + handle * 7) % self.place.spec.vocab_size
            tokens = array(INT32, token_ids.tolist()).tobytes()
            logprobs = LogprobSpec(end - 1, 0, logprob_ids) if logprob_ids else None
            opens.append(RequestOpen(handle, sampling, end, logprobs))
            contents.append(ChunkOrder(handle, end, 0, False, tokens, pages))
            chunks.append(ChunkOrder(handle, extent.start, extent.length, True))
        self.runner.restore(MirrorSnapshot(tuple(opens), tuple(contents)))
        epoch = self.place.plan.epoch
        self._plans = [StepOrder(n, epoch, (), (), tuple(chunks)) for n in reversed(range(repeats))]

    def run(self) -> StageReport:
        """The next of the prepared repeats; waits for the device on the last stage alone."""
        return self.runner.launch(self.runner.prepare(self.next_order())).report()

    def next_order(self) -> StepOrder:
        """The next of the prepared repeats, which the caller runs."""
        return self._plans.pop()

    def step_ms(self, step: Step, warmups: int = 3, repeats: int = 20) -> float:
        """Milliseconds of a step among `repeats` that follow each other without a pause."""
        self.prepare(step, warmups + repeats)
        return repeat_ms(self.run, self.device, warmups=warmups, repeats=repeats)

    def kernels(self, step: Step, repeats: int = 3) -> list[Kernel]:
        """The kernels and copies of a step; see `profile_kernels`."""
        self.prepare(step, 1 + repeats)
        return profile_kernels(self.run, self.device, repeats=repeats)
