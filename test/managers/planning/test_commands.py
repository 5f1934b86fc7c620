"""The commands `fit` and `plan`, each with a real stage worker, and the file that joins them."""

import json
import shlex
from pathlib import Path

import pytest
from support.forked_workers import forked_workers  # noqa: F401 - a fixture
from support.saved_costs import costs_of
from support.tiny_models import NUM_LAYERS, tiny_model

from sgl_pipeline.args import StageArgs
from sgl_pipeline.costs.stage_costs import PartSample
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.command_line import model_choice
from sgl_pipeline.managers.doctor.command import make_parser as doctor_parser
from sgl_pipeline.managers.planning import cost_files, fit_command, plan_command
from sgl_pipeline.managers.planning.cost_files import find_costs, model_name, save_costs
from sgl_pipeline.managers.planning.fit_command import least, random_steps
from sgl_pipeline.managers.planning.measuring import measuring_worker
from sgl_pipeline.managers.planning.stage_flags import stage_words
from sgl_pipeline.pp_runner.model.generic.probe import probe
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec, ModelSpec, read_model_spec
from sgl_pipeline.pp_runner.model.rope_spec import YarnScaling
from sgl_pipeline.step_work import StepWork


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cost_files.DIRECTORY_VARIABLE, str(tmp_path / "costs"))
    return tmp_path / "costs"


def stage_args(model: Path, dtype: str = "float32") -> StageArgs:
    return StageArgs(num_stages=2, model_path=str(model), dtype=dtype, cpu_threads=1)


