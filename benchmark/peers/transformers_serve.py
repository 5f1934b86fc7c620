"""Transformers' own continuous batching behind SGLang's `/generate`, for one process on a CPU.

Started by `engines.py`. `transformers serve` knows neither prompts without a chat template nor
answers that go on after the end-of-sequence token, so the same work could not be asked of it; this
hands `sglang.bench_serving`'s requests to the `ContinuousBatchingManager` that it would use.
Answers its client, and nobody else: no request is checked.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import orjson
import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
)
from transformers.generation.continuous_batching import ContinuousBatchingManager

from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim

NO_TOKEN = -1


def start_manager(options: argparse.Namespace) -> ContinuousBatchingManager:
    """The model in bf16 and its batching, running in a thread of its own."""
    model = AutoModelForCausalLM.from_pretrained(
        options.model_path, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    manager = model.init_continuous_batching(
        GenerationConfig(do_sample=False, eos_token_id=NO_TOKEN, max_new_tokens=1),
        ContinuousBatchingConfig(
            num_blocks=options.pool_tokens // options.page_size,
            page_size=options.page_size,
            max_batch_tokens=options.max_batch_tokens,
            allow_block_sharing=not options.disable_prefix_cache,
        ),
    )
    manager.start()
    return manager


def make_app(options: argparse.Namespace) -> FastAPI:
    tokenizer = AutoTokenizer.from_pretrained(options.model_path)
    names = (f"r{number}" for number in count())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.manager = start_manager(options)
        yield
        app.state.manager.stop(block=True, timeout=5)

    app = FastAPI(lifespan=lifespan)

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"data": [{"id": options.model_path}]}

    @app.post("/generate")
    async def generate(request: Request) -> StreamingResponse:
        asked = await request.json()
        prompt = tokenizer(asked["text"], add_special_tokens=False)["input_ids"]
        wanted, name = asked["sampling_params"]["max_new_tokens"], next(names)
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        app.state.manager.register_result_handler(name, outputs.put_nowait)
        app.state.manager.add_request(prompt, name, wanted, streaming=True, eos_token_id=NO_TOKEN)

        async def events() -> AsyncIterator[bytes]:
            num_sent = 0
            while num_sent < wanted:
                output = await outputs.get()
                if output.error is not None:
                    raise RuntimeError(f"{name}: {output.error}")
                num_sent = len(output.generated_tokens)
                answer = {
                    "text": tokenizer.decode(output.generated_tokens),
                    "meta_info": {"prompt_tokens": len(prompt), "completion_tokens": num_sent},
                }
                yield b"data: " + orjson.dumps(answer) + b"\n\n"
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True, help="of torch")
    parser.add_argument("--pool-tokens", type=int, default=32768)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--max-batch-tokens", type=int, default=2048)
    parser.add_argument("--disable-prefix-cache", action="store_true")
    options = parser.parse_args()
    install_torchvision_shim()
    torch.set_num_threads(options.threads)
    uvicorn.run(make_app(options), host=options.host, port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
