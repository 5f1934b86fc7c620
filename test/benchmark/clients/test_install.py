"""The environments of the clients are frozen, and one that is missing is named."""

from pathlib import Path

import pytest

from benchmark.clients import client_process, install
from sgl_pipeline.errors import ConfigurationError


@pytest.mark.parametrize("client", install.CLIENTS)
def test_every_requirement_of_a_client_is_pinned(client: str) -> None:
    path = Path(install.__file__).with_name(f"{client}_requirements.txt")
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert any(line.startswith(f"{client}==") for line in lines)
    assert [line for line in lines if line.count("==") != 1 or "+" in line] == []


def test_a_client_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_process, "CLIENTS_DIRECTORY", tmp_path)
    with pytest.raises(ConfigurationError, match=r"benchmark\.clients\.install"):
        client_process.run_client("lm_eval", ["lm_eval"], tmp_path)
