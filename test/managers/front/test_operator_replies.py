"""What operators ask is answered: at once, or when the move that they want is over."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq
from support.malformed_data import MSGPACK
from support.moves import movable_core, note_step, stage_fails, stages_get_ready, stages_switch
from support.pipelines import make_request, new_pipeline
from support.planners import EAGER, planner_of
from support.served_steps import ServedSteps, decode_step, flat_costs, mixed_step

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.managers.channels.operator_channel import (
    ChangeThrottle,
    ExplainRequest,
    MoveLayers,
    OperatorAnswer,
    OperatorSocket,
    Question,
    ShowPlan,
    ShowThrottle,
    UndoMove,
    UndoThrottle,
)
from sgl_pipeline.managers.front.operator_replies import MAX_QUESTIONS_PER_TURN, OperatorReplies
from sgl_pipeline.managers.grammars.queue import NoGrammars
from sgl_pipeline.managers.reports.plan_report import unix_s
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.pipeline.throttle_control import ThrottleControl
from sgl_pipeline.records.throttle_change import Author
from sgl_pipeline.requests import Request
from sgl_pipeline.stage_plan import StagePlan

WAIT_MS = 2000
ADDRESS = "inproc://desk"


class Operator:
    """Asks one question at a time and reads the answer, if there is one."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.connect(ADDRESS)

    def ask(self, question: Question) -> None:
        self.socket.send(msgspec.msgpack.encode(question))

    def answer(self) -> tuple[int, Any]:
        assert self.socket.poll(WAIT_MS), "no answer has come"
        answer = msgspec.msgpack.decode(self.socket.recv(), type=OperatorAnswer)
        return answer.status, msgspec.json.decode(answer.body)

    @property
    def waits(self) -> bool:
        return not self.socket.poll(50)


class Held(NoGrammars):
    """One request waits for its grammar, or none."""

    def __init__(self) -> None:
        super().__init__("no grammar")
        self.request: Request | None = None

    def __len__(self) -> int:
        return int(self.request is not None)

    def held(self, request_id: str) -> Request | None:
        return self.request if self.request and self.request.request_id == request_id else None


class Office:
    """A desk with a core behind it, driven as the scheduler process does it."""

    def __init__(self, core: PipelineCore) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.core = core
        self.grammars = Held()
        socket = OperatorSocket(self.context, ADDRESS)
        self.desk = OperatorReplies(socket, core, self.grammars, compile_seconds=7.5)
        self.now_s = 100.0
        self.operators = [Operator(self.context) for _ in range(8)]

    def turn(self) -> None:
        """One turn of the loop."""
        self.now_s += 0.125
        self.desk.serve(self.now_s)
        for event in self.core.take_events():
            self.desk.on(event)

    def ask(self, question: Question, operator: int = 0) -> tuple[int, Any]:
        """Asks, and has it answered at once."""
        self.operators[operator].ask(question)
        self.turn()
        return self.operators[operator].answer()

    def close(self) -> None:
        for operator in self.operators:
            operator.socket.close(linger=0)
        self.context.destroy(linger=0)


@pytest.fixture
def offices() -> Iterator[list[Office]]:
    """To be filled by the test; closed after it."""
    opened: list[Office] = []
    yield opened
    for office in opened:
        office.close()


@pytest.fixture
def office(offices: list[Office]) -> Office:
    """Of three stages with 3, 2 and 3 layers; nothing has been measured."""
    offices.append(Office(movable_core(3, 2, 3)))
    return offices[-1]


def message(answer: tuple[int, Any]) -> tuple[int, str]:
    return answer[0], answer[1]["error"]["message"]


def test_the_plan_before_the_first_step_and_move(office: Office) -> None:
    assert office.ask(ShowPlan()) == (
        200,
        {
            "migration": "manual",
            "epoch": 0,
            "layer_counts": [3, 2, 3],
            "max_layer_counts": [5, 4, 5],
            "measured_steps": 0,
            "stage_ms": [None, None, None],
            "stage_shares": None,
            "bubble_share": None,
            "proposal": None,
            "move_under_way": None,
            "history": [],
        },
    )


