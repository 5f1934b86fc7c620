"""Resumable CPU trainer of the demo model.

Run `python -m benchmark.demo_model.train --minutes 80`; run the same command again to continue
from the last checkpoint.  It trains on generated questions only, and must never draw a held-out
one for a gradient step: those only measure progress and set how often each task is drawn.
"""

from __future__ import annotations

import argparse
import random
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from benchmark.demo_model.conversation import IGNORED_LABEL, Batch, ConversationMaker
from benchmark.demo_model.export import export_model
from benchmark.demo_model.model import MATRIX_NAMES, DemoModel, ModelShape
from benchmark.demo_model.muon import BatchedMuon
from benchmark.demo_model.progress import (
    Progress,
    layer_count_at,
    layer_count_stages,
    learning_rate_factor,
    report_accuracy,
    report_step,
)
from benchmark.demo_model.tasks import TASK_NAMES, make_question

LONG_BATCH_EVERY = 4
LONG_LENGTH_FACTOR = 4


class Trainer:
    """Owns the model, its two optimisers and the run's progress."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        torch.set_num_threads(options.threads)
        self.options = options
        self.stop_requested = False
        self.conversations = ConversationMaker()
        self.progress = Progress()
        self.checkpoint_path: Path = options.work_directory / "checkpoint.pt"
        self.use_model(DemoModel(ModelShape(layer_count=layer_count_at(0.0, options.stages))))

    def use_model(self, model: DemoModel) -> None:
        """Train `model` from now on, with optimisers that have seen nothing yet."""
        self.model = model
        matrices = [getattr(model, name) for name in MATRIX_NAMES]
        chosen = {id(matrix) for matrix in matrices}
        others = [weight for weight in model.parameters() if id(weight) not in chosen]
        self.muon = BatchedMuon(matrices, self.options.muon_rate)
        self.adam = torch.optim.AdamW(others, self.options.adam_rate, (0.9, 0.98), weight_decay=0.0)
        self.progress.layer_count = model.shape.layer_count
        self.progress.stage_start_step = self.progress.step
        if self.options.compile:
            # One compiled layer serves all of them, so that compiling takes seconds.
            compiled = torch.compile(model._layer, dynamic=False)
            model._layer = compiled  # type: ignore[method-assign]

    def load(self) -> bool:
        """Continue from the last checkpoint; return whether there was one."""
        if not self.checkpoint_path.exists():
            return False
        saved: dict[str, Any] = torch.load(self.checkpoint_path, weights_only=True)
        progress = Progress(**saved["progress"])
        self.use_model(DemoModel(ModelShape(layer_count=progress.layer_count)))
        self.model.load_state_dict(saved["model"])
        self.muon.load_state_dict(saved["muon"])
        self.adam.load_state_dict(saved["adam"])
        self.progress = progress
        return True

    def save(self) -> None:
        """Write the checkpoint so that a kill at any moment leaves a whole one."""
        self.checkpoint_path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.checkpoint_path.with_suffix(".partial")
        state = {
            "model": self.model.state_dict(),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "progress": vars(self.progress),
        }
        torch.save(state, partial)
        partial.replace(self.checkpoint_path)

    def forward_logits(self, token_ids: Tensor) -> Tensor:
        """Return scores [rows, length, vocabulary] in bfloat16 or float32 arithmetic."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.options.precision == "bfloat16"):
            return self.model.logits(self.model(token_ids))

    def draw_batch(self, fraction_done: float) -> Batch:
        """Return the batch of this step; a resumed run never repeats an earlier draw.

        Late in the run every fourth batch has conversations four times as long, so that the
        model also answers late turns of a long chat.
        """
        rows, length = self.options.rows, self.options.length
        if fraction_done > self.options.long_from and self.progress.step % LONG_BATCH_EVERY == 0:
            rows, length = max(1, rows // LONG_LENGTH_FACTOR), length * LONG_LENGTH_FACTOR
        source = random.Random(f"{self.options.seed} {self.progress.step}")
        return self.conversations.batch(rows, length, self.progress.task_weights(), source)

    def step(self, fraction_done: float) -> Tensor:
        """Do one optimiser step and return its loss as a detached scalar tensor."""
        stage_step = self.progress.step - self.progress.stage_start_step
        factor = learning_rate_factor(stage_step, fraction_done)
        for optimiser, rate in (
            (self.muon, self.options.muon_rate),
            (self.adam, self.options.adam_rate),
        ):
            for group in optimiser.param_groups:
                group["lr"] = rate * factor
        batch = self.draw_batch(fraction_done)
        scores = self.forward_logits(batch.token_ids).float().flatten(0, 1)
        loss = functional.cross_entropy(scores, batch.labels.flatten(), ignore_index=IGNORED_LABEL)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.muon.step()
        self.adam.step()
        self.muon.zero_grad()
        self.adam.zero_grad()
        self.progress.step += 1
        self.progress.tokens_seen += batch.token_ids.numel()
        return loss.detach()

    @torch.no_grad()
    def measure(self, questions_per_task: int) -> None:
        """Update `accuracy_by_task` on held-out single-turn questions.

        Feeding the right answer and asking that every next token be the favourite gives the same
        verdict as greedy decoding, in one pass.
        """
        source = random.Random(f"held out {self.progress.step}")
        for task in TASK_NAMES:
            questions = [
                make_question(task, source, held_out=True) for _ in range(questions_per_task)
            ]
            batch = self.conversations.question_batch(questions)
            # Lengths differ each time, and compiling for each would cost more than it saves.
            with torch.compiler.set_stance("force_eager"):
                guesses = self.forward_logits(batch.token_ids).argmax(-1)
            right = ((guesses == batch.labels) | (batch.labels == IGNORED_LABEL)).all(-1)
            self.progress.accuracy_by_task[task] = right.float().mean().item()

    def run(self) -> None:
        """Train until the time budget is spent, then export."""
        options, progress = self.options, self.progress
        budget_seconds = options.minutes * 60.0
        started = time.monotonic() - progress.elapsed_seconds
        last_save = last_measure = last_print = time.monotonic()
        last_tokens = progress.tokens_seen
        while (elapsed := time.monotonic() - started) < budget_seconds:
            if self.stop_requested:
                self.save()
                print(f"stopped at step {progress.step}; run again to continue", flush=True)
                return
            wanted_layer_count = layer_count_at(elapsed / budget_seconds, options.stages)
            if wanted_layer_count > self.model.shape.layer_count:
                self.use_model(self.model.grown(wanted_layer_count))
                print(f"grown to {wanted_layer_count} layers", flush=True)
            loss = self.step(elapsed / budget_seconds)
            now = time.monotonic()
            progress.elapsed_seconds = now - started
            if now - last_print > options.print_seconds:
                speed = (progress.tokens_seen - last_tokens) / (now - last_print)
                report_step(progress, loss.item(), speed, budget_seconds)
                last_print, last_tokens = now, progress.tokens_seen
            if now - last_measure > options.measure_seconds:
                self.measure(options.measure_questions)
                report_accuracy(progress)
                last_measure = time.monotonic()
            if now - last_save > options.save_seconds:
                self.save()
                last_save = time.monotonic()
        self.save()
        self.measure(200)
        report_accuracy(progress)
        export_model(self.model, options.output)
        print(f"exported to {options.output}", flush=True)


def parse_options() -> argparse.Namespace:
    """Return the command line options."""
    parser = argparse.ArgumentParser(description="Train the demo model; run again to resume.")
    parser.add_argument("--minutes", type=float, default=80.0, help="time budget of the whole run")
    parser.add_argument("--work-directory", type=Path, default=Path("build/demo_model"))
    parser.add_argument("--output", type=Path, default=Path("build/demo_model/export"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=16, help="conversations per step")
    parser.add_argument("--length", type=int, default=256, help="tokens per conversation")
    parser.add_argument(
        "--long-from",
        type=float,
        default=0.75,
        help="fraction of the run after which every fourth batch is long",
    )
    parser.add_argument(
        "--stages",
        type=layer_count_stages,
        default="0:4,0.5:8,0.88:16",
        help="pairs of time fraction and layer count, e.g. 0:4,0.5:16",
    )
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--adam-rate", type=float, default=0.004)
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--print-seconds", type=float, default=20.0)
    parser.add_argument("--measure-seconds", type=float, default=240.0)
    parser.add_argument("--measure-questions", type=int, default=40)
    parser.add_argument("--save-seconds", type=float, default=180.0)
    return parser.parse_args()


def main() -> None:
    """Train, showing progress, and export the result."""
    trainer = Trainer(parse_options())

    def request_stop(signal_number: int, frame: object) -> None:
        trainer.stop_requested = True

    signal.signal(signal.SIGTERM, request_stop)
    signal.signal(signal.SIGINT, request_stop)
    if trainer.load():
        print(f"resuming at step {trainer.progress.step}", flush=True)
    trainer.run()


if __name__ == "__main__":
    main()
