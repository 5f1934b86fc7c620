"""How stages hold and run the model."""

from dataclasses import dataclass

from sgl_pipeline.args.checks import require, require_choice

ATTENTION_BACKENDS = ("auto", "flashinfer", "cpu", "torch")
PREFILL_KERNELS = ("auto", "fa2", "fa3")  # of FlashInfer
STAGE_GRAPHS = ("auto", "off")
STAGE_LINKS = ("auto", "host", "nccl")
LAYER_KERNELS = ("auto", "flashinfer", "cpu", "torch")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3", "int8")  # auto: that of the model
LOAD_FORMATS = ("auto", "safetensors", "dummy")


def stage_load_format(asked: str) -> str:
    """What `--load-format` means for a stage."""
    return "safetensors" if asked == "auto" else asked


@dataclass(frozen=True, slots=True, kw_only=True)
class StageArgs:
    """How the stages hold and run the model. `dtype` is a torch dtype name without `torch.`;
    `quantization` is that of the weights, in the checkpoint or from `--quantization`;
    `kv_cache_dtype` is one of KV_CACHE_DTYPES."""

    num_stages: int = 1
    layer_partition: str = "auto"
    model_path: str
    load_format: str = "safetensors"
    dtype: str
    device: str = "cpu"
    attention_backend: str = "auto"
    prefill_kernels: str = "auto"
    graphs: str = "auto"
    link: str = "auto"
    layer_kernels: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    max_total_tokens: int | None = None
    memory_fraction: float = 0.88
    cpu_threads: int | None = None

    @property
    def precision(self) -> str:
        """What is computed with, and so what fitted costs hold for."""
        parts = [self.dtype]
        if self.quantization is not None:
            parts.append(self.quantization)
        if self.kv_cache_dtype != "auto":
            parts.append(f"kv_{self.kv_cache_dtype}")
        return "-".join(parts)

    def __post_init__(self) -> None:
        require(self.num_stages >= 1, f"--pp {self.num_stages} must be at least 1")
        require_choice("--stage-attention-backend", self.attention_backend, ATTENTION_BACKENDS)
        self._check_prefill_kernels()
        require_choice("--stage-graphs", self.graphs, STAGE_GRAPHS)
        require_choice("--stage-link", self.link, STAGE_LINKS)
        require(
            self.device == "cuda" or self.link in ("auto", "host"),
            f"--stage-link {self.link} needs --device cuda, this is {self.device}",
        )
        require_choice("--stage-kernels", self.layer_kernels, LAYER_KERNELS)
        require(
            self.kv_cache_dtype in KV_CACHE_DTYPES,
            f"--kv-cache-dtype {self.kv_cache_dtype} is not built; choose from "
            f"{', '.join(KV_CACHE_DTYPES)}",
        )
        require(
            self.max_total_tokens is None or self.max_total_tokens >= 1,
            f"--max-total-tokens {self.max_total_tokens} must be at least 1",
        )
        require(
            self.cpu_threads is None or self.cpu_threads >= 1,
            f"--cpu-threads-per-stage {self.cpu_threads} must be at least 1",
        )
        require(
            0.0 < self.memory_fraction < 1.0,
            f"--mem-fraction-static {self.memory_fraction} must be between 0 and 1",
        )

    def _check_prefill_kernels(self) -> None:
        """What a card has no kernel for is refused where the card is known: on its stage."""
        flag = f"--stage-prefill-kernels {self.prefill_kernels}"
        require_choice("--stage-prefill-kernels", self.prefill_kernels, PREFILL_KERNELS)
        require(
            self.prefill_kernels == "auto" or self.device == "cuda",
            f"{flag} needs --device cuda, this is {self.device}; leave it at auto",
        )
        require(
            self.prefill_kernels == "auto" or self.attention_backend in ("auto", "flashinfer"),
            f"{flag} chooses between FlashInfer's kernels, and --stage-attention-backend is "
            f"{self.attention_backend}; leave one of the two at auto",
        )
