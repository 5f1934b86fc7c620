"""Runs lm-eval and guidellm, unmodified and offline, against the demo model at several depths.

    python -m benchmark.clients.run --pp 1 --pp 2 --pp 4

Run by hand after `python -m benchmark.clients.install`. What lm-eval generates is held against the
held-out answers, the likelihoods that it asks for against transformers' and against the other
depths', and guidellm must see every request answered.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import requests

from benchmark.clients.install import CLIENTS, CLIENTS_DIRECTORY
from benchmark.clients.likelihoods import (
    Likelihoods,
    expected_likelihoods,
    largest_difference,
    served_likelihoods,
)
from benchmark.clients.lm_eval_task import CHOOSE, GENERATE, write_tasks
from benchmark.support.command import Command, Options, Report, say
from benchmark.support.dated_result import markdown_table
from benchmark.support.engine import Engine, EngineFailure
from benchmark.support.engines import running
from sgl_pipeline.errors import ConfigurationError

MODEL_NAME = "sgl-pipeline-demo"
MODEL_PATH = Path(__file__).resolve().parents[2] / "sgl_pipeline" / "demo_model"
LEAST_EXACT_MATCH = 0.9
LARGEST_DIFFERENCE = 1e-3  # fp32, summed over a continuation of up to some 40 tokens
_NUM_REQUESTS = 24
_CLIENT_TIMEOUT_S = 300
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one client saw of one server."""

    client: str
    seen: str
    passed: bool


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, port=31960)
    add = command.add
    add("--client", action="append", choices=list(_CLIENTS), help="repeatable (default: all)")
    add("--pp", action="append", type=int, help="depth of the server; repeatable (default: 2)")
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    outcomes: list[Outcome] = []
    likelihoods: dict[int, Likelihoods] = {}
    names = options.client or list(_CLIENTS)
    for name in names:
        _program(name, name)  # known to be missing before a server starts
    for depth in options.pp or [2]:
        with (
            running(_engine(depth, options.port), CLIENTS_DIRECTORY / "server.log"),
            tempfile.TemporaryDirectory() as directory,
        ):
            url = f"http://127.0.0.1:{options.port}"
            for name in names:
                found = _CLIENTS[name](url, depth, Path(directory), likelihoods)
                say("\n".join(f"{o.client}: {o.seen}" for o in found))
                outcomes += found
    outcomes += _compare_likelihoods(likelihoods)
    cells = [[o.client, o.seen, "ok" if o.passed else "FAILED"] for o in outcomes]
    return Report(
        name="clients",
        texts=[markdown_table(["client", "seen", ""], cells)],
        facts={"clients": {name: _version(name) for name in CLIENTS}},
        record={"outcomes": [asdict(outcome) for outcome in outcomes]},
        problems=[f"{one.client}: {one.seen}" for one in outcomes if not one.passed],
    )


def run_lm_eval(
    url: str, depth: int, directory: Path, likelihoods: dict[int, Likelihoods]
) -> list[Outcome]:
    """Generates, and where the server has log-probabilities of prompts, chooses."""
    write_tasks(directory)
    tasks = [GENERATE, *([CHOOSE] if _has_prompt_logprobs(url) else [])]
    output = directory / "lm_eval"
    served = f"model={MODEL_NAME},base_url={url}/v1/completions,num_concurrent=8,max_retries=1"
    tokenizer = f"tokenizer={MODEL_PATH},tokenizer_backend=huggingface"
    command = ["run", "--model", "local-completions", "--model_args", f"{served},{tokenizer}"]
    command += ["--include_path", str(directory), "--tasks", ",".join(tasks)]
    command += ["--output_path", str(output), "--log_samples"]
    _run_client("lm_eval", ["lm_eval", *command], directory)
    (results,) = output.rglob("results_*.json")
    scores = json.loads(results.read_text(encoding="utf-8"))["results"]
    exact_match = scores[GENERATE]["exact_match,none"]
    client = f"lm-eval, --pp {depth}"
    found = [
        Outcome(f"{client}, generate_until", f"{exact_match:.3f}", exact_match >= LEAST_EXACT_MATCH)
    ]
    if CHOOSE in tasks:
        (samples,) = output.rglob(f"samples_{CHOOSE}_*.jsonl")
        likelihoods[depth] = served_likelihoods(samples)
        difference = largest_difference(
            likelihoods[depth], expected_likelihoods(MODEL_PATH, likelihoods[depth])
        )
        seen = f"accuracy {scores[CHOOSE]['acc,none']:.3f}, "
        seen += f"{len(likelihoods[depth])} likelihoods within {difference:.1e} of transformers'"
        found.append(Outcome(f"{client}, loglikelihood", seen, difference <= LARGEST_DIFFERENCE))
    return found