def test_a_move_is_answered_when_it_is_over_with_what_it_cost(office: Office) -> None:
    operator = office.operators[0]
    operator.ask(MoveLayers((2, 2, 4), preview=False))
    office.turn()  # now_s is 100.125
    stages_get_ready(office.core, 100.25)
    office.turn()
    under_way = office.ask(ShowPlan(), 1)[1]
    assert under_way["move_under_way"]["outcome"] == "preparing" and under_way["history"] == []
    assert under_way["layer_counts"] == [3, 2, 3]
    assert operator.waits
    stages_switch(office.core, 100.625)
    office.turn()
    status, answer = operator.answer()
    assert status == 200
    began_unix_s = answer["move"].pop("began_unix_s")
    assert began_unix_s > 1.7e9
    assert answer["move"] == {
        "move": 0,
        "epoch": 1,
        "wanted_by": "operator",
        "before": [3, 2, 3],
        "after": [2, 2, 4],
        "moved_layers": 2,
        "outcome": "done",
        "reason": "",
        "prepare_ms": 500.0,
        "total_ms": 500.0,
        "load_ms": 2.0,
        "patch_ms": 1.5,
        "wait_ms": 0.5,
        "copied_bytes": 3000,
        "patched_bytes": 30,
    }
    plan = office.ask(ShowPlan(), 1)[1]
    assert (plan["epoch"], plan["layer_counts"], plan["move_under_way"]) == (1, [2, 2, 4], None)
    assert [move["outcome"] for move in plan["history"]] == ["done"]


def test_one_of_several_moves_goes_on_and_the_others_are_409s(office: Office) -> None:
    wishes = [(2, 2, 4), (4, 2, 2), (2, 2, 4)]
    for operator, counts in zip(office.operators, wishes, strict=False):
        operator.ask(MoveLayers(counts, preview=False))
        office.turn()
    office.operators[3].ask(UndoMove(preview=False))
    office.turn()
    for operator in office.operators[1:3]:
        status, text = message(operator.answer())
        assert status == 409 and "[2, 2, 4]" in text
    assert message(office.operators[3].answer()) == (
        400,
        "no layer has moved: there is nothing to undo",
    )
    assert office.operators[0].waits
    stages_get_ready(office.core, 101.0)
    stages_switch(office.core, 101.0)
    office.turn()
    assert office.operators[0].answer()[0] == 200


def test_an_abandoned_move_is_a_503_with_the_reason(office: Office) -> None:
    operator = office.operators[0]
    operator.ask(MoveLayers((2, 2, 4), preview=False))
    office.turn()
    stage_fails(office.core, 101.0)
    office.turn()
    status, answer = operator.answer()
    assert status == 503
    assert "the old plan stands: stage 2: no memory" in answer["error"]["message"]
    assert (answer["move"]["outcome"], answer["move"]["after"]) == ("abandoned", [2, 2, 4])
    plan = office.ask(ShowPlan())[1]
    assert (plan["epoch"], plan["layer_counts"]) == (0, [3, 2, 3])
    assert [move["outcome"] for move in plan["history"]] == ["abandoned"]


def test_undo_goes_back_to_the_plan_before(office: Office) -> None:
    office.operators[0].ask(MoveLayers((2, 2, 4), preview=False))
    office.turn()
    stages_get_ready(office.core, 101.0)
    stages_switch(office.core, 101.0)
    office.operators[1].ask(UndoMove(preview=False))
    office.turn()
    stages_get_ready(office.core, 102.0)
    stages_switch(office.core, 102.0)
    office.turn()
    status, answer = office.operators[1].answer()
    assert (status, answer["move"]["wanted_by"]) == (200, "undo")
    assert (answer["move"]["before"], answer["move"]["after"]) == ([2, 2, 4], [3, 2, 3])
    assert office.core.plan == StagePlan(2, (3, 2, 3))


