"""Finds the model directory to serve, and reads from it the facts that the front needs.

Used by `server_args.py` before anything starts (which directory, which dtype) and by the scheduler
process (context length, vocabulary, EOS ids, tokenizer). Never reads weights, nor runs code from
the model's repository.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.gguf_index import INDEX_FILE
from sgl_pipeline.managers.upstream.upstream_arguments import SglangServerArgs
from sgl_pipeline.model_directory import find_gguf_file, weight_format

if TYPE_CHECKING:
    # It imports torch, which a host's agent has no time for.
    from sgl_pipeline.pp_runner.model.model_spec import ModelSpec

DEMO_MODEL = Path(__file__).resolve().parents[2] / "demo_model"
DTYPES = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}
_NEEDED_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken")


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits that requests are checked against. `context_length` counts prompt and output
    tokens."""

    context_length: int
    vocab_size: int
    eos_token_ids: frozenset[int]


def find_model(
    model: str | None,
    revision: str | None,
    cache_dir: str | None,
    load_format: str = "auto",
    *,
    may_fetch: bool = True,
) -> str:
    """The local directory of `model`: the demo model (None), a path, or a hub id, fetched here, or,
    unless it `may_fetch`, looked up among what was fetched before. That of a GGUF file is made
    (`managers/gguf/`), where `load_format` is `gguf`, or `auto` and there is one.

    Raises ConfigurationError when it is neither a model directory nor a hub id that can be fetched.
    """
    if model is None and load_format != "gguf":
        if not (DEMO_MODEL / "config.json").is_file():
            raise ConfigurationError(
                f"the demo model is missing from {DEMO_MODEL}; name a model with --model-path"
            )
        return str(DEMO_MODEL)
    require_model(model, load_format)
    path = Path(model).expanduser() if model is not None else DEMO_MODEL
    if path.exists() and (path.is_file() or weight_format(load_format, path) == "gguf"):
        return _directory_of_gguf(path, load_format)
    assert model is not None
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigurationError(
                f"--model-path {model} has no config.json: not a model in Hugging Face format"
            )
        return str(path.resolve())
    return _fetch(model, revision, cache_dir, may_fetch)


def require_model(model: str | None, load_format: str = "auto") -> None:
    """Raises ConfigurationError where `model` is neither a file or directory nor, in a format
    that the hub has, the id of a model there. Imports little; the hub is not asked."""
    if model is None:
        return
    path = Path(model).expanduser()
    if path.is_file() or path.is_dir():
        return
    if load_format == "gguf":
        raise ConfigurationError(
            f"--load-format gguf: --model-path {model} does not exist; name a GGUF file"
        )
    if not _is_hub_id(model):
        raise ConfigurationError(
            f"--model-path {model} does not exist; give a directory, a GGUF file, or a "
            "hub id like Qwen/Qwen3-0.6B"
        )


def _directory_of_gguf(path: Path, load_format: str) -> str:
    if load_format == "safetensors":
        raise ConfigurationError(
            f"--load-format safetensors: --model-path {path} is a file; name a model directory, or "
            "leave the flag out for a GGUF file"
        )
    if (path / INDEX_FILE).is_file():
        return str(path.resolve())
    # It imports gguf and transformers, which other formats have no need of.
    from sgl_pipeline.managers.gguf.gguf_directory import gguf_directory

    return str(gguf_directory(find_gguf_file(path)))


def require_tokenizer(model_path: str) -> None:
    """Has a model directory that was made of a GGUF file hold its tokenizer, too.

    Raises UnsupportedModelError where the file has none that is known.
    """
    if (Path(model_path) / INDEX_FILE).is_file():
        from sgl_pipeline.managers.gguf.gguf_directory import add_tokenizer

        add_tokenizer(Path(model_path))


def _is_hub_id(model: str) -> bool:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return not model.startswith(".")


def _fetch(model: str, revision: str | None, cache_dir: str | None, may_fetch: bool) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return snapshot_download(
            model,
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=list(_NEEDED_FILES),
            local_files_only=not may_fetch,
        )
    # OSError covers a missing network, a full disk and all of the hub client's connection errors.
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        if not may_fetch:
            raise ConfigurationError(
                f"--model-path {model} is not a local directory, and has not been fetched from the "
                "hub yet"
            ) from error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ConfigurationError(
            f"--model-path {model} is not a local directory and could not be fetched from the hub: "
            f"{reason}"
        ) from error


def resolve_dtype(asked: str, checkpoint_dtype: str) -> str:
    """The torch dtype name for `--dtype` (auto: the checkpoint's)."""
    name = checkpoint_dtype if asked == "auto" else asked
    try:
        return DTYPES[name]
    except KeyError:
        raise ConfigurationError(
            f"--dtype {asked}: {name} is not supported; choose from {', '.join(sorted(DTYPES))}"
        ) from None


def model_limits(spec: "ModelSpec", context_length: int | None, tokenizer: Any) -> ModelLimits:
    """The limits of requests to the model of `spec`.

    Args:
        context_length: `--context-length`, or None for the model's own.
        tokenizer: its EOS id, and what upstream's loader calls its additional stop tokens, are
            added to the EOS ids of config.json and generation_config.json, because chat models
            often end a turn with a token that only one of these names.
    """
    own_eos = getattr(tokenizer, "eos_token_id", None)
    named = set(getattr(tokenizer, "additional_stop_token_ids", None) or ())
    named |= set() if own_eos is None else {own_eos}
    eos = spec.eos_token_ids | named
    return ModelLimits(context_length or spec.context_length, spec.vocab_size, eos)


def load_tokenizer(server_args: SglangServerArgs) -> Any:
    """The tokenizer, loaded as upstream's front loads it, so that both see the same text."""
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    return get_tokenizer(
        server_args.tokenizer_path or server_args.model_path,
        tokenizer_mode=server_args.tokenizer_mode,
        trust_remote_code=False,
        revision=server_args.revision,
        tokenizer_backend=server_args.tokenizer_backend,
    )
