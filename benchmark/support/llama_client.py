"""llama.cpp's server as a backend of `sglang.bench_serving`.

Its OpenAI route refuses what the client's `vllm` backend sends (`best_of`), so its own route is
asked: with token ids, as the texts of `make_model`'s tokenizer are no products of merges, and a
GGUF file cannot say how they are encoded. They are encoded before the time begins. The server
counts what a request took in and gave out.
"""

import functools
import json
import time
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer

LLAMA_SERVER = "llama-server"
_EVENT = b"data: "


def add_llama_server(serving: Any) -> None:
    """Adds `LLAMA_SERVER` to the backends of `serving`, the module `sglang.benchmark.serving`."""

    @functools.cache
    def tokenizer(directory: str) -> Tokenizer:
        return Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))

    # The client gives its arguments by these names.
    async def request(request_func_input: Any, pbar: Any = None) -> Any:
        asked = request_func_input
        output = serving.RequestFuncOutput.init_new(asked)
        encoding = tokenizer(serving.args.tokenizer).encode(asked.prompt)
        try:
            await _stream(asked.api_url, encoding.ids, asked.output_len, output)
            output.success = True
        except (aiohttp.ClientError, ValueError) as error:
            output.error = f"{type(error).__name__}: {error}"
        if pbar is not None:
            pbar.update(1)
        return output

    serving.ASYNC_REQUEST_FUNCS[LLAMA_SERVER] = request
    serving._BACKEND_API_PATHS[LLAMA_SERVER] = "/completion"


async def _stream(url: str, prompt: list[int], num_tokens: int, output: Any) -> None:
    """Sends one request and notes in `output` what comes back, and when.

    Raises ValueError for an answer to another prompt or of another length, and one cut short.
    """
    body = {"prompt": prompt, "n_predict": num_tokens, "ignore_eos": True, "temperature": 0.0}
    output.start_time = latest = time.perf_counter()
    event: dict[str, Any] = {"stop": False}
    # A connection for each request, as the client's other backends have it, and no time limit.
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as session,
        session.post(url, json={**body, "stream": True}) as response,
    ):
        async for line in response.content:
            if not line.startswith(_EVENT):
                continue
            now = time.perf_counter()
            event = json.loads(line.removeprefix(_EVENT))
            output.generated_text += event["content"]
            if event["stop"]:
                output.latency = now - output.start_time
                break
            if output.ttft == 0.0:
                output.ttft = now - output.start_time
            else:
                output.itl.append(now - latest)
            latest = now
    if not event["stop"]:
        raise ValueError("the stream ended early")
    output.prompt_len, output.output_len = event["tokens_evaluated"], event["tokens_predicted"]
    if (output.prompt_len, output.output_len) != (len(prompt), num_tokens):
        raise ValueError(
            f"{output.prompt_len} tokens in and {output.output_len} out, "
            f"where {len(prompt)} and {num_tokens} were asked for"
        )
