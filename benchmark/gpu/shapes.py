"""The models and steps that the GPU benchmark measures, and the work that is in them.

Sizes are those of the Qwen3 models' config.json; weights are random, so no file is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmark.models.make_model import PRESETS
from benchmark.models.preset import Preset, SparsePreset
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec, model_spec

PAGE_SIZE = 16  # tokens, the server's default

MODELS = {
    "Qwen3-0.6B": Preset(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    ),
    "Qwen3-8B": Preset(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    ),
    "Qwen3-14B": Preset(
        vocab_size=151_936,
        hidden_size=5120,
        intermediate_size=17_408,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
    ),
    # For trying the benchmark itself, on a CPU.
    "tiny": PRESETS["tiny"],
}
# Models with experts are checked and not timed: `step_work` is a dense model's.
SPARSE_MODEL, REHEARSED_SPARSE_MODEL = "Qwen3-30B-A3B", "tiny-moe"
SPARSE_MODELS = {
    SPARSE_MODEL: SparsePreset(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    REHEARSED_SPARSE_MODEL: PRESETS["tiny-moe"],
}


def spec_of(model: str) -> DecoderSpec:
    """The spec of one of MODELS or SPARSE_MODELS, in bf16."""
    return model_spec((MODELS | SPARSE_MODELS)[model].config("bfloat16"))


def heads_of(spec: DecoderSpec) -> str:
    """The attention heads in words."""
    return f"{spec.num_query_heads}/{spec.num_kv_heads} heads of {spec.head_dim}"


@dataclass(frozen=True, slots=True)
class Extent:
    """One chunk of a step: `length` rows of a request that has `start` tokens already."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Step:
    """A step by name. Every chunk samples, as the last chunk of a prompt and a decode do."""

    name: str
    kind: str  # decode, prefill or mix
    chunks: tuple[Extent, ...]

    @property
    def num_rows(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    def num_pages(self, page_size: int) -> int:
        return sum(-(-(chunk.start + chunk.length) // page_size) for chunk in self.chunks)


def decode_step(num_requests: int, context: int) -> Step:
    """Decodes whose new token is the last of `context`."""
    name = f"{num_requests} decode{'s' if num_requests > 1 else ''} at {context}"
    return Step(name, "decode", (Extent(context - 1, 1),) * num_requests)


def prefill_step(length: int, start: int = 0) -> Step:
    after = f" after {start}" if start else ""
    return Step(f"prefill {length}{after}", "prefill", (Extent(start, length),))


def mixed_step(num_decodes: int, context: int, prefill: int) -> Step:
    return Step(
        f"{num_decodes} decodes at {context}, prefill {prefill}",
        "mix",
        (*((Extent(context - 1, 1),) * num_decodes), Extent(0, prefill)),
    )


STEPS: tuple[Step, ...] = (
    *(decode_step(count, 1024) for count in (1, 8, 32, 64, 128, 256)),
    *(decode_step(count, 8192) for count in (1, 16, 64)),
    *(prefill_step(length) for length in (256, 512, 1024, 2048)),
    prefill_step(512, 4096),
    mixed_step(32, 1024, 256),
    mixed_step(128, 1024, 512),
    mixed_step(64, 1024, 2048),
)
# One of each kind, for what matters less; and for a rehearsal on a CPU.
FEW_STEPS = (decode_step(64, 1024), prefill_step(512), mixed_step(32, 1024, 256))
SMALL_STEPS = (decode_step(8, 100), prefill_step(64), mixed_step(4, 100, 32))


@dataclass(frozen=True, slots=True)
class StepWork:
    """The least that a step must move and compute: `num_bytes` of weights, keys and values, each
    read once, and `num_flops` of products and attention."""

    num_bytes: int
    num_flops: int


def step_work(
    spec: DecoderSpec, num_layers: int, is_last: bool, chunks: Sequence[Extent], itemsize: int = 2
) -> StepWork:
    """The work of a dense model's stage. Activations, norms and the embedding's rows are left out:
    in a layer of these models they are a few per cent of the bytes."""
    query_width = spec.num_query_heads * spec.head_dim
    kv_width = spec.num_kv_heads * spec.head_dim
    weights = spec.hidden_size * (2 * query_width + 2 * kv_width + 3 * spec.intermediate_size)
    num_rows = sum(chunk.length for chunk in chunks)
    kv_tokens = sum(chunk.start + chunk.length for chunk in chunks)
    visible = _visible_keys(chunks)
    numbers = num_layers * (weights + 2 * kv_width * (kv_tokens + num_rows))
    flops = num_layers * (2 * weights * num_rows + 4 * query_width * visible)
    if is_last:
        head = spec.vocab_size * spec.hidden_size
        numbers += head
        flops += 2 * head * len(chunks)
    return StepWork(numbers * itemsize, flops)


def attention_work(spec: DecoderSpec, chunks: Sequence[Extent], itemsize: int = 2) -> StepWork:
    """The work of one layer's attention: keys, values and queries are read, results written."""
    query_width = spec.num_query_heads * spec.head_dim
    kv_width = spec.num_kv_heads * spec.head_dim
    num_rows = sum(chunk.length for chunk in chunks)
    kv_tokens = sum(chunk.start + chunk.length for chunk in chunks)
    numbers = 2 * kv_width * kv_tokens + 2 * query_width * num_rows
    return StepWork(numbers * itemsize, 4 * query_width * _visible_keys(chunks))


def _visible_keys(chunks: Sequence[Extent]) -> int:
    """Pairs of a row and a key that it sees: row r of a chunk sees start + r + 1 keys."""
    return sum(
        chunk.length * chunk.start + chunk.length * (chunk.length + 1) // 2 for chunk in chunks
    )
