"""Drafts of n-grams on the simulator's command line."""

import argparse

from sgl_pipeline.args import require
from sgl_pipeline.args.scheduling_args import draft_tokens_of
from sgl_pipeline.simulator.virtual_drafts import NEVER_RIGHT, DraftAcceptance


def add_draft_flags(group: "argparse._ArgumentGroup") -> None:
    """Adds the flags that switch drafts on and say how often they are right."""
    group.add_argument(
        "--draft-acceptance",
        type=_chances,
        metavar="CHANCE,...",
        help="requests have drafts of n-grams. CHANCE: that a draft token is right, after a wrong "
        "one, after one right one, and so on; the last holds for longer runs too. 0.7, or "
        "0.4,0.77,0.9",
    )
    group.add_argument(
        "--draft-found",
        type=float,
        metavar="SHARE",
        help="of the lookups after a wrong draft token that find a draft; by default all",
    )
    group.add_argument(
        "--speculative-num-draft-tokens",
        type=int,
        metavar="ROWS",
        help="most rows of a decode, as the server's flag",
    )


def acceptance_of(options: argparse.Namespace) -> DraftAcceptance:
    """The acceptance of every request's drafts."""
    if options.draft_acceptance is None:
        return NEVER_RIGHT
    found = 1.0 if options.draft_found is None else options.draft_found
    return DraftAcceptance(options.draft_acceptance, found)


def simulated_draft_tokens(options: argparse.Namespace) -> int:
    """Most draft tokens of a decode. Raises ConfigurationError for flags without an effect."""
    if options.draft_acceptance is not None:
        return draft_tokens_of(options.speculative_num_draft_tokens)
    for flag in ("draft_found", "speculative_num_draft_tokens"):
        name = flag.replace("_", "-")
        require(getattr(options, flag) is None, f"--{name} does nothing without --draft-acceptance")
    return 0


def _chances(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"chances are numbers, got {text}") from None
