"""What the doctor's forecast takes from the model."""

from pathlib import Path

import pytest
from support.doctor_hosts import facts_of
from support.forked_workers import forked_workers  # noqa: F401 - a fixture
from support.saved_costs import costs_of
from support.tiny_models import tiny_model

from sgl_pipeline.args import ClusterArgs
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.doctor.command import make_parser
from sgl_pipeline.managers.doctor.findings import Findings
from sgl_pipeline.managers.doctor.pipeline_forecast import make_forecast, saved_costs
from sgl_pipeline.managers.planning import cost_files

# A state has 4 * 16 * 24 fp32 numbers: those of one layer take more than the 4 GiB of a stage.
MANY_SLOTS = 2**20


@pytest.mark.multiproc
@pytest.mark.usefixtures("forked_workers")
def test_states_have_to_fit_beside_the_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cost_files.DIRECTORY_VARIABLE, str(tmp_path))
    model = tiny_model("qwen3.5")
    cost_files.save_costs(costs_of(model.name))
    words = ["--model", str(model), "--dtype", "float32", "--cpu-threads-per-stage", "1"]
    findings = Findings(hosts={0: facts_of(0)}, probes={})

    def forecast(*more: str) -> tuple[int, ...]:
        options = make_parser().parse_args([*words, *more, "--pp", "2"])
        return make_forecast(saved_costs(options, ClusterArgs()), findings, 2).best.layer_counts

    assert sum(forecast()) == 6
    with pytest.raises(ConfigurationError, match="fit"):
        forecast("--max-mamba-cache-size", str(MANY_SLOTS))
