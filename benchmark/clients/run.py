"""Runs lm-eval and guidellm, unmodified and offline, against the demo model at several depths.

    python -m benchmark.clients.run --pp 1 --pp 2 --pp 4
    python -m benchmark.clients.run --format w8a8_int8 --format bf16+kv-int8

Run by hand after `python -m benchmark.clients.install`. What lm-eval generates is held against the
held-out answers, the likelihoods that it asks for against transformers' and against the other
depths', and guidellm must see every request answered. With `--format` lm-eval alone runs, and holds
formats of weights, keys and values against bf16: a minute or two for each at each depth.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmark.clients import formats
from benchmark.clients.client_process import program, run_client, version
from benchmark.clients.demo_server import MODEL_NAME, demo_server
from benchmark.clients.install import CLIENTS
from benchmark.clients.likelihoods import Likelihoods, expected_likelihoods, largest_difference
from benchmark.clients.lm_eval_client import LEAST_EXACT_MATCH, evaluate
from benchmark.models.precisions import PRECISIONS
from benchmark.support.command import Command, Options, Report, at_least_one, say
from benchmark.support.dated_result import markdown_table
from benchmark.support.paths import DEMO_MODEL
from sgl_pipeline.args import require

LARGEST_DIFFERENCE = 1e-3  # fp32, summed over a continuation of up to some 40 tokens
_QUESTIONS = 5
_NUM_REQUESTS = 24


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one client against one server."""

    client: str
    seen: str
    passed: bool


@dataclass(frozen=True, slots=True)
class Visit:
    """A client's instructions: the server, a directory of its own, the questions of each kind, and
    the likelihoods of each depth so far, to which it adds."""

    url: str
    depth: int
    directory: Path
    questions: int
    likelihoods: dict[int, Likelihoods]


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, port=31960)
    add = command.add
    add("--client", action="append", choices=list(_CLIENTS), help="repeatable (default: all)")
    add("--pp", action="append", type=int, help="depth of the server; repeatable (default: 2)")
    text = f"beside bf16, by lm-eval: one of {', '.join(PRECISIONS)}; repeatable"
    add("--format", action="append", choices=list(PRECISIONS), metavar="FORMAT", help=text)
    text = f"of each kind for lm-eval (default: {_QUESTIONS}, of formats {formats.QUESTIONS})"
    add("--questions", type=at_least_one, help=text)
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    depths = options.pp or [2]
    if not options.format:
        names, questions = options.client or list(_CLIENTS), options.questions or _QUESTIONS
        return _measure_clients(names, depths, options.port, questions)
    require(
        options.client in (None, ["lm-eval"]), "--format is measured by lm-eval, no other --client"
    )
    questions = options.questions or formats.QUESTIONS
    return formats.measure_formats(options.format, depths, options.port, questions)


def _measure_clients(names: list[str], depths: list[int], port: int, questions: int) -> Report:
    outcomes: list[Outcome] = []
    likelihoods: dict[int, Likelihoods] = {}
    for name in names:
        package = name.replace("-", "_")
        program(package, package)  # known to be missing before a server starts
    for depth in depths:
        with demo_server(depth, port, ("--dtype", "float32")) as (url, directory):
            visit = Visit(url, depth, directory, questions, likelihoods)
            for name in names:
                found = _CLIENTS[name](visit)
                say("\n".join(f"{o.client}: {o.seen}" for o in found))
                outcomes += found
    outcomes += _compare_likelihoods(likelihoods)
    cells = [[o.client, o.seen, "ok" if o.passed else "FAILED"] for o in outcomes]
    return Report(
        name="clients",
        texts=[markdown_table(["client", "seen", ""], cells)],
        facts={"clients": {name: version(name) for name in CLIENTS}},
        record={"outcomes": [asdict(outcome) for outcome in outcomes]},
        problems=[f"{one.client}: {one.seen}" for one in outcomes if not one.passed],
    )


def run_lm_eval(visit: Visit) -> list[Outcome]:
    """Generates and chooses."""
    scores = evaluate(visit.url, visit.directory, visit.questions)
    visit.likelihoods[visit.depth] = scores.likelihoods
    difference = largest_difference(
        scores.likelihoods, expected_likelihoods(DEMO_MODEL, scores.likelihoods)
    )
    seen = f"accuracy {scores.accuracy:.3f}, "
    seen += f"{len(scores.likelihoods)} likelihoods within {difference:.1e} of transformers'"
    client, matches = f"lm-eval, --pp {visit.depth}", f"{scores.exact_match:.3f}"
    return [
        Outcome(f"{client}, generate_until", matches, scores.exact_match >= LEAST_EXACT_MATCH),
        Outcome(f"{client}, loglikelihood", seen, difference <= LARGEST_DIFFERENCE),
    ]


def run_guidellm(visit: Visit) -> list[Outcome]:
    """A few concurrent streams of synthetic prompts."""
    report = visit.directory / "guidellm.json"
    command = ["guidellm", "run", "--disable-console-interactive"]
    command += ["--backend", f"kind=openai_http,target={visit.url},model={MODEL_NAME}"]
    command += ["--profile", "kind=concurrent,streams=4"]
    command += ["--constraint", f"kind=max_requests,count={_NUM_REQUESTS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={DEMO_MODEL}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"]
    command += ["--output", f"kind=json,path={report}"]
    run_client("guidellm", command, visit.directory)
    totals = json.loads(report.read_text(encoding="utf-8"))["benchmarks"][0]["metrics"][
        "request_totals"
    ]
    seen = ", ".join(f"{totals[key]} {key}" for key in ("successful", "incomplete", "errored"))
    passed = totals["successful"] == _NUM_REQUESTS and totals["errored"] == 0
    return [Outcome(f"guidellm, --pp {visit.depth}", seen, passed)]


_CLIENTS: dict[str, Callable[[Visit], list[Outcome]]] = {
    "lm-eval": run_lm_eval,
    "guidellm": run_guidellm,
}


def _compare_likelihoods(likelihoods: dict[int, Likelihoods]) -> list[Outcome]:
    """All depths against the first one; fp32 gives the same bits at every depth."""
    (first, of_first), *others = likelihoods.items() or [(0, {})]
    found = []
    for depth, of_depth in others:
        difference = largest_difference(of_first, of_depth)
        name = f"lm-eval, --pp {depth} against --pp {first}"
        found.append(Outcome(name, f"likelihoods differ by {difference:.1e}", difference == 0))
    return found


if __name__ == "__main__":
    sys.exit(main())
