"""An assignment carries the arguments of a stage: equal on arrival, or refused."""

import dataclasses
from typing import Any

import msgspec
import pytest

from sgl_pipeline.args import StageArgs
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.stage_messages import StageAssignment, ToWorker

ARGS = StageArgs(
    num_stages=2,
    layer_partition="3,2",
    model_path="model",
    load_format="dummy",
    dtype="bfloat16",
    device="cuda",
    attention_backend="flashinfer",
    prefill_kernels="fa2",
    graphs="off",
    link="host",
    layer_kernels="torch",
    quantization="awq",
    kv_cache_dtype="fp8_e4m3",
    context_length=4096,
    rope_overrides='{"rope_theta": 5000}',
    max_total_tokens=999,
    memory_fraction=0.5,
    cpu_threads=2,
)
ASSIGNMENT = StageAssignment(
    stage=1,
    plan=StagePlan(3, (3, 2)),
    args=ARGS,
    page_size=8,
    links=("nccl:rendezvous",),
    cpu_threads=2,
    cpu_cores=(4, 5),
)
FIELDS = [field.name for field in dataclasses.fields(StageArgs)]


def arrived(**args: Any) -> object:
    """The assignment as a worker decodes it, with other values for some of its arguments."""
    message = msgspec.msgpack.decode(msgspec.msgpack.encode(ASSIGNMENT))
    message["args"] |= args
    return msgspec.msgpack.Decoder(ToWorker).decode(msgspec.msgpack.encode(message))


def test_an_assignment_arrives_equal() -> None:
    assert arrived() == ASSIGNMENT


@pytest.mark.parametrize("name", FIELDS)
def test_an_argument_of_the_wrong_type_is_refused(name: str) -> None:
    wrong = "many" if isinstance(getattr(ARGS, name), (int, float)) else 1
    for value in (wrong, [], {"a": 1}, b"bytes"):
        with pytest.raises(msgspec.ValidationError, match=rf"\$\.args\.{name}"):
            arrived(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("attention_backend", "fast", "--stage-attention-backend 'fast' is unknown"),
        ("prefill_kernels", "fa9", "--stage-prefill-kernels 'fa9' is unknown"),
        ("graphs", "on", "--stage-graphs 'on' is unknown"),
        ("link", "rdma", "--stage-link 'rdma' is unknown"),
        ("layer_kernels", "fast", "--stage-kernels 'fast' is unknown"),
        ("kv_cache_dtype", "int2", "--kv-cache-dtype int2 is not built"),
        ("memory_fraction", 1.5, "--mem-fraction-static 1.5"),
        ("context_length", 1, "--context-length 1 must be at least 2"),
        ("max_total_tokens", 0, "--max-total-tokens 0"),
        ("num_stages", -1, "--pp -1"),
    ],
)
def test_an_argument_that_the_server_would_refuse_is_refused(
    name: str, value: object, flag: str
) -> None:
    with pytest.raises(ConfigurationError, match=flag):
        arrived(**{name: value})


@pytest.mark.parametrize("name", ["model_path", "dtype"])
def test_an_argument_without_a_default_must_be_there(name: str) -> None:
    message = msgspec.msgpack.decode(msgspec.msgpack.encode(ASSIGNMENT))
    del message["args"][name]
    with pytest.raises(msgspec.ValidationError, match=name):
        msgspec.convert(message, ToWorker)
