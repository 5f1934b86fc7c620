"""Finds fitted step costs on this machine, and those that hold for a server.

The `fit` command writes them; `plan` reads them, and so does the scheduler process, for `auto`
layer splits and for the planner of layer moves. A file holds for a model, dtype, device, number of
threads and machine; `--quantization` and `--kv-cache-dtype` are part of the dtype's name.
"""

import logging
import os
import platform
import subprocess
from pathlib import Path

from sgl_pipeline.args import StageArgs
from sgl_pipeline.costs.step_costs import CostFile, cost_file_name, decode_costs, encode_costs
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.stages.stage_processes import stage_threads
from sgl_pipeline.user_cache import user_cache_directory

logger = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "SGL_PIPELINE_COSTS"
_ANSWER_SECONDS = 10


def cost_directory() -> Path:
    """`$SGL_PIPELINE_COSTS`, or `sgl_pipeline/costs` in the user's cache directory."""
    if named := os.environ.get(DIRECTORY_VARIABLE):
        return Path(named)
    return user_cache_directory() / "costs"


def model_name(model_path: str | Path) -> str:
    """The name of the model's directory; of a snapshot from the hub, of the repository."""
    path = Path(model_path).resolve()
    return path.parents[1].name if path.parent.name == "snapshots" else path.name


def machine_name(device: str) -> str:
    """The GPU's name for `cuda`, else the CPU's."""
    if device == "cuda":
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        try:
            answer = subprocess.run(
                command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=True
            ).stdout
        except (OSError, subprocess.SubprocessError):
            return "unknown GPU"
        return ", ".join(dict.fromkeys(answer.splitlines()))
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def save_costs(costs: CostFile, path: Path | None = None) -> Path:
    """Writes `path`, or the file's own name in `cost_directory`; a reader sees all of it or none.

    Raises ConfigurationError if it cannot be written.
    """
    path = path or cost_directory() / costs.file_name
    draft = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(encode_costs(costs))
        draft.replace(path)
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error
    return path


def read_costs(
    path: Path, *, model: str, num_layers: int, dtype: str, device: str, threads: int
) -> CostFile:
    """The costs in `path`.

    Raises ConfigurationError if it cannot be read, or holds other costs.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    return decode_costs(
        content,
        str(path),
        model=model,
        num_layers=num_layers,
        dtype=dtype,
        device=device,
        threads=threads,
    )


def find_costs(stages: StageArgs, num_layers: int) -> CostFile | None:
    """The costs that hold for a server's stages, if any; a file of another machine or model is
    ignored with a warning."""
    threads = set(stage_threads(stages.num_stages, stages.cpu_threads))
    if len(threads) > 1:
        return None
    model = model_name(stages.model_path)
    path = cost_directory() / cost_file_name(model, stages.precision, stages.device, min(threads))
    if not path.exists():
        return None
    try:
        found = read_costs(
            path,
            model=model,
            num_layers=num_layers,
            dtype=stages.precision,
            device=stages.device,
            threads=min(threads),
        )
    except ConfigurationError as error:
        logger.warning("%s", error)
        return None
    if found.machine != (machine := machine_name(stages.device)):
        logger.warning("%s was made on %s, this is %s: not used", path, found.machine, machine)
        return None
    return found
