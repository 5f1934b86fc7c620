"""Two tasks for lm-eval with data that the demo model can answer: held-out questions of its own.

Written by `run.py` for each run. `generate` is judged by exact match of what the server generates,
`choose` by the likelihood that it gives to the right answer and to two wrong ones.
"""

import json
from pathlib import Path
from typing import Any

from benchmark.demo_model.evaluate import held_out_questions

GENERATE, CHOOSE = "demo_generate", "demo_choose"
_SHARED = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{prompt}}}}"
target_delimiter: ""
metadata: {{version: 1}}
"""
_GENERATE = """
task: demo_generate
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["<|end|>"], max_gen_toks: 128, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
_CHOOSE = """
task: demo_choose
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def write_tasks(directory: Path, questions: int) -> None:
    """Writes both tasks and their data, `questions` of each kind, into `directory`."""
    data = directory / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows(questions)), encoding="utf-8")
    for name, body in ((GENERATE, _GENERATE), (CHOOSE, _CHOOSE)):
        text = body + _SHARED.format(data=data)
        (directory / f"{name}.yaml").write_text(text, encoding="utf-8")


def rows(questions: int) -> list[dict[str, Any]]:
    """`questions` of each kind in the demo model's chat template; the wrong choices are answers to
    others."""
    asked = held_out_questions(questions, seed=1)
    answers = list(dict.fromkeys(question.answer for question in asked))
    found: list[dict[str, Any]] = []
    for question in asked:
        place = answers.index(question.answer)
        found.append(
            {
                "prompt": f"<|user|>{question.text}<|end|><|assistant|>",
                "answer": question.answer,
                "choices": [answers[place - 1], question.answer, answers[place - 2]],
                "label": 1,
            }
        )
    return found