@pytest.mark.parametrize(
    ("layer_counts", "words"),
    [
        ((3, 5), "8 in 3"),
        ((3, 2, 4), "9 layers in 3 stages, this pipeline has 8 in 3"),
        ((0, 4, 4), "each stage needs at least one layer"),
        ((3, 2, 3), "is the plan already"),
        ((1, 1, 6), "stage 2 would hold 6 layers during the move, it has room for 5"),
    ],
)
@pytest.mark.parametrize("preview", [True, False])
def test_a_plan_that_does_not_fit_is_a_400_with_the_limit(
    office: Office, layer_counts: tuple[int, ...], words: str, preview: bool
) -> None:
    status, text = message(office.ask(MoveLayers(layer_counts, preview)))
    assert status == 400 and words in text
    assert office.core.migration.history == ()


def test_with_migration_off_the_knob_is_named_and_the_plan_shown(offices: list[Office]) -> None:
    offices.append(Office(movable_core(3, 2, 3, mode="off")))
    office = offices[0]
    for question in (
        MoveLayers((2, 2, 4), preview=False),
        MoveLayers((2, 2, 4), preview=True),
        UndoMove(preview=False),
        UndoMove(preview=True),
    ):
        status, text = message(office.ask(question))
        assert status == 400 and "--migration manual" in text
    plan = office.ask(ShowPlan())[1]
    assert (plan["migration"], plan["max_layer_counts"]) == ("off", [3, 2, 3])


def test_nothing_is_predicted_before_steps_were_measured(office: Office) -> None:
    status, text = message(office.ask(MoveLayers((2, 2, 4), preview=True)))
    assert status == 503 and "too few steps were measured" in text


def test_a_preview_says_what_a_move_would_bring_and_moves_nothing(offices: list[Office]) -> None:
    """Layers take 1 ms, the head 3: eight layers of stages of 4 are best as 4,4 to 5,3."""
    served = ServedSteps(flat_costs(8, tail_ms=3.0), StagePlan(0, (4, 4)))
    planner = planner_of(served, EAGER, max_layers=(6, 6))
    offices.append(Office(movable_core(4, 4, planner=planner)))
    office = offices[0]
    for _ in range(60):
        note_step(office.core, served.run(decode_step(8)))
    expected = {
        "layer_counts": [5, 3],
        "stage_ms_before": [4.0, 7.0],
        "stage_ms_after": [5.0, 6.0],
        "gain_share": round(1 / 7, 4),
        "moved_layers": 1,
        "move_cost_s": 0.0,
    }
    answer = office.ask(MoveLayers((5, 3), preview=True))
    assert answer == (200, {"preview": expected})
    plan = office.ask(ShowPlan())[1]
    # As good as it gets: the slowest stage of 5,3 and of 6,2 takes 6 ms.
    assert plan["proposal"] is not None and plan["proposal"]["gain_share"] == round(1 / 7, 4)
    assert office.core.migration.history == ()
    # Steps without samples leave the head nothing to do: 4,4 is even.
    for _ in range(30):
        note_step(office.core, served.run(mixed_step(0, 64, samples=0)))
    assert office.ask(ShowPlan())[1]["proposal"] is None
    for _ in range(60):
        note_step(office.core, served.run(decode_step(8)))
    assert office.ask(ShowPlan())[1]["proposal"] is not None
    # What was proposed for one plan was not proposed for the next.
    office.operators[0].ask(MoveLayers((3, 5), preview=False))
    office.turn()
    stages_get_ready(office.core, 101.0)
    stages_switch(office.core, 101.0)
    office.turn()
    assert office.operators[0].answer()[0] == 200
    assert office.ask(ShowPlan())[1]["proposal"] is None


