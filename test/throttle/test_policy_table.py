"""The names in `args/throttle_args.py` against the functions in `throttle/`."""

from sgl_pipeline.args import POLICIES
from sgl_pipeline.throttle import POLICY_TABLE


def test_every_policy_of_the_command_line_has_a_function_and_no_other_has_one() -> None:
    assert tuple(POLICY_TABLE) == POLICIES
