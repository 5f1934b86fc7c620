"""Part `pipelines`: real stage processes of the first model, at each depth and over each link.

Each pipeline is started once, prefills, and then decodes with 0 or more extra steps in flight: the
requests are divided over as many groups as steps are in flight, as `--extra-steps-in-flight` does.
"""

from dataclasses import asdict, dataclass
from functools import partial

import torch

from benchmark.gpu.checks import Check
from benchmark.gpu.device_times import release_memory
from benchmark.gpu.pipelines import (
    DrivenStep,
    PipelineChoice,
    ScriptedPipeline,
    decode_times,
    links_between,
    same_tokens_share,
    started_pipeline,
)
from benchmark.gpu.script import PlanWriter, Script
from benchmark.gpu.session import Session
from benchmark.gpu.shapes import PAGE_SIZE, spec_of
from benchmark.support.dated_result import markdown_table

# How many requests decode at once.
_CONCURRENCIES = (64, 256)
_SMALL_CONCURRENCIES = (8, 16)
_SMALL_SCRIPT = Script(num_requests=16, prompt_tokens=32, num_rounds=4, prefill_requests=4)
_START_TIMEOUT_S = 180.0
# Of tokens of the same steps; the kernels are the same at each depth.
_DIFFERENT_SHARE_BOUND = 0.01

# The steps of the first run of each kind: (requests, groups), or "prefills".
References = dict[object, list[DrivenStep]]


@dataclass(frozen=True, slots=True)
class _Place:
    """The pipeline that is measured."""

    model: str
    stages: int
    link: str


def run(session: Session) -> None:
    """The first model in processes: each depth with each link that the machine's GPUs allow."""
    model = session.models[0]
    for other in session.models[1:]:
        session.skip(f"stage processes of {other}", "only the first of --models is run so")
    references: References = {}
    num_gpus = torch.cuda.device_count() if not session.is_rehearsal else 0
    for depth in session.depths:
        for link in links_between(session.device.type, depth, num_gpus):
            place = _Place(model, depth, link)
            what = f"running {depth} stage processes of {model}, link {link}"
            work = partial(_run_pipeline, session, place, references)
            session.attempt(what, work, kind=f"{depth} processes", guess_s=45.0)


def _run_pipeline(session: Session, place: _Place, references: References) -> None:
    release_memory()
    script = _SMALL_SCRIPT if session.is_rehearsal else Script()
    choice = PipelineChoice(
        place.model,
        place.stages,
        place.link,
        script.total_tokens(PAGE_SIZE),
        session.device.type,
        start_timeout_s=min(_START_TIMEOUT_S, max(1.0, session.budget.left_s)),
    )
    with started_pipeline(choice) as pipeline:
        writer = PlanWriter(script, PAGE_SIZE, spec_of(place.model).vocab_size)
        driven = _DrivenPipeline(session, place, pipeline, writer, references)
        driven.prefill()
        for num_requests in _SMALL_CONCURRENCIES if session.is_rehearsal else _CONCURRENCIES:
            for extra in session.extra_steps:
                driven.decode(num_requests, extra)


@dataclass(frozen=True, slots=True)
class _DrivenPipeline:
    """One pipeline that is up, and what is measured on it."""

    session: Session
    place: _Place
    pipeline: ScriptedPipeline
    writer: PlanWriter
    references: References

    def prefill(self) -> None:
        """All prompts; to be called first."""
        steps = self.pipeline.run(self.writer.prefills(), self.place.stages)
        rows = self.writer.script.prompt_tokens * self.writer.script.prefill_requests
        step_ms = (steps[-1].back_s - steps[0].back_s) * 1e3 / (len(steps) - 1)
        row = {
            **asdict(self.place),
            "start_s": self.pipeline.start_s,
            "rows": rows,
            "step_ms": step_ms,
            "tokens_per_s": rows / step_ms * 1e3,
        }
        self.session.book_row("pipeline prefills", row)
        self.session.say(f"up after {row['start_s']:.1f} s, prefills {row['tokens_per_s']:.0f}/s")
        self._compare("prefills", "prefills", steps)

    def decode(self, num_requests: int, extra: int) -> None:
        """All rounds of `num_requests`, with `extra` steps in flight more than there are stages."""
        what = f"{num_requests} requests, {extra} extra steps in flight"
        in_flight = self.place.stages + extra
        if self.session.budget.left_s <= 0 or num_requests < in_flight:
            why = "fewer requests than groups" if num_requests < in_flight else "no time"
            self.session.skip(f"{self._name}: {what}", why)
            return
        steps = self.pipeline.run(self.writer.decodes(num_requests, in_flight), in_flight)
        times = decode_times(steps, in_flight)
        row = {
            **asdict(self.place),
            "requests": num_requests,
            "extra": extra,
            "in_flight": in_flight,
            **asdict(times),
            "tokens_per_s": num_requests / times.round_ms * 1e3,
        }
        self.session.book_row("pipelines", row)
        self.session.say(f"{what}: {times.step_ms:.2f} ms a step")
        groups = f"{num_requests} requests in {in_flight} groups"
        self._compare((num_requests, in_flight), groups, steps)

    @property
    def _name(self) -> str:
        return f"{self.place.stages} stages of {self.place.model}, link {self.place.link}"

    def _compare(self, key: object, what: str, steps: list[DrivenStep]) -> None:
        """Books how many tokens differ from the first run of the same steps, at another depth or
        link. Nothing where this is the first."""
        reference = self.references.setdefault(key, steps)
        if reference is not steps:
            different = 1 - same_tokens_share(steps, reference)
            name = f"tokens of {self._name}: {what}"
            self.session.book_checks(Check(name, different, _DIFFERENT_SHARE_BOUND))


def text(session: Session) -> str:
    """The report on the pipelines, decodes and then starts and prefills."""
    if not session.table("pipeline prefills"):
        return ""
    texts = [f"## Stage processes of {session.models[0]}"]
    if session.table("pipelines"):
        texts.append(
            "In a round every request draws a token, in a step one group of them; as many groups "
            "as steps in flight. `turnaround`: from a group's tokens to its next step on the first "
            "stage, the wait for other groups' steps included, a scheduler's decision not."
        )
        texts.append(_decode_table(session))
    return "\n\n".join([*texts, _prefill_table(session)])


def _decode_table(session: Session) -> str:
    heads = "stages|link|requests|in flight|round ms|step ms|tokens/s|turnaround ms|waited for rows"
    return markdown_table(
        heads.split("|"),
        [
            [
                str(row["stages"]),
                row["link"],
                str(row["requests"]),
                f"{row['in_flight']} ({row['extra']} extra)",
                f"{row['round_ms']:.2f}",
                f"{row['step_ms']:.2f}",
                f"{row['tokens_per_s']:.0f}",
                f"{row['turnaround_ms']:.2f}",
                ", ".join(f"{share:.0%}" for share in row["wait_shares"]),
            ]
            for row in session.table("pipelines")
        ],
    )


def _prefill_table(session: Session) -> str:
    return markdown_table(
        ["stages", "link", "start s", "prefill rows a step", "step ms", "prompt tokens/s"],
        [
            [
                str(row["stages"]),
                row["link"],
                f"{row['start_s']:.1f}",
                str(row["rows"]),
                f"{row['step_ms']:.1f}",
                f"{row['tokens_per_s']:.0f}",
            ]
            for row in session.table("pipeline prefills")
        ],
    )
