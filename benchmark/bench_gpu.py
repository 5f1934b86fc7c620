"""Checks and times the stages of a pipeline on one NVIDIA GPU; needs no model files and no SGLang.

    python -m benchmark.bench_gpu

First the checks: FlashInfer's attention against plain torch on random paged layouts, a whole model
in bf16 against fp32, drawn tokens against the CPU's. Then the step times of Qwen3-shaped stages
with random weights, at depths 1, 2 and 4: `step ms` is the time of a step among many in a row,
`kernels` the share of it that the sum of its kernels takes (the rest the card idles), `limit` the
share of the larger of two times: moving each weight, key and value once at the copy bandwidth that
was measured on the card, and the arithmetic at the rate measured for a large product. Last, real
stage processes on the one card. Ends within `--budget-s`: what did not fit is named.

Exits with 1 when a check fails. Untested on hardware.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmark.dated_result import RESULTS, markdown_table, save_result
from benchmark.gpu.checks import Check, check_attention, check_sampler, check_stage
from benchmark.gpu.limits import CardLimits, measure_limits, release_memory
from benchmark.gpu.lone_stage import LoneStage, StagePlace
from benchmark.gpu.pipelines import PipelineRun, Script, run_pipeline
from benchmark.gpu.shapes import FEW_STEPS, MODELS, STEPS, Step, spec_of, step_work
from sgl_pipeline.layer_partition import even_layer_counts
from sgl_pipeline.stage_plan import StagePlan

PAGE_SIZE = 16
DEPTHS = (1, 2, 4)
LINKS = {"cuda": ("host", "cuda-ipc"), "cpu": ("host",)}
# Of the card's memory, for weights and pages of a stage under test.
_MEMORY_SHARE = 0.8
_SMALL_SCRIPT = Script(num_requests=8, prompt_tokens=32, num_rounds=4, num_groups=4)

Row = dict[str, Any]


@dataclass
class Bench:
    """One run: what was measured, and how much time is left."""

    device: torch.device
    models: Sequence[str]
    depths: Sequence[int]
    steps: Sequence[Step]
    script: Script
    deadline_s: float
    limits: CardLimits | None = None
    checks: list[Check] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    pipelines: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def within_budget(self, what: str, needed_s: float = 0.0) -> bool:
        """Whether there is time for `what`, which is noted where there is not."""
        left_s = self.deadline_s - time.monotonic()
        if left_s > needed_s:
            print(f"[{left_s:4.0f} s left] {what}", flush=True)
            return True
        self.skipped.append(what)
        return False

    def check_all(self) -> None:
        """Correctness; FlashInfer compiles its kernels here, for minutes on a fresh machine."""
        for model in self.models:
            spec = spec_of(model)
            shape = spec.attention_shape(PAGE_SIZE, torch.bfloat16, self.device)
            heads = f"{spec.num_query_heads}/{spec.num_kv_heads} heads of {spec.head_dim}"
            if self.within_budget(f"checking attention, {heads}"):
                self._book(check_attention(shape, heads, "auto"))
        if self.within_budget("checking the sampler"):
            self._book(check_sampler(self.device))
        for model in self.models:
            if self.within_budget(f"checking a stage of {model}"):
                self._book(*check_stage(spec_of(model), model, self.device, "auto"))

    def time_stages(self) -> None:
        """The first model's depths, then the next one's."""
        for model in self.models:
            for depth in self.depths:
                plan = StagePlan(0, even_layer_counts(spec_of(model).num_layers, depth))
                for stage in sorted({0, depth // 2, depth - 1} if depth > 1 else {0}):
                    what = f"timing stage {stage} of {depth} of {model}"
                    if self.within_budget(what, needed_s=20.0):
                        self._time_stage(model, StagePlace(spec_of(model), plan, stage))
            what = f"timing {model} in one stage without graphs"
            if self.device.type == "cuda" and self.within_budget(what, needed_s=20.0):
                plan = StagePlan(0, (spec_of(model).num_layers,))
                place = StagePlace(spec_of(model), plan, 0)
                self._time_stage(model, place, FEW_STEPS, graphs="off")

    def run_pipelines(self) -> None:
        """The smallest model in processes: one stage, then each depth with each link."""
        model = self.models[0]
        reference: PipelineRun | None = None
        for depth in self.depths:
            for link in LINKS[self.device.type][: None if depth > 1 else 1]:
                what = f"running {depth} stage processes of {model}, link {link}"
                if not self.within_budget(what, needed_s=60.0):
                    continue
                release_memory()
                run = run_pipeline(model, depth, link, self.script, self.device.type)
                reference = reference or run
                share = run.same_tokens_share(reference)
                self._book(Check(f"tokens of {depth} stages, {link}", 1 - share, 0.01))
                self.pipelines.append(
                    {
                        "model": model,
                        "stages": depth,
                        "link": link if depth > 1 else "none",
                        "start_s": run.start_s,
                        "prefill_ms": run.prefill_ms,
                        "round_ms": run.round_ms,
                        "tokens_per_s": self.script.num_requests / run.round_ms * 1e3,
                        "wait_shares": run.wait_shares,
                    }
                )

    def _book(self, *checks: Check) -> None:
        for check in checks:
            print("    " + " | ".join(check.cells()), flush=True)
        self.checks += checks

    def _time_stage(
        self, model: str, place: StagePlace, steps: Sequence[Step] = (), graphs: str = "auto"
    ) -> None:
        assert self.limits is not None
        release_memory()
        num_pages = self._pages_that_fit(place)
        wanted = steps or self.steps
        steps = [step for step in wanted if step.num_pages(PAGE_SIZE) <= num_pages]
        too_large = [step.name for step in wanted if step not in steps]
        if too_large:
            self.skipped.append(f"{model}, {place.plan.num_stages} stages: {', '.join(too_large)}")
        if not steps:
            return
        stage = LoneStage(
            place,
            self.device,
            num_pages=max(step.num_pages(PAGE_SIZE) for step in steps),
            max_rows=max(step.num_rows for step in steps),
            graphs=graphs,
        )
        for step in steps:
            if self.deadline_s < time.monotonic():
                self.skipped.append(f"{model}, stage {place.stage}: {step.name}")
                continue
            work = step_work(place.spec, place.num_layers, place.is_last, step.chunks)
            self.rows.append(
                {
                    "model": model,
                    "stages": place.plan.num_stages,
                    "stage": place.stage,
                    "layers": place.num_layers,
                    "graphs": graphs,
                    "kind": step.kind,
                    "step": step.name,
                    "rows": step.num_rows,
                    "step_ms": stage.time_steps(step),
                    "kernels_ms": stage.kernel_ms(step),
                    "bytes_ms": self.limits.bytes_ms(work),
                    "flops_ms": self.limits.flops_ms(work),
                    "limit_ms": self.limits.limit_ms(work),
                }
            )

    def _pages_that_fit(self, place: StagePlace) -> int:
        """Pages beside the stage's weights, of which lm_head and embedding count in full."""
        spec = place.spec
        if self.device.type != "cuda":
            return 4096
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        weights = step_work(spec, place.num_layers, True, ()).num_bytes
        weights += 2 * spec.vocab_size * spec.hidden_size
        token_bytes = 4 * spec.num_kv_heads * spec.head_dim * place.num_layers
        return int(_MEMORY_SHARE * free_bytes - weights) // (token_bytes * PAGE_SIZE)


