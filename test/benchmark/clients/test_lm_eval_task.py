"""The tasks that lm-eval is given, and how its likelihoods are read and held against others."""

import json
from pathlib import Path

import pytest
import yaml

from benchmark.clients.likelihoods import (
    expected_likelihoods,
    largest_difference,
    mean_difference,
    served_likelihoods,
)
from benchmark.clients.lm_eval_task import CHOOSE, GENERATE, rows, write_tasks

DEMO_MODEL = Path(__file__).resolve().parents[3] / "sgl_pipeline" / "demo_model"


def test_the_right_choice_is_the_answer_and_no_other_is() -> None:
    for row in rows(2):
        assert row["choices"][row["label"]] == row["answer"]
        assert row["choices"].count(row["answer"]) == 1


def test_both_tasks_read_the_written_data(tmp_path: Path) -> None:
    write_tasks(tmp_path, 2)
    for name in (GENERATE, CHOOSE):
        task = yaml.safe_load((tmp_path / f"{name}.yaml").read_text())
        assert task["task"] == name
        data = Path(task["dataset_kwargs"]["data_files"]["test"])
        assert [json.loads(line) for line in data.read_text().splitlines()] == rows(2)


def test_the_right_answer_is_the_likeliest_to_transformers() -> None:
    row = rows(2)[0]
    pairs = {(row["prompt"], choice): 0.0 for choice in row["choices"]}
    likelihoods = expected_likelihoods(DEMO_MODEL, pairs)
    assert max(likelihoods, key=lambda pair: likelihoods[pair])[1] == row["answer"]


def test_likelihoods_are_read_from_samples_of_lm_eval(tmp_path: Path) -> None:
    samples = tmp_path / "samples.jsonl"
    arguments = {
        "gen_args_0": {"arg_0": "<|user|>1+1<|end|>", "arg_1": "2"},
        "gen_args_1": {"arg_0": "<|user|>1+1<|end|>", "arg_1": "3"},
    }
    sample = {"arguments": arguments, "filtered_resps": [["-0.25", "True"], ["-4.5", "False"]]}
    samples.write_text(json.dumps(sample) + "\n")
    found = served_likelihoods(samples)
    assert found == {("<|user|>1+1<|end|>", "2"): -0.25, ("<|user|>1+1<|end|>", "3"): -4.5}
    others = dict.fromkeys(found, -1.0)
    assert largest_difference(found, others) == pytest.approx(3.5)
    assert mean_difference(found, others) == pytest.approx((0.75 + 3.5) / 2)