def test_a_question_that_fails_is_a_500_and_the_next_is_answered(
    office: Office, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(office.core, "state", lambda now_s: 1 / 0)
        status, text = message(office.ask(ShowPlan()))
    assert (status, text) == (500, "internal error; see the server's log")
    assert "ZeroDivisionError" in caplog.text
    assert office.ask(ShowPlan())[0] == 200


def test_bytes_that_are_no_question_are_dropped(office: Office) -> None:
    for question in (b"\xc1", *MSGPACK.values()):
        office.operators[0].socket.send(question)
        office.turn()
    office.operators[0].socket.send_multipart([b"one", b"two"])
    assert office.ask(ShowPlan(), 1)[0] == 200
    assert office.operators[0].waits


def test_a_flood_of_questions_leaves_turns_for_steps(office: Office) -> None:
    for operator in office.operators:
        operator.ask(ShowPlan())
    office.turn()
    answered = [not operator.waits for operator in office.operators]
    assert sum(answered) == MAX_QUESTIONS_PER_TURN
    office.turn()
    assert all(not operator.waits for operator in office.operators)


def test_a_move_goes_on_when_whoever_wanted_it_has_left(office: Office) -> None:
    office.operators[0].ask(MoveLayers((2, 2, 4), preview=False))
    office.turn()
    office.operators[0].socket.close(linger=0)
    stages_get_ready(office.core, 101.0)
    stages_switch(office.core, 101.0)
    office.turn()
    assert office.ask(ShowPlan(), 1)[1]["layer_counts"] == [2, 2, 4]


def test_a_server_that_ends_answers_whoever_waits(office: Office) -> None:
    office.operators[0].ask(MoveLayers((2, 2, 4), preview=False))
    office.turn()
    office.desk.close()
    assert message(office.operators[0].answer()) == (503, "the server is shutting down")


def test_an_unknown_request_is_a_404(office: Office) -> None:
    status, text = message(office.ask(ExplainRequest("gone")))
    assert (status, text) == (
        404,
        "no request 'gone' waits or runs: it has ended, or never came",
    )


def test_a_request_is_explained_with_its_numbers_and_no_text(office: Office) -> None:
    request = make_request("mine", [7, 8, 9], 5)
    request.arrival_s = office.now_s - 1.0
    office.core.scheduler.add(make_request("first", [1] * 40, 5))
    office.core.scheduler.add(request)
    status, told = office.ask(ExplainRequest("mine"))
    assert status == 200
    assert (told["rid"], told["state"], told["rule"]) == ("mine", "waiting", "order")
    assert (told["behind"], told["num_ahead"], told["age_s"]) == ("first", 1, 1.125)
    assert told["numbers"]["tokens_ahead"] == 40 and told["numbers"]["prefill_tokens_left"] == 3
    assert told["numbers"]["running_requests"] == 0 and told["numbers"]["bound_by"]
    assert told["estimate"]["runs_in_s"] is None
    assert told["estimate"]["reason"] == (
        "0 steps of this plan have been measured, too few to tell"
    )
    assert "prompt_ids" not in told and "output_ids" not in told
    assert told["drafts"] is None  # the server has none


def test_why_a_request_has_no_draft_is_explained(offices: list[Office]) -> None:
    args = SchedulingArgs(page_size=4, draft_tokens=3)
    core = new_pipeline(args, num_pages=40, num_stages=1, context_length=128).core
    offices.append(Office(core))
    core.scheduler.add(make_request("mine", [7, 8, 9], 5))
    assert offices[0].core.next_step(offices[0].now_s) is not None
    _, told = offices[0].ask(ExplainRequest("mine"))
    assert told["drafts"] == {
        "rule": "prefill",
        "text": "its prompt is computed first",
        "steps": 0,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
    }


def test_a_pause_and_a_step_in_flight_are_explained(office: Office) -> None:
    office.core.scheduler.add(make_request("mine", [7, 8, 9], 5))
    office.core.scheduler.pausing.pause(retract=False)
    _, told = office.ask(ExplainRequest("mine"))
    assert (told["rule"], told["estimate"]["runs_in_s"]) == ("pause", None)
    assert told["estimate"]["reason"].startswith("the scheduler is paused")
    office.core.scheduler.pausing.resume()
    assert office.core.next_step(office.now_s) is not None
    _, told = office.ask(ExplainRequest("mine"))
    assert (told["state"], told["rule"]) == ("prefilling", "in-flight")


def test_a_request_whose_prefix_comes_from_a_store_is_loading(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request("mine", [7, 8, 9], 5)
    office.core.scheduler.add(request)
    request.cached_tokens, request.loaded_tokens = 2, 1
    plain = office.core.explain("mine")
    assert plain is not None
    loading = replace(plain, rule="loading", text="4 of 16 pages are there")
    monkeypatch.setattr(office.core, "explain", lambda request_id: loading)
    _, told = office.ask(ExplainRequest("mine"))
    assert (told["state"], told["rule"], told["text"]) == ("loading", "loading", loading.text)
    assert (told["cached_tokens"], told["loaded_tokens"]) == (2, 1)


def test_a_request_whose_grammar_is_compiled_is_explained(office: Office) -> None:
    office.grammars.request = make_request("strict", [1, 2])
    status, told = office.ask(ExplainRequest("strict"))
    assert (status, told["state"], told["rule"]) == (200, "compiling", "grammar")
    assert "at most 7.5 s (--grammar-compile-seconds)" in told["text"]
    assert told["estimate"]["runs_in_s"] is None and told["estimate"]["reason"]
    assert told["numbers"] == {"compiling_requests": 1, "most_compile_seconds": 7.5}


def steer(office: Office) -> None:
    scheduler = office.core.scheduler
    office.core.throttle = ThrottleControl(
        scheduler, ThrottleArgs(policy="throttle"), "radix", 4096
    )


def test_knobs_are_shown_with_ranges_and_the_past(office: Office) -> None:
    steer(office)
    status, shown = office.ask(ShowThrottle())
    assert status == 200
    assert (shown["policy"], shown["prefill_spread_steps"]) == ("throttle", 8)
    assert (shown["max_prefill_tokens"], shown["prefill_limit"]) == (None, 2048)
    assert shown["ranges"]["prefill_spread_steps"] == [1, 1024]
    assert list(shown["policy_knobs"]) == shown["ranges"]["policy"]
    knobs = set(shown["ranges"])
    assert knobs - set(shown["policy_knobs"]["throttle-time"]) == set()
    unread = {"prefill_spread_steps", "pause_free_share", "target_tpot_ms", "target_ttft_ms"}
    unread.add("ttft_weight")
    assert knobs - set(shown["policy_knobs"]["sarathi"]) == unread
    assert shown["history"] == [] and shown["revert"] is None
    assert shown["at_start"]["pause_free_share"] == 0.05


def test_a_change_is_answered_with_who_made_it_and_when_it_goes_back(office: Office) -> None:
    steer(office)
    me = Author("admin", "10.1.2.3")
    status, told = office.ask(ChangeThrottle({"prefill_spread_steps": 4}, me, 60.0))
    assert status == 200 and told["prefill_spread_steps"] == 4
    assert told["change"]["by"] == {"key": "admin", "client": "10.1.2.3"}
    assert told["change"]["before"] == {"prefill_spread_steps": 8}
    assert abs(told["change"]["at_unix_s"] - unix_s(office.now_s)) < 1.0
    assert told["revert"] == {"in_s": 60.0, "to": {"prefill_spread_steps": 8}}
    assert told["history"] == [told["change"]]
    status, undone = office.ask(UndoThrottle(me))
    assert (status, undone["prefill_spread_steps"]) == (200, 8)
    assert [one["cause"] for one in undone["history"]] == ["operator", "undo"]
    assert message(office.ask(ChangeThrottle({"prefill_spread_steps": 0}, me))) == (
        400,
        "prefill_spread_steps is 0; it must be between 1 and 1024",
    )
