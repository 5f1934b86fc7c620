"""Measures the cost of each quantized format in quality: the demo model's held-out questions, and
logits.

    python -m benchmark.quality.quantization_quality

Run by hand, a few minutes. An answer is right when every token of it, the end included, is the most
likely one after the tokens before: that is what greedy decoding would have answered. Perplexity is
that of the answers' tokens. A second table has the logits of random weights, where no trained
structure hides an error. Formats are those of weights, and of keys and values.
"""

import json
import sys
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmark.demo_model.evaluate import held_out_questions
from benchmark.models.make_model import PRESETS
from benchmark.models.precisions import DEMO_GROUP_SIZE, PRECISIONS, Precision
from benchmark.models.quantize_model import GROUP_SIZE, quantization_config
from benchmark.support.command import Command, Options, Report, at_least_one
from benchmark.support.dated_result import markdown_table
from benchmark.support.paths import DEMO_MODEL
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool, kv_page_bytes
from sgl_pipeline.pp_runner.base.step_inputs import build_step_inputs
from sgl_pipeline.pp_runner.kernel_choice import (
    choose_attention_backend,
    choose_layer_kernels,
    make_layer_kernels,
    make_stage_attention,
)
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec, read_model_spec
from sgl_pipeline.pp_runner.model.native_stage import NativeStageModel
from sgl_pipeline.pp_runner.weights.quantization_config import (
    FP8,
    W4A8_INT8,
    W8A8_INT8,
    choose_quantization,
    read_quantization,
)
from sgl_pipeline.pp_runner.weights.schemes import Quantization
from sgl_pipeline.requests import GREEDY
from sgl_pipeline.wire.step_order import MirroredChunk, MirroredRequest

CPU = torch.device("cpu")
PAGE_SIZE = 16
LOGIT_PRESET, LOGIT_TOKENS = "0.27b", 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question's tokens and those of its answer, the end last."""

    question: list[int]
    answer: list[int]


class WholeModel:
    """A model in one stage, in `dtype`."""

    def __init__(
        self,
        spec: DecoderSpec,
        path: Path,
        dtype: torch.dtype,
        load_format: str,
        kv_cache_dtype: str = "auto",
    ) -> None:
        self._spec = spec
        self._shapes = spec.attention_shapes(PAGE_SIZE, dtype, CPU, kv_cache_dtype)
        choice = choose_attention_backend("auto", self._shapes[0])
        self._attention = make_stage_attention(choice, self._shapes)
        self._model = NativeStageModel.load(
            spec,
            path,
            layers=range(spec.num_layers),
            is_first=True,
            is_last=True,
            dtype=dtype,
            device=CPU,
            kernels=make_layer_kernels(choose_layer_kernels("auto", dtype, CPU)),
            load_format=load_format,
        )
        self.weight_bytes = self._model.weight_bytes
        self.token_bytes = kv_page_bytes(self._shapes, range(spec.num_layers)) // PAGE_SIZE

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[len(tokens), V] fp32, after each of `tokens`."""
        num_pages = -(-len(tokens) // PAGE_SIZE)
        request = MirroredRequest(
            0, GREEDY, len(tokens), array("i", tokens), array("i", range(num_pages))
        )
        inputs = build_step_inputs(
            [MirroredChunk(request, 0, len(tokens), samples=True)], PAGE_SIZE, CPU
        )
        layers = range(self._spec.num_layers)
        pool = KvPool(layers, self._shapes, num_pages)
        self._attention.plan(inputs.layout)
        hidden = self._model.forward(layers, inputs, None, pool, self._attention)
        return self._model.logits(hidden)


def demo_prompts(per_task: int, seed: int) -> list[Prompt]:
    """Held-out questions in the chat's template."""
    from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim

    install_torchvision_shim()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL, local_files_only=True)
    prompts = []
    for question in held_out_questions(per_task, seed):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question.text}], tokenize=False, add_generation_prompt=True
        )
        answer = tokenizer.encode(question.answer, add_special_tokens=False)
        prompts.append(
            Prompt(
                tokenizer.encode(text, add_special_tokens=False),
                [*answer, tokenizer.eos_token_id],
            )
        )
    return prompts


