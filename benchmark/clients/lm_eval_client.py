"""Runs lm-eval on both tasks of `lm_eval_task.py` against a server, and reads what it wrote."""

import json
from dataclasses import dataclass
from pathlib import Path

from benchmark.clients.client_process import run_client
from benchmark.clients.demo_server import MODEL_NAME
from benchmark.clients.likelihoods import Likelihoods, served_likelihoods
from benchmark.clients.lm_eval_task import CHOOSE, GENERATE, write_tasks
from benchmark.support.paths import DEMO_MODEL

LEAST_EXACT_MATCH = 0.9  # of the demo model in 32 or 16 bits


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of lm-eval, each of 0 to 1, and the answers that it got: the text that was generated
    to each prompt, and the log-likelihoods of all choices; those of right answers once more."""

    exact_match: float
    accuracy: float
    answers: dict[str, str]
    likelihoods: Likelihoods
    right_likelihoods: Likelihoods


def evaluate(url: str, directory: Path, questions: int) -> Scores:
    """Both tasks, with `questions` of each kind that the demo model knows, in `directory`."""
    write_tasks(directory, questions)
    served = f"model={MODEL_NAME},base_url={url}/v1/completions,num_concurrent=8,max_retries=1"
    tokenizer = f"tokenizer={DEMO_MODEL},tokenizer_backend=huggingface"
    command = ["run", "--model", "local-completions", "--model_args", f"{served},{tokenizer}"]
    command += ["--include_path", str(directory), "--tasks", f"{GENERATE},{CHOOSE}"]
    output = directory / "lm_eval"
    command += ["--output_path", str(output), "--log_samples"]
    run_client("lm_eval", ["lm_eval", *command], directory)
    return read_scores(output)


def read_scores(output: Path) -> Scores:
    """The scores of the one run that wrote into `output`."""
    (results,) = output.rglob("results_*.json")
    (generated,) = output.rglob(f"samples_{GENERATE}_*.jsonl")
    (chosen,) = output.rglob(f"samples_{CHOOSE}_*.jsonl")
    scores = json.loads(results.read_text(encoding="utf-8"))["results"]
    samples = list(map(json.loads, generated.read_text(encoding="utf-8").splitlines()))
    right = [(one["doc"]["prompt"], one["doc"]["answer"]) for one in samples]
    likelihoods = served_likelihoods(chosen)
    return Scores(
        exact_match=scores[GENERATE]["exact_match,none"],
        accuracy=scores[CHOOSE]["acc,none"],
        answers={one["doc"]["prompt"]: one["filtered_resps"][0] for one in samples},
        likelihoods=likelihoods,
        right_likelihoods={pair: likelihoods[pair] for pair in right},
    )