def texts_of(bench: Bench) -> list[str]:
    """The tables, each with its heading."""
    failed = [check.name for check in bench.checks if not check.passed]
    texts = [
        "## Checks\n\n"
        + markdown_table(["check", "error", "bound", ""], [check.cells() for check in bench.checks])
        + ("\n\nFAILED: " + "; ".join(failed) if failed else "")
    ]
    for model in bench.models:
        rows = [row for row in bench.rows if row["model"] == model]
        if rows:
            texts.append(f"## {model}: stages by themselves\n\n" + step_table(rows))
    if bench.pipelines:
        texts.append(
            "## Stage processes on the one card\n\nA round is a token for each of "
            f"{bench.script.num_requests} requests.\n\n" + pipeline_table(bench.pipelines)
        )
    if bench.skipped:
        texts.append("Not measured, for time or memory:\n\n- " + "\n- ".join(bench.skipped))
    return texts


def step_table(rows: Sequence[Row]) -> str:
    """Step times of one model's stages, as shares of kernels and limits."""
    heads = [
        "stage",
        "layers",
        "graphs",
        "step",
        "step ms",
        "kernels",
        "limit",
        "of bytes",
        "of FLOPs",
    ]
    return markdown_table(
        heads,
        [
            [
                f"{row['stage']} of {row['stages']}",
                str(row["layers"]),
                row["graphs"],
                row["step"],
                f"{row['step_ms']:.3f}",
                _share(row["kernels_ms"], row["step_ms"]),
                _share(row["limit_ms"], row["step_ms"]),
                _share(row["bytes_ms"], row["step_ms"]),
                _share(row["flops_ms"], row["step_ms"]),
            ]
            for row in rows
        ],
    )


