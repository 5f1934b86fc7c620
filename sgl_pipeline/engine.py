"""`sgl_pipeline.Engine`: a pipeline for a program of its own, without a server.

Names of methods, arguments and results are those of SGLang's Engine. The engine's processes are
apart from the program, which imports neither torch nor sglang for it.
"""

import contextlib
import weakref
from collections.abc import AsyncGenerator, Generator
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, overload

from sgl_pipeline.errors import RequestError
from sgl_pipeline.managers.engine.channel import Ask, Generate
from sgl_pipeline.managers.engine.client import EngineClient
from sgl_pipeline.managers.upstream.refused_features import REFUSED_METHODS, refusal_of

Prompts = str | list[str]
SamplingParams = dict[str, Any]
TokenIds = list[int] | list[list[int]]


class FlushResult(NamedTuple):
    """The outcome of emptying the prefix cache; if it was not emptied, the reason."""

    success: bool
    message: str


class Engine:
    """Stages that serve this program, until `shutdown`, the end of a `with`, or its own end.

    Args:
        arguments: the flags of `sgl-pipeline serve` without their dashes (`pp=2`,
            `model_path="..."`, `chunked_prefill_size=512`), SGLang's and ours. Flags that mean
            something to a server alone are refused. The default of `log_level` is `error`.

    Raises ConfigurationError for arguments, a model or a machine that do not go together.

    Methods may be called from any thread, the `async_` ones in any event loop. Each raises
    RequestError for a request that is refused, with the reason and the status that a server gives,
    and EngineEnded when the engine was shut down or its processes have ended.
    """

    def __init__(self, **arguments: Any) -> None:
        self._client = EngineClient(arguments)
        # When the program ends, or nothing refers to this object.
        self._finalizer = weakref.finalize(self, self._client.close)

    @overload
    def generate(
        self,
        prompt: Prompts | None = None,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        input_ids: TokenIds | None = None,
        *,
        stream: Literal[False] = False,
        **fields: Any,
    ) -> Any: ...

    @overload
    def generate(
        self,
        prompt: Prompts | None = None,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        input_ids: TokenIds | None = None,
        *,
        stream: Literal[True],
        **fields: Any,
    ) -> Generator[dict[str, Any], None, None]: ...

    def generate(
        self,
        prompt: Prompts | None = None,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        input_ids: TokenIds | None = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """Completes a prompt, or each of several.

        Args:
            prompt, input_ids: the text, or its token ids; a list of either for several.
            sampling_params: SGLang's, such as `{"temperature": 0, "max_new_tokens": 16}`; a list
                has one for each prompt.
            stream: whether to return an iterator over replies while they grow; a reply then has
                all text so far, and with several prompts the `index` of its own.
            fields: more of `/generate`'s, such as `return_logprob=True`.

        Returns what `/generate` answers: a dict with `text`, `output_ids` and `meta_info`, or a
        list of them. A request that is interrupted, or whose iterator is closed, is aborted.
        """
        request = _request(prompt, sampling_params, input_ids, stream, fields)
        if stream:
            return self._stream(request)
        return self._client.call(lambda call: Generate(call, request))

    async def async_generate(
        self,
        prompt: Prompts | None = None,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        input_ids: TokenIds | None = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """As `generate`. With `stream`, what is awaited is an asynchronous iterator; a task that is
        cancelled aborts its request."""
        request = _request(prompt, sampling_params, input_ids, stream, fields)
        if stream:
            return self._stream_async(request)
        return await self._client.call_async(lambda call: Generate(call, request))

    def _stream(self, request: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Keeps the engine while it is read."""
        yield from self._client.stream(lambda call: Generate(call, request))

    async def _stream_async(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        replies = self._client.stream_async(lambda call: Generate(call, request))
        async with contextlib.aclosing(replies):
            async for reply in replies:
                yield reply

    def flush_cache(self) -> FlushResult:
        """Empties the prefix cache, unless a request runs or waits."""
        return FlushResult(*self._ask("flush_cache"))

    def get_server_info(self) -> dict[str, Any]:
        """The answer of `/server_info`: arguments, and under `internal_states` the pipeline's."""
        return dict(self._ask("get_server_info"))

    def get_model_info(self) -> dict[str, Any]:
        """The model that is served: its path, name, format and parsers."""
        return dict(self._ask("get_model_info"))

    def start_profile(self, **fields: Any) -> None:
        """Profiles the stages, as `/start_profile` does with these fields."""
        self._ask("start_profile", **fields)

    def stop_profile(self) -> None:
        """Ends a profile."""
        self._ask("stop_profile")

    def shutdown(self) -> None:
        """Ends all processes of the engine, and returns when they have ended; running requests end
        with EngineEnded. May be called again."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def __getattr__(self, name: str) -> Any:
        """Methods of SGLang's Engine that are refused say why when they are called."""
        if name not in REFUSED_METHODS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def refuse(*arguments: Any, **fields: Any) -> None:
            raise RequestError(refusal_of(REFUSED_METHODS[name]))

        return refuse

    def _ask(self, question: str, **fields: Any) -> Any:
        return self._client.call(lambda call: Ask(call, question, fields))


def _request(
    prompt: Prompts | None,
    sampling_params: SamplingParams | list[SamplingParams] | None,
    input_ids: TokenIds | None,
    stream: bool,
    fields: dict[str, Any],
) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    named = {
        "text": prompt,
        "sampling_params": sampling_params,
        "input_ids": input_ids,
        "stream": stream,
    }
    return fields | {name: value for name, value in named.items() if value is not None}
