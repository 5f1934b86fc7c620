"""SGLang's environment variables for pipelines: one is honored, the others are named.

They are checked once the flags are parsed. Variables of other subjects are read where they belong
(`_timeout_s`, `cluster/interfaces.py`).
"""

import logging
import os

logger = logging.getLogger(__name__)

LAYER_PARTITION = "SGLANG_PP_LAYER_PARTITION"
_PREFIX = "SGLANG_PP_"
_SMOOTH_FACTOR = "SGLANG_DYNAMIC_CHUNKING_SMOOTH_FACTOR"


def layer_partition_of(flag: str | None, num_stages: int) -> tuple[str | None, str]:
    """The requested layer split, and the name that requested it: `--pp-layer-partition`, whose
    value is `flag`, before SGLang's variable. As in SGLang, the variable is for two stages or
    more."""
    value = os.environ.get(LAYER_PARTITION)
    if value is None:
        return flag, "--pp-layer-partition"
    if num_stages == 1:
        logger.warning("%s=%s has no effect: there is one stage", LAYER_PARTITION, value)
        return flag, "--pp-layer-partition"
    if flag is None:
        return value, LAYER_PARTITION
    if flag != value:
        logger.warning(
            "%s=%s has no effect: --pp-layer-partition %s holds", LAYER_PARTITION, value, flag
        )
    return flag, "--pp-layer-partition"


def name_variables_without_effect() -> None:
    """One line for all that are set and tune SGLang's pipeline alone."""
    names = [name for name in os.environ if name.startswith(_PREFIX) and name != LAYER_PARTITION]
    names += [_SMOOTH_FACTOR] if _SMOOTH_FACTOR in os.environ else []
    if names:
        logger.warning(
            "no effect here: %s; SGLang's own pipeline is not used, and dynamic chunks are as long "
            "as predicted times say",
            ", ".join(sorted(names)),
        )
