"""The spec of the model that stages run, wherever `StageArgs` have arrived."""

from sgl_pipeline.args import StageArgs
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.model.generic.spec import GenericSpec
from sgl_pipeline.pp_runner.model.model_spec import ModelSpec, read_model_spec


def stage_spec(args: StageArgs) -> ModelSpec:
    """The spec of the model of `args`: read from its directory, or, where transformers computes the
    layers, the one that the launcher's probes found.

    Raises ConfigurationError and UnsupportedModelError as `read_model_spec`, and for a model with
    states on a GPU.
    """
    if args.is_generic:
        return GenericSpec.from_json(args.generic_spec)
    spec = read_model_spec(
        args.model_path, args.quantization, args.context_length, args.rope_overrides
    )
    if spec.has_states and args.device != "cpu":
        raise ConfigurationError(
            f"--device {args.device}: layers with a state ({spec.architecture}) are computed on "
            "CPUs only; use --device cpu"
        )
    return spec
