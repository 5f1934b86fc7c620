"""The other end of `SglangFront`: upstream's three sockets and its messages, in this process."""

from array import array
from types import SimpleNamespace
from typing import Any

import zmq
from sglang.srt.managers import io_struct
from sglang.srt.sampling.sampling_params import SamplingParams
from support.front_model import CONTEXT_LENGTH, TURN_END, VOCAB_SIZE, byte_tokenizer

from sgl_pipeline.managers.command_line.model_files import ModelLimits
from sgl_pipeline.managers.front.reasoning_tokens import ReasoningMarks
from sgl_pipeline.managers.front.room_fields import NO_ROLE, RoomFields
from sgl_pipeline.managers.front.sglang_io import SglangFront

POOL_TOKENS = 128
WAIT_MS = 2000
LIMITS = ModelLimits(CONTEXT_LENGTH, VOCAB_SIZE, frozenset({TURN_END}))


def generate(
    rid: str, prompt: str | list[int], *, stream: bool = True, sampling: Any = None, **fields: Any
) -> io_struct.TokenizedGenerateReqInput:
    """The message that upstream's TokenizerManager sends for one request."""
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    parameters = SamplingParams(**({"max_new_tokens": 8} | (sampling or {})))
    parameters.normalize(tokenizer)
    values = {
        "rid": rid,
        "input_text": None,
        "input_ids": array("q", ids),
        "input_embeds": None,
        "mm_inputs": None,
        "token_type_ids": None,
        "sampling_params": parameters,
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "stream": stream,
    }
    return io_struct.TokenizedGenerateReqInput(**(values | fields))


class UpstreamFront:
    """Binds what upstream binds. `front` is the object under test, connected to it."""

    def __init__(
        self,
        stream_interval: int = 1,
        random_seed: int | None = None,
        reasoning_parser: str | None = None,
        rooms: RoomFields = NO_ROLE,
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._requests = self._bind(zmq.PUSH, "inproc://requests")
        self._outputs = self._bind(zmq.PULL, "inproc://outputs")
        self._replies = self._bind(zmq.PULL, "inproc://replies")
        self.front = SglangFront(
            SimpleNamespace(
                random_seed=random_seed,
                stream_interval=stream_interval,
                enable_priority_scheduling=False,
                schedule_low_priority_values_first=False,
                abort_on_priority_when_disabled=False,
            ),
            SimpleNamespace(
                scheduler_input_ipc_name="inproc://requests",
                detokenizer_ipc_name="inproc://outputs",
                tokenizer_ipc_name="inproc://replies",
            ),
            LIMITS,
            POOL_TOKENS,
            byte_tokenizer(),
            ReasoningMarks.of_parser(reasoning_parser, byte_tokenizer()),
            self._context,
            rooms=rooms,
        )

    def send(self, message: Any) -> None:
        self.send_bytes(io_struct.msgpack_encode(message))

    def send_bytes(self, payload: bytes) -> None:
        self._requests.send(payload)

    def output(self) -> io_struct.BatchTokenIDOutput:
        """The next message to the Detokenizer, read with upstream's own decoder."""
        message = self._receive(self._outputs)
        assert message is not None, "nothing was sent to the Detokenizer"
        return message

    def reply(self) -> Any:
        """The next message to the TokenizerManager, or None."""
        return self._receive(self._replies)

    @property
    def is_silent(self) -> bool:
        """Nothing waits to be read by the Detokenizer."""
        return not self._outputs.poll(0)

    def close(self) -> None:
        self.front.close()
        for socket in (self._requests, self._outputs, self._replies):
            socket.close(linger=0)
        self._context.term()

    def _bind(self, kind: int, address: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.bind(address)
        return socket

    def _receive(self, socket: "zmq.Socket[bytes]") -> Any:
        return io_struct.msgpack_decode(socket.recv()) if socket.poll(WAIT_MS) else None