def score(model: WholeModel, prompts: Sequence[Prompt]) -> tuple[float, float]:
    """Per cent of right answers, and the perplexity of the answers' tokens."""
    right, loss, num_tokens = 0, 0.0, 0
    for prompt in prompts:
        logits = model.logits([*prompt.question, *prompt.answer[:-1]])[len(prompt.question) - 1 :]
        answer = torch.tensor(prompt.answer)
        right += torch.equal(logits.argmax(dim=1), answer)
        loss += float(torch.nn.functional.cross_entropy(logits, answer, reduction="sum"))
        num_tokens += len(answer)
    return 100.0 * right / len(prompts), float(torch.tensor(loss / num_tokens).exp())


def demo_table(prompts: Sequence[Prompt]) -> list[dict[str, object]]:
    """A row for each of PRECISIONS."""
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as directory:
        for precision in PRECISIONS.values():
            path = precision.demo_checkpoint(Path(directory))
            spec = read_model_spec(path, precision.quantization)
            model = WholeModel(spec, path, torch.bfloat16, "safetensors", precision.kv_cache_dtype)
            percent, perplexity = score(model, prompts)
            rows.append(
                {
                    "format": precision.name,
                    "right answers": f"{percent:.2f} %",
                    "perplexity": f"{perplexity:.5f}",
                    "weights": f"{model.weight_bytes / 2**20:.2f} MiB",
                    "KV of a token": f"{model.token_bytes} B",
                }
            )
            print(rows[-1], flush=True)
    return rows


def logits_table() -> list[dict[str, object]]:
    """Random weights of LOGIT_PRESET, each of PRECISIONS against fp32."""
    rows: list[dict[str, object]] = []
    tokens = torch.randint(
        0, 32_000, (LOGIT_TOKENS,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    with tempfile.TemporaryDirectory() as directory:
        config = PRESETS[LOGIT_PRESET].config("bfloat16")
        path = Path(directory) / "config.json"
        path.write_text(json.dumps(config))
        plain = read_model_spec(directory)
        exact = WholeModel(plain, path.parent, torch.float32, "dummy").logits(tokens)
        for precision in PRECISIONS.values():
            spec = replace(plain, quantization=_quantization(precision))
            model = WholeModel(spec, path.parent, torch.bfloat16, "dummy", precision.kv_cache_dtype)
            logits = model.logits(tokens)
            error = (logits - exact).norm() / exact.norm()
            same = (logits.argmax(dim=1) == exact.argmax(dim=1)).float().mean()
            rows.append(
                {
                    "format": precision.name,
                    "relative error of logits": f"{error:.4f}",
                    "same first choice": f"{same:.1%}",
                    "weights": f"{model.weight_bytes / 2**20:.0f} MiB",
                    "KV of a token": f"{model.token_bytes} B",
                }
            )
            print(rows[-1], flush=True)
    return rows


def _quantization(precision: Precision) -> Quantization | None:
    stored = None
    if precision.stored is not None:
        stored = read_quantization(quantization_config(precision.stored, GROUP_SIZE), "lm_head")
    return choose_quantization(precision.quantization, stored, "lm_head")


def _markdown(rows: Sequence[dict[str, object]]) -> str:
    return markdown_table(list(rows[0]), [[str(cell) for cell in row.values()] for row in rows])


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__)
    command.add("--questions", type=at_least_one, default=100, help="of each task")
    command.add("--seed", type=int, default=5)
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    prompts = demo_prompts(options.questions, options.seed)
    tables = {
        f"demo model, {len(prompts)} held-out questions": demo_table(prompts),
        f"random weights of {LOGIT_PRESET}, {LOGIT_TOKENS} tokens, against fp32": logits_table(),
    }
    formats = {
        W8A8_INT8: "layers and head rounded when loaded",
        FP8: "layers rounded when loaded",
        W4A8_INT8: "pack-quantized, the head rounded when loaded, rows when they come",
        "others": "layers rounded to the nearest number by benchmark.models.quantize_model, "
        f"the head in bfloat16; 4 bits in groups of {DEMO_GROUP_SIZE} and 128",
    }
    return Report(
        name="quantization_quality",
        texts=[f"**{title}**\n\n{_markdown(rows)}" for title, rows in tables.items()],
        facts={"formats": formats},
        record=tables,
    )


if __name__ == "__main__":
    sys.exit(main())
