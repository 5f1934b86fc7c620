"""Requests to llama.cpp's server, as a stand-in of it on a loopback port sees and answers them."""

import asyncio
import json
import types
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from benchmark.models.make_model import write_tokenizer
from benchmark.support.llama_client import LLAMA_SERVER, add_llama_server
from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim

PROMPT, PROMPT_IDS = "<700><999>a<259>", [700, 999, None, 259]


@asynccontextmanager
async def llama_server(events: Sequence[dict], seen: list[dict]) -> AsyncIterator[str]:
    """Answers any request with `events`, and keeps its body in `seen`."""

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        response = web.StreamResponse()
        await response.prepare(request)
        for event in events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(0)
        return response

    app = web.Application()
    app.router.add_post("/completion", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def partial(text: str) -> dict:
    return {"content": text, "stop": False, "tokens_predicted": 1, "tokens_evaluated": 4}


def final(num_in: int, num_out: int) -> dict:
    return {"content": "", "stop": True, "tokens_predicted": num_out, "tokens_evaluated": num_in}


def asked_of(events: Sequence[dict], directory: Path) -> tuple[Any, list[dict]]:
    """What the client makes of the answer, and the bodies that the server saw."""
    pytest.importorskip("sglang")
    install_torchvision_shim()
    from sglang.benchmark import serving

    write_tokenizer(1000, directory)
    module = types.SimpleNamespace(
        args=types.SimpleNamespace(tokenizer=str(directory)),
        RequestFuncOutput=serving.RequestFuncOutput,
        ASYNC_REQUEST_FUNCS=dict(serving.ASYNC_REQUEST_FUNCS),
        _BACKEND_API_PATHS=dict(serving._BACKEND_API_PATHS),
    )
    add_llama_server(module)
    seen: list[dict] = []

    async def run() -> Any:
        async with llama_server(events, seen) as url:
            request = serving.RequestFuncInput(
                prompt=PROMPT,
                api_url=url + module._BACKEND_API_PATHS[LLAMA_SERVER],
                prompt_len=4,
                output_len=3,
                model="model",
                lora_name="",
                image_data=None,
                extra_request_body={},
            )
            return await module.ASYNC_REQUEST_FUNCS[LLAMA_SERVER](request_func_input=request)

    return asyncio.run(run()), seen


def test_ids_go_in_and_the_servers_counts_come_out(tmp_path: Path) -> None:
    output, (body,) = asked_of(
        [partial("<1>"), partial("<2>"), partial("<3>"), final(4, 3)], tmp_path
    )
    assert output.success and output.error == ""
    assert (output.prompt_len, output.output_len) == (4, 3)
    assert output.generated_text == "<1><2><3>"
    assert 0 < output.ttft <= output.ttft + sum(output.itl) <= output.latency
    assert len(output.itl) == 2
    assert [*body["prompt"][:2], None, body["prompt"][3]] == PROMPT_IDS
    assert (body["n_predict"], body["ignore_eos"], body["stream"]) == (3, True, True)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([partial("<1>"), final(4, 2)], "4 tokens in and 2 out, where 4 and 3"),
        ([partial("<1>"), final(5, 3)], "5 tokens in and 3 out, where 4 and 3"),
        ([partial("<1>")], "ended early"),
    ],
)
def test_other_work_than_was_asked_for_is_a_failure(
    events: list[dict], message: str, tmp_path: Path
) -> None:
    output, _ = asked_of(events, tmp_path)
    assert not output.success and message in output.error
