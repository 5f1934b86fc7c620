"""SGLang's `/generate` in front of an engine that has no server of its own.

Used by `transformers_serve.py` and `openvino_serve.py`, in environments that share no package but
those imported here. Answers its client, `sglang.bench_serving`, and nobody else: no request is
checked, and every answer has as many tokens as were asked for.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from tokenizers import Tokenizer

# Takes all tokens of an answer so far, or what made the request fail; from any thread.
Sink = Callable[[list[int] | Exception], None]


class Batching(Protocol):
    """An engine that batches requests as it goes."""

    def add(self, prompt: list[int], num_tokens: int, sink: Sink) -> None:
        """Starts a request; `sink` is called whenever tokens have come."""

    def stop(self) -> None:
        """Ends the engine."""


def make_app(model_path: str, start: Callable[[], Batching]) -> FastAPI:
    """The server of the checkpoint `model_path`, whose engine `start` gives."""
    tokenizer = Tokenizer.from_file(str(Path(model_path) / "tokenizer.json"))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.batching = start()
        yield
        app.state.batching.stop()

    app = FastAPI(lifespan=lifespan)

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"data": [{"id": model_path}]}

    @app.post("/generate")
    async def generate(request: Request) -> StreamingResponse:
        asked = await request.json()
        prompt = tokenizer.encode(asked["text"], add_special_tokens=False).ids
        wanted = asked["sampling_params"]["max_new_tokens"]
        outputs: asyncio.Queue[list[int] | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def sink(output: list[int] | Exception) -> None:
            loop.call_soon_threadsafe(outputs.put_nowait, output)

        app.state.batching.add(prompt, wanted, sink)

        async def events() -> AsyncIterator[bytes]:
            num_sent = 0
            while num_sent < wanted:
                output = await outputs.get()
                if isinstance(output, Exception):
                    raise output
                num_sent = len(output)
                answer = {
                    "text": tokenizer.decode(output, skip_special_tokens=False),
                    "meta_info": {"prompt_tokens": len(prompt), "completion_tokens": num_sent},
                }
                yield b"data: " + json.dumps(answer).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


def server_flags(description: str | None) -> argparse.ArgumentParser:
    """The flags that every server of this kind has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True, help="that compute")
    parser.add_argument("--disable-prefix-cache", action="store_true")
    return parser


def serve(options: argparse.Namespace, start: Callable[[], Batching]) -> None:
    """Serves until it is told to end."""
    app = make_app(options.model_path, start)
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning")
