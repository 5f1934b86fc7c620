from pathlib import Path

import pytest

from sgl_pipeline.args import SchedulingArgs
from sgl_pipeline.args.tenant_flags import header_of, read_tenant_weights
from sgl_pipeline.errors import ConfigurationError


@pytest.mark.parametrize("by", ["api-key", "user", "header:X-Tenant"])
def test_tenants_are_told_apart_by(by: str) -> None:
    assert SchedulingArgs(fair_shares_by=by).fair_shares_by == by
    assert header_of(by) == ("X-Tenant" if by.startswith("header") else None)


@pytest.mark.parametrize("by", ["", "key", "header:", "header:two words", "header:a\nb"])
def test_anything_else_is_refused_in_words_of_the_flag(by: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--fair-shares-by .* is unknown; choose api-key"):
        SchedulingArgs(fair_shares_by=by)


def test_weights_are_read_from_the_line_or_from_a_file(tmp_path: Path) -> None:
    text = '{"alice": 3, "bob": 0.5}'
    path = tmp_path / "weights.json"
    path.write_text(text)
    for given in (text, f"@{path}"):
        args = SchedulingArgs(fair_shares_by="user", tenant_weights=given)
        assert args.weights_of_tenants == {"alice": 3.0, "bob": 0.5}
    assert SchedulingArgs().weights_of_tenants == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "--tenant-weights '{' is not JSON"),
        ("gold=3", 'as {"alice": 3}'),
        ("[3]", "must be an object"),
        ('{"a": 0}', "the weight of 'a' must be a number from 0.001 to 1000, got 0"),
        ('{"a": true}', "got True"),
        ('{"a": "3"}', "got '3'"),
        ('{"a": NaN}', "got nan"),
        ('{"": 1}', "a name has 1 to 256 characters, got 0"),
        ("@/no/such/file", "--tenant-weights @/no/such/file cannot be read"),
    ],
)
def test_weights_that_mean_nothing_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message.replace("(", r"\(")):
        read_tenant_weights(text)


@pytest.mark.parametrize("cost", [-0.1, 1.5, float("nan")])
def test_the_cost_of_short_steps_is_a_share(cost: float) -> None:
    with pytest.raises(ConfigurationError, match=r"--fair-step-cost .* must be a share"):
        SchedulingArgs(fair_step_cost=cost)


def test_weights_without_tenants_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="no effect without --fair-shares-by"):
        SchedulingArgs(tenant_weights='{"a": 2}')
