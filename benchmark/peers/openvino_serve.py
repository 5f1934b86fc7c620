"""OpenVINO GenAI's continuous batching behind SGLang's `/generate`, for one process on a CPU.

Started by `engines.py` with the Python of `install_openvino`, so nothing of sgl_pipeline is
imported. GenAI has no HTTP server of its own; this hands `sglang.bench_serving`'s requests to its
`ContinuousBatchingPipeline`, prompts as token ids.
"""

import argparse
import queue
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmark.peers.generate_route import Sink, serve, server_flags


@dataclass(slots=True)
class _Answer:
    """A request on its way: where its tokens come from, those that came, and who wants them."""

    handle: Any
    num_tokens: int
    sink: Sink
    tokens: list[int] = field(default_factory=list)


class OpenVinoBatching:
    """The pipeline, stepped by a thread of its own while there are requests."""

    def __init__(self, options: argparse.Namespace) -> None:
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.cache_size = options.cache_gib
        scheduling.max_num_batched_tokens = options.max_batch_tokens
        scheduling.enable_prefix_caching = not options.disable_prefix_cache
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            options.model_path,
            scheduling,
            "CPU",
            {
                "INFERENCE_NUM_THREADS": options.threads,
                "INFERENCE_PRECISION_HINT": "bf16",
                "KV_CACHE_PRECISION": options.kv_cache_precision,
            },
        )
        self._numbers = 0
        self._waiting: queue.SimpleQueue[tuple[list[int], int, Sink] | None] = queue.SimpleQueue()
        self._answers: list[_Answer] = []
        self._thread = threading.Thread(target=self._run, name="step")
        self._thread.start()

    def add(self, prompt: list[int], num_tokens: int, sink: Sink) -> None:
        self._waiting.put((prompt, num_tokens, sink))

    def stop(self) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        """Steps; between two steps, requests come in and tokens go out."""
        while self._take_waiting():
            try:
                self._pipeline.step()
            except Exception as error:
                self._refuse_all(error)
                return
            for answer in self._answers:
                self._hand_on(answer)
            self._answers = [one for one in self._answers if len(one.tokens) < one.num_tokens]

    def _refuse_all(self, error: Exception) -> None:
        """Has all requests fail, those to come as well, until the end: none may wait forever."""
        for answer in self._answers:
            answer.sink(error)
        while (asked := self._waiting.get()) is not None:
            _, _, sink = asked
            sink(error)

    def _take_waiting(self) -> bool:
        """Hands what waits to the pipeline; waits itself while nothing runs. False at the end."""
        while not self._answers or not self._waiting.empty():
            asked = self._waiting.get()
            if asked is None:
                return False
            prompt, num_tokens, sink = asked
            settings = openvino_genai.GenerationConfig()
            settings.max_new_tokens, settings.ignore_eos = num_tokens, True
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handle = self._pipeline.add_request(self._numbers, ids, settings)
            self._numbers += 1
            self._answers.append(_Answer(handle, num_tokens, sink))
        return True

    def _hand_on(self, answer: _Answer) -> None:
        num_before = len(answer.tokens)
        while answer.handle.can_read():
            (output,) = answer.handle.read().values()
            answer.tokens += output.generated_ids
        if len(answer.tokens) > num_before:
            answer.sink(list(answer.tokens))


def main() -> None:
    parser = server_flags(__doc__)
    parser.add_argument("--cache-gib", type=int, default=1, help="of keys and values")
    parser.add_argument(
        "--max-batch-tokens", type=int, default=256, help="of a step, as GenAI has it"
    )
    parser.add_argument("--kv-cache-precision", default="bf16")
    options = parser.parse_args()
    serve(options, lambda: OpenVinoBatching(options))


if __name__ == "__main__":
    main()
