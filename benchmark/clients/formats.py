"""Scores each format of weights, keys and values in lm-eval, beside bf16, through the server.

Used by `run.py`. bf16 is measured first, and each format at each depth is held against it.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmark.clients.client_process import program, version
from benchmark.clients.demo_server import demo_server
from benchmark.clients.likelihoods import largest_difference, mean_difference
from benchmark.clients.lm_eval_client import LEAST_EXACT_MATCH, Scores, evaluate
from benchmark.models.precisions import PRECISIONS, SIXTEEN_BITS, Precision
from benchmark.support.command import Report, say
from benchmark.support.dated_result import markdown_table

LARGEST_LOSS = 0.02  # of exact match and of accuracy
QUESTIONS = 50
_HEADS = [
    *("format", "checkpoint", "flags", "--pp", "exact match", "accuracy"),
    *("from bf16's likelihoods: right answers, mean", "all choices, largest", ""),
]


@dataclass(frozen=True, slots=True)
class Measured:
    """The scores of one format at one depth."""

    precision: Precision
    depth: int
    scores: Scores


@dataclass(frozen=True, slots=True)
class Row:
    """One Measured beside bf16 at the same depth; `faults` says what was not as promised.
    Differences are of log-likelihoods, in nats: the mean of right answers, the largest of all
    choices."""

    format: str
    depth: int
    exact_match: float
    accuracy: float
    mean_difference_right: float
    largest_difference: float
    faults: list[str]


def measure_formats(
    names: Sequence[str], depths: Sequence[int], port: int, questions: int
) -> Report:
    """Starts a server for each format at each depth, one after the other."""
    program("lm_eval", "lm_eval")  # known to be missing before a server starts
    measured = []
    with tempfile.TemporaryDirectory() as checkpoints:
        for precision in in_order(names):
            for depth in depths:
                flags = server_flags(precision, Path(checkpoints))
                with demo_server(depth, port, flags) as (url, directory):
                    scores = evaluate(url, directory, questions)
                measured.append(Measured(precision, depth, scores))
                say(f"{precision.name} --pp {depth}: {scores.exact_match:.3f} generated")
    rows = judge(measured)
    return Report(
        name="clients_formats",
        texts=[table(rows), _rules(measured[0].scores)],
        facts={"clients": {"lm_eval": version("lm_eval")}},
        record={"rows": [asdict(row) for row in rows]},
        problems=[f"{row.format} --pp {row.depth}: {one}" for row in rows for one in row.faults],
    )


def in_order(names: Sequence[str]) -> list[Precision]:
    """Each of `names` once, and bf16 first even where it is not among them."""
    return [PRECISIONS[name] for name in dict.fromkeys([SIXTEEN_BITS, *names])]


def server_flags(precision: Precision, checkpoints: Path) -> tuple[str, ...]:
    """Flags of a server of `precision`; its checkpoint is written into `checkpoints` if needed."""
    path = precision.demo_checkpoint(checkpoints)
    return ("--model-path", str(path), "--dtype", "bfloat16", *precision.flags)


def judge(measured: Sequence[Measured]) -> list[Row]:
    """A row for each, in their order; bf16 is among them at each depth."""
    exact = {one.depth: one.scores for one in measured if one.precision.name == SIXTEEN_BITS}
    first: dict[str, Measured] = {}
    rows = []
    for one in measured:
        name, scores, beside = one.precision.name, one.scores, exact[one.depth]
        faults = [*_losses(scores, beside)]
        if name == SIXTEEN_BITS and scores.exact_match < LEAST_EXACT_MATCH:
            faults.append(f"exact match below {LEAST_EXACT_MATCH}")
        faults += _differences_of_depths(one, first.setdefault(name, one))
        rows.append(
            Row(
                format=name,
                depth=one.depth,
                exact_match=scores.exact_match,
                accuracy=scores.accuracy,
                mean_difference_right=mean_difference(
                    scores.right_likelihoods, beside.right_likelihoods
                ),
                largest_difference=largest_difference(scores.likelihoods, beside.likelihoods),
                faults=faults,
            )
        )
    return rows


def _losses(scores: Scores, exact: Scores) -> Iterator[str]:
    of_both = {
        "exact match": (scores.exact_match, exact.exact_match),
        "accuracy": (scores.accuracy, exact.accuracy),
    }
    for name, (score, exact_score) in of_both.items():
        # Rounded, for 0.98 is by a bit more than 0.02 below 1 in binary.
        if round(exact_score - score, 9) > LARGEST_LOSS:
            yield f"{name} {exact_score - score:.3f} below {SIXTEEN_BITS}'s"


def _differences_of_depths(one: Measured, first: Measured) -> Iterator[str]:
    if one.scores.answers != first.scores.answers:
        yield f"other answers than at --pp {first.depth}"
    difference = largest_difference(one.scores.likelihoods, first.scores.likelihoods)
    if difference != 0:
        yield f"likelihoods differ by up to {difference:.1e} from those at --pp {first.depth}"


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    cells = []
    for row in rows:
        precision = PRECISIONS[row.format]
        cells.append(
            [
                row.format,
                precision.stored or "16 bits",
                " ".join(precision.flags),
                str(row.depth),
                f"{row.exact_match:.4f}",
                f"{row.accuracy:.4f}",
                f"{row.mean_difference_right:.1e}",
                f"{row.largest_difference:.1e}",
                f"FAILED: {', '.join(row.faults)}" if row.faults else "ok",
            ]
        )
    return markdown_table(_HEADS, cells)


def _rules(scores: Scores) -> str:
    return (
        f"{len(scores.answers)} held-out questions are answered (exact match), and "
        f"{len(scores.likelihoods)} choices, three for each question, get a log-likelihood "
        "(accuracy), a sum over tokens; differences are in nats, and large where a wrong choice "
        "is next to impossible. A format is ok where both "
        f"scores are at most {LARGEST_LOSS} below those of {SIXTEEN_BITS} at the same depth, and "
        f"where every depth gives the same answers and, to the bit, the same likelihoods. "
        f"{SIXTEEN_BITS} itself must reach an exact match of {LEAST_EXACT_MATCH}."
    )
