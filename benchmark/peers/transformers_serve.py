"""Transformers' own continuous batching behind SGLang's `/generate`, for one process on a CPU.

Started by `engines.py`. `transformers serve` knows neither prompts without a chat template nor
answers that go on after the end-of-sequence token, so the same work could not be asked of it; this
hands `sglang.bench_serving`'s requests to the `ContinuousBatchingManager` that it would use.
"""

import argparse
from itertools import count
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmark.peers.generate_route import Sink, serve, server_flags
from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim

NO_TOKEN = -1


class TransformersBatching:
    """The model in bf16 and its batching, running in a thread of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        model = AutoModelForCausalLM.from_pretrained(
            options.model_path, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        self._names = (f"r{number}" for number in count())
        self._manager = model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=NO_TOKEN, max_new_tokens=1),
            ContinuousBatchingConfig(
                num_blocks=options.pool_tokens // options.page_size,
                page_size=options.page_size,
                max_batch_tokens=options.max_batch_tokens,
                allow_block_sharing=not options.disable_prefix_cache,
            ),
        )
        self._manager.start()

    def add(self, prompt: list[int], num_tokens: int, sink: Sink) -> None:
        name = next(self._names)

        def take(output: Any) -> None:
            if output.error is not None:
                sink(RuntimeError(f"{name}: {output.error}"))
            else:
                sink(list(output.generated_tokens))

        self._manager.register_result_handler(name, take)
        self._manager.add_request(prompt, name, num_tokens, streaming=True, eos_token_id=NO_TOKEN)

    def stop(self) -> None:
        self._manager.stop(block=True, timeout=5)


def main() -> None:
    parser = server_flags(__doc__)
    parser.add_argument("--pool-tokens", type=int, default=32768)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--max-batch-tokens", type=int, default=2048)
    options = parser.parse_args()
    install_torchvision_shim()
    torch.set_num_threads(options.threads)
    serve(options, lambda: TransformersBatching(options))


if __name__ == "__main__":
    main()
