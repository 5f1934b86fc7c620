"""The log-likelihoods of lm-eval's choices by transformers, to hold the server's against.

Used by `run.py`. It must read the choices from lm-eval's own samples, so that both judge the same.
"""

import json
from pathlib import Path

from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim

Likelihoods = dict[tuple[str, str], float]


def served_likelihoods(samples: Path) -> Likelihoods:
    """The likelihood of every (context, continuation) in a `samples_*.jsonl` of lm-eval."""
    found: Likelihoods = {}
    for line in samples.read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        arguments = sample["arguments"]
        pairs = arguments.values() if isinstance(arguments, dict) else arguments
        for pair, response in zip(pairs, sample["filtered_resps"], strict=True):
            context, continuation = pair.values() if isinstance(pair, dict) else pair
            found[context, continuation] = float(response[0])
    return found


def expected_likelihoods(model_path: Path, pairs: Likelihoods) -> Likelihoods:
    """The same by transformers, in fp32."""
    install_torchvision_shim()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    expected: Likelihoods = {}
    for context, continuation in pairs:
        context_ids = tokenizer.encode(context, add_special_tokens=False)
        ids = tokenizer.encode(context + continuation, add_special_tokens=False)
        with torch.inference_mode():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected[context, continuation] = sum(
            float(logprobs[place - 1, ids[place]]) for place in range(len(context_ids), len(ids))
        )
    return expected


def largest_difference(one: Likelihoods, other: Likelihoods) -> float:
    """The largest absolute difference of two with the same pairs."""
    assert one.keys() == other.keys()
    return max(abs(one[pair] - other[pair]) for pair in one)


def mean_difference(one: Likelihoods, other: Likelihoods) -> float:
    """The mean absolute difference of two with the same pairs."""
    assert one.keys() == other.keys()
    return sum(abs(one[pair] - other[pair]) for pair in one) / len(one)
