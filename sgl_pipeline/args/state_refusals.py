"""The flags that models with states (of some layers, in place of keys and values) do not take."""

from sgl_pipeline.args.checks import require
from sgl_pipeline.args.disaggregation_args import DisaggregationArgs
from sgl_pipeline.args.recovery_args import RecoveryArgs
from sgl_pipeline.args.tier_args import TierArgs


def refuse_with_states(
    device: str,
    recovery: RecoveryArgs,
    tiers: TierArgs,
    disaggregation: DisaggregationArgs,
) -> None:
    """Raises ConfigurationError for the first of them that is given."""
    require(
        device == "cpu",
        f"--device {device}, the default where there is a GPU, is not built for models with "
        "states: their kernels are for CPUs only; use --device cpu",
    )
    refusals = {
        f"--recovery-log-mib {recovery.log_mib}": (
            bool(recovery.log_mib),
            "a stage that is replaced has no states to go on from, and all stages compute again",
        ),
        "--enable-hierarchical-cache": (tiers.enabled, "a store keeps pages and no states"),
        "--enable-attention-offload": (
            disaggregation.attention_offload,
            "the server that has the states computes the whole layer",
        ),
        f"--disaggregation-mode {disaggregation.mode}": (
            disaggregation.is_on,
            "only pages go from server to server, and no states",
        ),
    }
    for flag, (is_given, reason) in refusals.items():
        require(not is_given, f"{flag} is not built for models with states: {reason}; leave it out")