def pipeline_table(rows: Sequence[Row]) -> str:
    heads = ["stages", "link", "start s", "prefill ms", "round ms", "tokens/s", "waited for rows"]
    return markdown_table(
        heads,
        [
            [
                str(row["stages"]),
                row["link"],
                f"{row['start_s']:.1f}",
                f"{row['prefill_ms']:.1f}",
                f"{row['round_ms']:.2f}",
                f"{row['tokens_per_s']:.0f}",
                ", ".join(f"{share:.0%}" for share in row["wait_shares"]),
            ]
            for row in rows
        ],
    )


def main(argv: list[str] | None = None) -> int:
    """Checks, measures, prints and saves."""
    options = _parse(argv)
    started = time.monotonic()
    torch.set_grad_enabled(False)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("bench_gpu needs an NVIDIA GPU; --device cpu tries the benchmark itself")
        return 2
    bench = Bench(
        device=device,
        models=options.models,
        depths=options.depths,
        steps=FEW_STEPS if options.few else STEPS,
        script=_SMALL_SCRIPT if options.few else Script(),
        deadline_s=started + options.budget_s,
    )
    print("measuring the card", flush=True)
    size = {} if device.type == "cuda" else {"num_bytes": 2**24, "size": 512}
    bench.limits = measure_limits(device, **size)
    parts: dict[str, Callable[[], None]] = {
        "checks": bench.check_all,
        "pipelines": bench.run_pipelines,
        "stages": bench.time_stages,
    }
    for name, part in parts.items():
        if name in options.parts:
            part()
    texts = texts_of(bench)
    print("\n" + "\n\n".join(texts))
    if options.save:
        seconds = f"{time.monotonic() - started:.0f}"
        record = {
            "checks": [asdict(check) for check in bench.checks],
            "rows": bench.rows,
            "pipelines": bench.pipelines,
            "skipped": bench.skipped,
        }
        facts = {"card": bench.limits.facts(), "run": {"seconds": seconds}}
        stem = save_result("bench_gpu", "gpu", facts, record, texts, options.folder)
        print(f"\nsaved {stem}.md and .json, after {seconds} s")
    return 0 if all(check.passed for check in bench.checks) else 1


def _share(part: float | None, whole: float) -> str:
    return "-" if part is None else f"{part / whole:.0%}"


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmark.bench_gpu")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=[name for name in MODELS if name != "tiny"],
        metavar="MODEL",
        help=f"of {', '.join(MODELS)}",
    )
    parser.add_argument("--depths", nargs="+", type=int, default=list(DEPTHS))
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=["checks", "pipelines", "stages"],
        default=["checks", "pipelines", "stages"],
    )
    parser.add_argument("--few", action="store_true", help="three steps only, and a short script")
    parser.add_argument("--budget-s", type=float, default=450.0, help="seconds (default: 450)")
    parser.add_argument("--no-save", dest="save", action="store_false", help="print only")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where results are saved")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