def run_guidellm(
    url: str, depth: int, directory: Path, likelihoods: dict[int, Likelihoods]
) -> list[Outcome]:
    """A few concurrent streams of synthetic prompts."""
    report = directory / "guidellm.json"
    command = ["guidellm", "run", "--disable-console-interactive"]
    command += ["--backend", f"kind=openai_http,target={url},model={MODEL_NAME}"]
    command += ["--profile", "kind=concurrent,streams=4"]
    command += ["--constraint", f"kind=max_requests,count={_NUM_REQUESTS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={MODEL_PATH}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"]
    command += ["--output", f"kind=json,path={report}"]
    _run_client("guidellm", command, directory)
    totals = json.loads(report.read_text(encoding="utf-8"))["benchmarks"][0]["metrics"][
        "request_totals"
    ]
    seen = ", ".join(f"{totals[key]} {key}" for key in ("successful", "incomplete", "errored"))
    passed = totals["successful"] == _NUM_REQUESTS and totals["errored"] == 0
    return [Outcome(f"guidellm, --pp {depth}", seen, passed)]


_Client = Callable[[str, int, Path, dict[int, Likelihoods]], list[Outcome]]
_CLIENTS: dict[str, _Client] = {"lm-eval": run_lm_eval, "guidellm": run_guidellm}


def _compare_likelihoods(likelihoods: dict[int, Likelihoods]) -> list[Outcome]:
    """All depths against the first one; fp32 gives the same bits at every depth."""
    (first, of_first), *others = likelihoods.items() or [(0, {})]
    found = []
    for depth, of_depth in others:
        difference = largest_difference(of_first, of_depth)
        name = f"lm-eval, --pp {depth} against --pp {first}"
        found.append(Outcome(name, f"likelihoods differ by {difference:.1e}", difference == 0))
    return found


def _engine(depth: int, port: int) -> Engine:
    command = [sys.executable, "-m", "sgl_pipeline.launch_server", "--dtype", "float32"]
    return Engine(
        label=f"ours --pp {depth}",
        client_backend="sglang",
        base_url=f"http://127.0.0.1:{port}",
        command=(*command, "--pp", str(depth), "--port", str(port)),
    )


def _has_prompt_logprobs(url: str) -> bool:
    body: dict[str, Any] = {"model": MODEL_NAME, "prompt": "ab", "max_tokens": 1}
    body |= {"echo": True, "logprobs": 1}
    return requests.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200


def _run_client(name: str, command: list[str], directory: Path) -> None:
    """Raises EngineFailure with the end of its output when the client fails."""
    program = _program(name, command[0])
    try:
        done = subprocess.run(
            [str(program), *command[1:]],
            cwd=directory,
            env=os.environ | _OFFLINE | {"HF_HOME": str(directory / "hugging_face")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_CLIENT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise EngineFailure(f"{name} was not done after {_CLIENT_TIMEOUT_S} s") from error
    if done.returncode != 0:
        raise EngineFailure(f"{name} failed:\n{done.stdout[-4000:]}")


def _program(client: str, program: str) -> Path:
    """Raises ConfigurationError where the client is not installed."""
    path = CLIENTS_DIRECTORY / client.replace("-", "_") / "bin" / program
    if not path.exists():
        raise ConfigurationError(f"{client} is missing; run python -m benchmark.clients.install")
    return path


def _version(name: str) -> str:
    for folder in (CLIENTS_DIRECTORY / name).glob(f"lib/python3*/site-packages/{name}-*.dist-info"):
        return folder.name.removeprefix(f"{name}-").removesuffix(".dist-info")
    return "missing"


if __name__ == "__main__":
    sys.exit(main())
