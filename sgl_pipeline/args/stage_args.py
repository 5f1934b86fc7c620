"""Settings of the stages: the model, and the means to run it."""

import json
from dataclasses import dataclass, field

from sgl_pipeline.args.checks import at_least, one_of, require
from sgl_pipeline.args.flags import Flag, check_flags, our_flag, upstream_flag, without_flag

KV_CACHE_DTYPES = ("auto", "fp8_e4m3", "int8")  # auto: that of the model
# Whose code computes the layers: ours ("sglang", its name for code of the server's own), that of
# transformers, or ours where it can.
MODEL_IMPLS = ("auto", "sglang", "transformers")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageArgs:
    """The model that the stages hold, and the settings under which they run it.

    `model_path` is a directory, `dtype` a torch dtype name without `torch.`; `quantization` is the
    method of the weights, from the checkpoint or from `--quantization`. `context_length` in tokens;
    None: the model's own. `rope_overrides` is a JSON object of the config's rope fields.
    `generic_spec` is the JSON of the `GenericSpec` of a model whose layers transformers computes,
    as the launcher's probes saw it; it travels to the stages of all hosts, none of which probes
    again. Empty: the layers are ours.
    """

    num_stages: int = our_flag(
        1,
        "--pp",
        upstream=("--pp-size", "--pipeline-parallel-size"),
        help="Pipeline stages, as --pp-size.",
        check=at_least(1),
    )
    layer_partition: str = our_flag(
        "auto",
        "--pp-layer-partition",
        help="Layers of each stage: auto (by times measured at the start), even, or counts such "
        "as 5,4,4,3.",
        same_as="SGLANG_PP_LAYER_PARTITION",
    )
    model_path: str = field(metadata=Flag(upstream=("--model-path", "--model")).metadata)
    model_impl: str = upstream_flag("auto", "--model-impl", check=one_of(MODEL_IMPLS))
    generic_spec: str = without_flag("", "the probes of the launcher find it")
    load_format: str = upstream_flag("safetensors", "--load-format")
    dtype: str = field(metadata=Flag(upstream=("--dtype",)).metadata)
    device: str = upstream_flag("cpu", "--device")
    attention_backend: str = our_flag(
        "auto",
        "--stage-attention-backend",
        help="Attention kernels of the stages.",
        choices=("auto", "flashinfer", "cpu", "torch"),
    )
    prefill_kernels: str = our_flag(
        "auto",
        "--stage-prefill-kernels",
        help="FlashInfer's attention kernels for prefill chunks: fa2 (any GPU), fa3 (Hopper, "
        "compute capability 9); auto is fa2, on Hopper for each step the faster of both.",
        choices=("auto", "fa2", "fa3"),
    )
    graphs: str = our_flag(
        "auto",
        "--stage-graphs",
        help="CUDA graphs of the stages on a GPU: auto or off; a CPU has none.",
        choices=("auto", "off"),
    )
    link: str = our_flag(
        "auto",
        "--stage-link",
        help="How rows go from stage to stage: host (shared memory), nccl (a GPU each); auto is "
        "nccl where each host has as many GPUs as stages, else host.",
        choices=("auto", "host", "nccl"),
    )
    layer_kernels: str = our_flag(
        "auto",
        "--stage-kernels",
        help="Kernels of the stages for all but the attention: products, norms, rotary embedding, "
        "KV writes, the MLP's gate.",
        choices=("auto", "flashinfer", "cpu", "torch"),
    )
    quantization: str | None = upstream_flag(None, "--quantization")
    kv_cache_dtype: str = upstream_flag("auto", "--kv-cache-dtype")
    context_length: int | None = upstream_flag(None, "--context-length", check=at_least(2))
    rope_overrides: str = upstream_flag("{}", "--json-model-override-args")
    max_total_tokens: int | None = upstream_flag(None, "--max-total-tokens", check=at_least(1))
    num_state_slots: int = without_flag(
        0, "each stage gets that of the scheduler; 0: the model has no states"
    )
    memory_fraction: float = upstream_flag(0.88, "--mem-fraction-static")
    cpu_threads: int | None = our_flag(
        None,
        "--cpu-threads-per-stage",
        help="Compute threads of a stage; by default the cores are split over the stages.",
        check=at_least(1),
    )

    @property
    def is_generic(self) -> bool:
        """True if transformers computes the layers."""
        return bool(self.generic_spec)

    @property
    def transformers_version(self) -> str | None:
        """The version of transformers whose code computes the layers; None where they are ours."""
        return json.loads(self.generic_spec)["transformers_version"] if self.is_generic else None

    @property
    def kv_dtype(self) -> str:
        """The dtype of keys and values."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def precision(self) -> str:
        """The formats of the computation, and whose code it is where it is not ours; fitted costs
        hold for one of these."""
        parts = [self.dtype]
        if self.is_generic:
            parts.append("transformers")
        if self.quantization is not None:
            parts.append(self.quantization)
        if self.kv_cache_dtype != "auto":
            parts.append(f"kv_{self.kv_cache_dtype}")
        return "-".join(parts)

    def __post_init__(self) -> None:
        check_flags(self)
        self._check_prefill_kernels()
        require(
            self.device == "cpu" or not self.is_generic,
            f"--device {self.device}: the layers of this model are computed by transformers, which "
            "is built for CPUs only; use --device cpu",
        )
        require(
            self.device == "cuda" or self.link in ("auto", "host"),
            f"--stage-link {self.link} needs --device cuda, this is {self.device}",
        )
        require(
            self.kv_cache_dtype in KV_CACHE_DTYPES,
            f"--kv-cache-dtype {self.kv_cache_dtype} is not built; choose from "
            f"{', '.join(KV_CACHE_DTYPES)}",
        )
        require(
            0.0 < self.memory_fraction < 1.0,
            f"--mem-fraction-static {self.memory_fraction} must be between 0 and 1",
        )

    def _check_prefill_kernels(self) -> None:
        """Kernels that a card lacks are refused by its stage, which knows the card."""
        flag = f"--stage-prefill-kernels {self.prefill_kernels}"
        require(
            self.prefill_kernels == "auto" or self.device == "cuda",
            f"{flag} needs --device cuda, this is {self.device}; leave it at auto",
        )
        require(
            self.prefill_kernels == "auto" or self.attention_backend in ("auto", "flashinfer"),
            f"{flag} chooses between FlashInfer's kernels, and --stage-attention-backend is "
            f"{self.attention_backend}; leave one of the two at auto",
        )
