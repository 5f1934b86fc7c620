"""Scores the demo model on held-out questions, from a model directory or a running server.

People run `python -m benchmark.demo_model.evaluate --model DIRECTORY`, or with `--base-url
http://host:port/v1` to score whatever serves the OpenAI chat interface there.  It must only ask
questions whose content is held out, and must count an answer right only if it is exactly equal
and the model stopped by itself.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmark.demo_model.tasks import TASK_NAMES, Question, make_question

ANSWER_TOKEN_LIMIT = 128
SHOWN_MISTAKE_COUNT = 5


@dataclass(frozen=True)
class Reply:
    """The model's answer, and whether the model ended its turn by itself."""

    text: str
    stopped: bool


@dataclass(frozen=True)
class TaskScore:
    """Counts of one task; a right answer is exactly equal and ended by itself."""

    task: str
    asked: int
    right: int
    stopped: int

    @property
    def percent(self) -> float:
        """Right answers in percent."""
        return 100.0 * self.right / max(1, self.asked)


Answerer = Callable[[list[Question]], list[Reply]]


def held_out_questions(per_task: int, seed: int) -> list[Question]:
    """Return `per_task` held-out questions of every task, no two alike."""
    source = random.Random(f"evaluate {seed}")
    questions: list[Question] = []
    for task in TASK_NAMES:
        by_text: dict[str, Question] = {}
        while len(by_text) < per_task:
            question = make_question(task, source, held_out=True)
            by_text[question.text] = question
        questions += by_text.values()
    return questions


def transformers_answerer(directory: Path, precision: str, batch_size: int) -> Answerer:
    """Return an answerer that decodes greedily with transformers, `batch_size` rows at a time."""
    # Imported here because scoring a server needs neither torch nor transformers.
    import torch

    from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim

    install_torchvision_shim()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (directory / "config.json").exists():
        raise SystemExit(f"no config.json in {directory}; point --model at a model directory")
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    tokenizer.padding_side = "left"
    model = AutoModelForCausalLM.from_pretrained(
        directory, local_files_only=True, dtype=getattr(torch, precision)
    ).eval()

    def answer_batch(batch: list[Question]) -> list[Reply]:
        inputs = tokenizer.apply_chat_template(
            [[{"role": "user", "content": question.text}] for question in batch],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        with torch.inference_mode():
            produced = model.generate(**inputs, max_new_tokens=ANSWER_TOKEN_LIMIT, do_sample=False)
        rows = produced[:, inputs["input_ids"].shape[1] :]
        return [
            Reply(
                tokenizer.decode(row, skip_special_tokens=True),
                tokenizer.eos_token_id in row.tolist(),
            )
            for row in rows
        ]

    def answer(questions: list[Question]) -> list[Reply]:
        replies: list[Reply] = []
        for start in range(0, len(questions), batch_size):
            replies += answer_batch(questions[start : start + batch_size])
            show_progress(len(replies), len(questions))
        return replies

    return answer


def server_answerer(base_url: str, model_name: str, concurrency: int, timeout: float) -> Answerer:
    """Return an answerer that asks a server, `concurrency` requests at a time.

    `base_url` may end in `/v1` or not; `timeout` is in seconds, per request.
    """
    root = base_url.rstrip("/").removesuffix("/v1")

    def ask(question: Question) -> Reply:
        body = {
            "model": model_name,
            "messages": [{"role": "user", "content": question.text}],
            "temperature": 0.0,
            "max_tokens": ANSWER_TOKEN_LIMIT,
        }
        request = urllib.request.Request(
            f"{root}/v1/chat/completions",
            data=json.dumps(body).encode("utf-8"),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            choice = json.load(response)["choices"][0]
        return Reply(choice["message"]["content"] or "", choice["finish_reason"] == "stop")

    def answer(questions: list[Question]) -> list[Reply]:
        replies: list[Reply] = []
        with ThreadPoolExecutor(concurrency) as pool:
            for reply in pool.map(ask, questions):
                replies.append(reply)
                show_progress(len(replies), len(questions))
        return replies

    return answer


def show_progress(done: int, total: int) -> None:
    """Keep one line on the terminal up to date; silent where the output is not a terminal."""
    if sys.stderr.isatty():
        print(f"\r{done}/{total} questions", end="\n" if done == total else "", file=sys.stderr)


def score(questions: list[Question], replies: list[Reply]) -> list[TaskScore]:
    """Return one score per task, in the order of `TASK_NAMES`, then one for all together."""
    pairs = list(zip(questions, replies, strict=True))
    scores = []
    for name in (*TASK_NAMES, "all"):
        chosen = [(q, r) for q, r in pairs if name in (q.task, "all")]
        right = sum(r.stopped and r.text == q.answer for q, r in chosen)
        scores.append(TaskScore(name, len(chosen), right, sum(r.stopped for _, r in chosen)))
    return scores


def print_table(scores: list[TaskScore]) -> None:
    """Print the scores as a table."""
    print(f"{'task':<12}{'asked':>7}{'right':>7}{'percent':>9}{'stopped':>9}")
    for row in scores:
        print(f"{row.task:<12}{row.asked:>7}{row.right:>7}{row.percent:>9.1f}{row.stopped:>9}")


def parse_options() -> argparse.Namespace:
    """Return the command line options."""
    parser = argparse.ArgumentParser(description="Score the demo model on held-out questions.")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--model", type=Path, default=Path("sgl_pipeline/demo_model"))
    where.add_argument("--base-url", help="score this OpenAI-compatible server instead")
    parser.add_argument("--model-name", default="demo", help="model field sent to the server")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--questions", type=int, default=200, help="questions per task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--concurrency", type=int, default=16, help="requests in flight")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds per request")
    parser.add_argument("--json", type=Path, help="also write the scores and mistakes here")
    return parser.parse_args()


def main() -> None:
    """Ask, score, print, and write JSON where asked."""
    options = parse_options()
    if options.base_url:
        answer = server_answerer(
            options.base_url, options.model_name, options.concurrency, options.timeout
        )
    else:
        answer = transformers_answerer(options.model, options.precision, options.batch_size)
    questions = held_out_questions(options.questions, options.seed)
    started = time.monotonic()
    try:
        replies = answer(questions)
    except (urllib.error.URLError, TimeoutError) as error:
        raise SystemExit(f"the server at {options.base_url} did not answer: {error}") from error
    seconds = time.monotonic() - started
    scores = score(questions, replies)
    print_table(scores)
    print(f"{len(questions)} questions in {seconds:.1f} s")
    mistakes = [
        {"task": q.task, "question": q.text, "expected": q.answer, "got": r.text}
        for q, r in zip(questions, replies, strict=True)
        if r.text != q.answer or not r.stopped
    ]
    for mistake in mistakes[:SHOWN_MISTAKE_COUNT]:
        print("wrong:", json.dumps(mistake, ensure_ascii=False))
    if options.json:
        write_result(options.json, scores, mistakes, seconds)


def write_result(
    path: Path, scores: list[TaskScore], mistakes: list[dict[str, str]], seconds: float
) -> None:
    """Write scores (percent), mistakes and duration (seconds) as JSON."""
    result: dict[str, Any] = {
        "scores": [{**asdict(row), "percent": row.percent} for row in scores],
        "mistakes": mistakes,
        "seconds": seconds,
    }
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