@pytest.mark.multiproc
@pytest.mark.usefixtures("forked_workers")
def test_a_fit_is_found_by_the_servers_that_it_holds_for(
    own_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("qwen3-moe")
    flags = ["--model", str(model), "--dtype", "float32", "--cpu-threads-per-stage", "1"]
    assert fit_command.main([*flags, "--steps", "50", "--rounds", "1"]) == 0
    assert f"{model.name}, float32, cpu, 1 threads" in capsys.readouterr().out
    found = find_costs(stage_args(model), NUM_LAYERS)
    assert found is not None
    assert len(found.costs.layer_weights) == NUM_LAYERS
    assert min(found.costs.layer.rows.times_ms) > 0
    assert found.errors is not None
    assert found.errors.num_shapes == 10
    assert [path.suffix for path in own_directory.iterdir()] == [".json"]
    assert find_costs(stage_args(model, dtype="bfloat16"), NUM_LAYERS) is None


@pytest.mark.multiproc
@pytest.mark.usefixtures("forked_workers")
def test_a_plan_for_layers_that_transformers_computes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probed in this process: that a child does it is `test/server/test_model_impl.py`'s."""
    monkeypatch.setattr(model_choice, "_run_probes", lambda *words: probe(*words).to_json())
    flags = ["--model", str(tiny_model("qwen3")), "--dtype", "float32", "--pp", "2"]
    assert plan_command.main([*flags, "--model-impl", "transformers"]) == 0
    output = capsys.readouterr().out
    assert "float32-transformers: a step of" in output
    assert "even: 3,3" in output


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


def stages_with(override: str, model_impl: str = "auto") -> tuple[StageArgs, ModelSpec]:
    words = ["--model", str(tiny_model("qwen3")), "--json-model-override-args", override]
    options = fit_command.make_parser().parse_args([*words, "--model-impl", model_impl])
    return fit_command.stages_of(options)


def test_overridden_rope_fields_are_those_of_a_server() -> None:
    text = json.dumps({"rope_scaling": YARN})
    stages, spec = stages_with(text)
    assert isinstance(spec, DecoderSpec)
    assert spec == read_model_spec(stages.model_path, rope_overrides=text)
    assert isinstance(spec.rope.scaling, YarnScaling)
    assert stages.rope_overrides == text
    # What the doctor tells people to run.
    asked = doctor_parser().parse_args(["--json-model-override-args", text])
    words = shlex.split(" ".join(stage_words(asked)))
    again = plan_command.make_parser().parse_args(["--model", "m", *words])
    assert again.json_model_override_args == text


@pytest.mark.parametrize("model_impl", ["auto", "sglang", "transformers"])
@pytest.mark.parametrize("text", ["{", "[1]", '{"hidden_size": 8}'])
def test_other_overrides_are_refused_by_the_flags_name(text: str, model_impl: str) -> None:
    with pytest.raises(ConfigurationError, match="--json-model-override-args"):
        stages_with(text, model_impl)


@pytest.mark.parametrize(
    "changes", [{"machine": "another"}, {"dtype": "bfloat16"}, {"model": "another"}]
)
def test_a_file_of_something_else_is_passed_over_with_a_warning(
    own_directory: Path, changes: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("qwen3")
    right = costs_of(model_name(model))
    assert find_costs(stage_args(model), NUM_LAYERS) is None
    save_costs(right)
    assert find_costs(stage_args(model), NUM_LAYERS) == right
    assert not caplog.messages
    wrong = costs_of(model_name(model), **changes)
    save_costs(wrong, own_directory / right.file_name)
    assert find_costs(stage_args(model), NUM_LAYERS) is None
    (warning,) = caplog.messages
    assert str(own_directory / right.file_name) in warning


def test_the_name_of_a_model_from_the_hub_is_its_repository(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "abcdef"
    assert model_name(snapshot) == "models--Qwen--Qwen3-0.6B"
    assert model_name(tmp_path / "0.27b") == "0.27b"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"cannot write .*file/f.json"):
        save_costs(costs_of("m"), tmp_path / "file" / "f.json")


@pytest.mark.multiproc
@pytest.mark.usefixtures("forked_workers")
def test_a_plan_is_that_of_the_saved_costs(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model("qwen3")
    save_costs(costs_of(model_name(model)))
    flags = ["--model", str(model), "--dtype", "float32", "--cpu-threads-per-stage", "1"]
    assert plan_command.main([*flags, "--pp", "2", "--layer-counts", "3,3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "fitted on" in lines[0]
    assert "asked for: 3,3  slowest stage 5.00 ms" in lines[2]
    (best,) = (line for line in lines if line.startswith("best:"))
    assert best.startswith("best: 4,2  slowest stage 4.00 ms")
    slow = [*flags, "--devices", "cpu:0.25,cpu"]
    assert plan_command.main(slow) == 0
    assert "best: 1,5  slowest stage 7.00 ms" in capsys.readouterr().out


@pytest.mark.multiproc
@pytest.mark.usefixtures("forked_workers")
def test_a_plan_without_saved_costs_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", str(tiny_model("qwen3")), "--dtype", "float32", "--pp", "2"]
    assert plan_command.main([*flags, "--step", "4,16,8"]) == 0
    text = capsys.readouterr().out
    assert "a step of 4 decodes and 8 prompt tokens; times measured now" in text
    assert "best: " in text


@pytest.mark.multiproc
@pytest.mark.usefixtures("forked_workers")
def test_a_plan_tells_the_memory_of_state_slots(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", str(tiny_model("qwen3.5")), "--dtype", "float32", "--pp", "2"]
    assert plan_command.main([*flags, "--step", "4,16,8"]) == 0
    assert "256 state slots (--max-mamba-cache-size) take 0.0" in capsys.readouterr().out
    few = [*flags, "--step", "4,16,8", "--devices", "1MB,1MB"]
    assert plan_command.main(few) == 1
    assert "fewer state slots (--max-mamba-cache-size)" in capsys.readouterr().err
    assert plan_command.main([*few, "--max-mamba-cache-size", "1"]) == 0


@pytest.mark.multiproc
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--layer-counts", "9,9"], "sums to 18"),
        (["--devices", "0.2MB,0.2MB"], "do not fit into the memory of 2 stages"),
        (["--costs", "nowhere.json"], "cannot read nowhere.json"),
        (["--step", "0,0,0"], "--step 0,0,0"),
        (["--pp", "17"], "--pp 17 is more than"),
    ],
)
def test_what_cannot_be_planned_ends_with_one_line(
    more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", str(tiny_model("qwen3")), "--dtype", "float32"]
    assert plan_command.main([*flags, *more]) == 1
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error


@pytest.mark.multiproc
@pytest.mark.usefixtures("forked_workers")
def test_a_worker_that_cannot_measure_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Unheard"]}))
    with (
        measuring_worker(stage_args(tmp_path), 4) as worker,
        pytest.raises(ConfigurationError, match="Unheard"),
    ):
        worker.measure([])


def test_steps_are_of_all_kinds_and_within_the_models_context() -> None:
    steps = random_steps(300, context_length=600, seed=1)
    assert steps == random_steps(300, context_length=600, seed=1)
    for step in steps:
        assert step.decodes + step.prompt_tokens > 0
        assert step.context_tokens < 600
        assert step.prompt_start + step.prompt_tokens < 600
    works = [step.work for step in steps]
    assert sum(not work.decodes for work in works) == 100
    assert sum(work.decodes == work.tokens for work in works) == 100
    for rows in (1, 10, 100):
        assert sum(rows <= work.tokens < 10 * rows for work in works) > 50


def test_the_least_of_each_part_counts() -> None:
    work = StepWork(1, 1, 1, 0, 1)
    one, other = PartSample(work, (1.0, 5.0), 3.0, 4.0), PartSample(work, (2.0, 4.0), 2.0, 5.0)
    assert least(one, other) == PartSample(work, (1.0, 4.0), 2.0, 4.0)


@pytest.mark.multiproc
@pytest.mark.usefixtures("forked_workers")
def test_a_plan_over_hosts_orders_them_and_says_what_binds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, hosts = tiny_model("qwen3"), tmp_path / "hosts.json"
    save_costs(costs_of(model_name(model)))
    hosts.write_text(
        '{"hosts": [{"name": "a"}, {"name": "b"}, {"name": "c"}],'
        ' "link": {"gbit_per_s": 10, "delay_ms": 0.5},'
        ' "links": [{"between": ["a", "b"], "gbit_per_s": 0.01, "delay_ms": 90}]}'
    )
    flags = ["--model", str(model), "--dtype", "float32", "--cpu-threads-per-stage", "1"]
    assert plan_command.main([*flags, "--hosts", str(hosts)]) == 0
    text = capsys.readouterr().out
    assert "as listed: a > b > c" in text
    assert "best order: a > c > b" in text
    assert "--extra-steps-in-flight 8" in text
    assert "c: --nnodes 3 --pp 3 --pp-layer-partition" in text
    assert "--node-rank 1 --dist-init-addr a:PORT" in text
    # The way back is the long one whichever way round.
    assert "bound by a round of 9" in text
    for more, message in (
        (["--pp", "3"], "--pp 3 is for one host"),
        (["--devices", "cpu"], "--devices cpu is for one host"),
        (["--extra-steps-in-flight", "9"], "must be between 0 and 8"),
    ):
        assert plan_command.main([*flags, "--hosts", str(hosts), *more]) == 1
        assert message in capsys.readouterr().err
