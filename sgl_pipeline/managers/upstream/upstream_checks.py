"""Applies the table of `upstream_fields.py`: notes arguments without effect, refuses the rest, and
tells upstream what it may know."""

import argparse
import logging
from typing import Any

from sgl_pipeline.args import DisaggregationArgs
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.upstream.upstream_fields import NOTED, refusal

logger = logging.getLogger(__name__)


def note_flags_without_effect(options: argparse.Namespace) -> None:
    """Logs a line for each upstream flag that changes nothing here, and puts its default in place,
    which is what upstream gets."""
    defaults = upstream_defaults()
    for name, note in NOTED.items():
        value = getattr(options, name)
        if value == defaults[name] or not note.takes(value):
            continue
        given = flag_of(name) if value is True else f"{flag_of(name)} {value}"
        logger.warning("%s has no effect here: %s", given, note.text)
        setattr(options, name, defaults[name])


def refuse_unsupported(options: argparse.Namespace) -> None:
    """Raises ConfigurationError for the first upstream flag whose value we cannot honor."""
    from sglang.srt.server_args import ServerArgs

    for name, default in upstream_defaults().items():
        if not hasattr(options, name):
            continue
        reason = refusal(name, ServerArgs._NS_BY_FIELD[name])
        value = getattr(options, name)
        if reason is not None and value != default:
            raise ConfigurationError(f"{flag_of(name)} {value} cannot be honored: {reason}")


def tell_role(record: Any, disaggregation: DisaggregationArgs) -> None:
    """Tells upstream's front that this is a prefill or a decode server: its health checks and
    warm-up are then such that need no peer.

    Args:
        record: ServerArgs that have been resolved as those of a server without a role. With one,
            upstream would check flags against its own transfers and switch its radix cache off.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(
        record,
        "sgl_pipeline",
        disaggregation_mode=disaggregation.mode,
        disaggregation_transfer_backend=disaggregation.transfer_backend,
    )


def tell_drafts(record: Any, draft_tokens: int) -> None:
    """Tells upstream's front that requests have drafts of at most `draft_tokens`: its answers then
    count them (`spec_*` of `meta_info`).

    Args:
        record: as for `tell_role`. With drafts upstream would demand a CUDA device.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(
        record,
        "sgl_pipeline",
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=1 + draft_tokens,
    )


def flag_of(name: str) -> str:
    """The flag that sets field `name`."""
    return "--" + name.replace("_", "-")


def upstream_defaults() -> dict[str, Any]:
    """The default of every field of upstream's, in their order."""
    import msgspec
    from sglang.srt.server_args import ServerArgs

    defaults = {}
    for field in msgspec.structs.fields(ServerArgs):
        default = field.default
        if default is msgspec.NODEFAULT:
            default = None if field.required else field.default_factory()
        defaults[field.name] = default
    return defaults
