"""Chooses the code that computes a model's layers: ours, or that of transformers (`--model-impl`).

Probes in a process of their own find whether transformers' code can be served: neither the main
process nor the scheduler imports the code of models. They run once for a start; what they saw
travels to the stages as JSON in `StageArgs.generic_spec`.
"""

import logging
import subprocess
import sys
from dataclasses import replace
from typing import NamedTuple

from sgl_pipeline.args.checks import require
from sgl_pipeline.errors import ConfigurationError, UnsupportedModelError
from sgl_pipeline.pp_runner.model.generic.spec import GenericSpec
from sgl_pipeline.pp_runner.model.generic.tested_families import TESTED_MODEL_TYPES
from sgl_pipeline.pp_runner.model.model_spec import ModelSpec, read_model_spec
from sgl_pipeline.pp_runner.model.rope_overrides import read_rope_overrides
from sgl_pipeline.process_lifetime import child_environment

logger = logging.getLogger(__name__)

PROBES = "sgl_pipeline.pp_runner.model.generic"
REFUSED = 2  # their exit code where they refuse a model


class ChosenModel(NamedTuple):
    """`generic_spec` is `spec` as JSON where transformers computes the layers, else empty."""

    spec: ModelSpec
    generic_spec: str


def choose_model(
    path: str,
    quantization: str | None,
    model_impl: str,
    context_length: int | None = None,
    rope_overrides: str = "{}",
) -> ChosenModel:
    """The spec of the model directory `path`, by the code that `model_impl` asks for.

    Args:
        quantization: as `--quantization`; None: as the checkpoint is.
        model_impl: as `--model-impl`; one of `args.MODEL_IMPLS`.
        context_length: as `--context-length`, in tokens; None: the model's own.
        rope_overrides: as `--json-model-override-args`, for layers of ours.

    Raises ConfigurationError when the model cannot be read, and UnsupportedModelError, which says
    why, when that code cannot serve it.
    """
    if model_impl == "transformers":
        return _probed(path, quantization, context_length, rope_overrides)
    try:
        spec = read_model_spec(path, quantization, context_length, rope_overrides)
        return ChosenModel(spec, "")
    except UnsupportedModelError as error:
        if model_impl == "sglang":
            raise UnsupportedModelError(
                f"--model-impl sglang: {error}; --model-impl transformers has transformers' code "
                "compute the layers, where it can be served"
            ) from None
        reason = error
    try:
        chosen = _probed(path, quantization, context_length, rope_overrides)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{reason}; {error}") from None
    logger.info("transformers computes the layers: %s", reason)
    return chosen


def _probed(
    path: str, quantization: str | None, context_length: int | None, rope_overrides: str
) -> ChosenModel:
    """The model as transformers' code computes it. A family that no test compares with transformers
    is announced in a warning."""
    if read_rope_overrides(rope_overrides):
        raise UnsupportedModelError(
            "--json-model-override-args is for models whose layers are ours; write the fields into "
            "the model's config.json"
        )
    spec = GenericSpec.from_json(_run_probes(path, quantization))
    longest = spec.own_context_lengths.longest
    if context_length is not None:
        require(
            context_length <= longest,
            f"--context-length {context_length} is more than this model's {longest}",
        )
        spec = replace(spec, context_length=context_length)
    if spec.model_type not in TESTED_MODEL_TYPES:
        logger.warning(
            "%s passes the probes of transformers' code, but no test compares the tokens of this "
            "family (%s) with transformers' own: compare some yourself before you rely on it",
            spec.architecture,
            spec.model_type,
        )
    return ChosenModel(spec, spec.to_json())


def _run_probes(path: str, quantization: str | None) -> str:
    """The JSON that the probes print. Raises UnsupportedModelError with the reason that they
    give."""
    command = [sys.executable, "-m", PROBES, path]
    if quantization is not None:
        command += ["--quantization", quantization]
    probes = subprocess.run(
        command,
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if probes.returncode == 0:
        return probes.stdout.strip().rpartition("\n")[2]
    if probes.returncode == REFUSED:
        raise UnsupportedModelError(
            f"transformers' code of this model cannot be served: {_last_line(probes.stdout)}. "
            "Stages would fail or answer wrongly; docs/models.md lists families that are served"
        )
    raise ConfigurationError(
        f"transformers' code of {path} could not be probed (exit code {probes.returncode}): "
        f"{_last_line(probes.stderr)}"
    )


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
