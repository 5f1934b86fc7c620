"""`/pipeline/...`: the HTTP routes by which operators look at the pipeline and change it.

Bodies are checked here; the scheduler process decides what can be done
(`front/operator_replies.py`). They need the key that upstream's administrative routes need:
`--admin-api-key` where it is set, else `--api-key` where it is set. Explaining a request needs the
key that requests need.
"""

from typing import Annotated, Any

import msgspec
from fastapi import Depends
from msgspec import Meta
from sglang.srt.entrypoints.http_server import validate_json_request
from sglang.srt.utils.auth import AuthLevel, auth_level
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from sgl_pipeline.errors import RequestError
from sgl_pipeline.managers.channels.operator_channel import (
    ChangeThrottle,
    ExplainRequest,
    MoveLayers,
    OperatorAnswer,
    OperatorClient,
    Question,
    ShowPlan,
    ShowRecentWork,
    ShowThrottle,
    UndoMove,
)
from sgl_pipeline.managers.entrance.error_reply import error_reply, reply_to
from sgl_pipeline.managers.entrance.throttle_body import ServerKeys, ThrottleBody, read_body
from sgl_pipeline.managers.entrance.tuning import HOW_TO_TUNE, TuneBody, Tuner
from sgl_pipeline.managers.reports.tune_report import describe_window
from sgl_pipeline.pipeline.recent_load import RecentWork
from sgl_pipeline.records.throttle_change import Author

ANSWER_TIMEOUT_S = 10.0
# Added to the time that stages have to get ready, because the work behind the switch has no bound.
SWITCH_TIMEOUT_S = 30.0
MAX_STAGES = 256
_HOW_TO_ASK = (
    'send {"layer_counts": [...]} with the layers of each stage, or {"undo": true}; '
    '"preview": true predicts and moves nothing'
)


class PlanChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /pipeline/plan."""

    layer_counts: (
        Annotated[
            tuple[Annotated[int, Meta(ge=0, le=1_000_000)], ...],
            Meta(min_length=1, max_length=MAX_STAGES),
        ]
        | None
    ) = None
    undo: bool = False
    preview: bool = False

    def question(self) -> MoveLayers | UndoMove:
        """The question to ask. Raises RequestError unless one of the two changes is named."""
        if self.undo == (self.layer_counts is not None):
            both = "both" if self.undo else "neither"
            raise RequestError(f"{both} of layer_counts and undo is given; {_HOW_TO_ASK}")
        if self.layer_counts is not None:
            return MoveLayers(self.layer_counts, self.preview)
        return UndoMove(self.preview)


def add_pipeline_routes(
    app: Any, address: str, move_timeout_s: float, keys: ServerKeys | None = None
) -> None:
    """Adds the routes to upstream's FastAPI application, before it is started.

    Args:
        address: of the scheduler process's socket (`operator_channel.operator_address`).
        move_timeout_s: seconds that stages may take to get ready for a move.
        keys: the keys that upstream will ask for; None: no key.
    """
    routes = _PipelineRoutes(OperatorClient(address), move_timeout_s, keys or ServerKeys())
    for method, path, handler in (
        ("POST", "/pipeline/tune", routes.tune_throttle),
        ("GET", "/pipeline/throttle", routes.show_throttle),
        ("PATCH", "/pipeline/throttle", routes.change_throttle),
        ("GET", "/pipeline/explain/{rid:path}", routes.explain_request),
        ("GET", "/pipeline/plan", routes.show_plan),
        ("POST", "/pipeline/plan", routes.change_plan),
    ):
        has_body = method != "GET"
        app.add_api_route(
            path,
            handler,
            methods=[method],
            response_model=None,
            dependencies=[Depends(validate_json_request)] if has_body else None,
        )


class _PipelineRoutes:
    """The handlers of the routes. A client that leaves changes nothing: a move that has begun goes
    on."""

    def __init__(self, operators: OperatorClient, move_timeout_s: float, keys: ServerKeys) -> None:
        self._operators = operators
        self._keys = keys
        self._tuner = Tuner()
        self._move_timeout_s = move_timeout_s

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def show_plan(self) -> Response:
        """The layer split in use, its stages' use of time, and the moves so far."""
        return await self._ask(ShowPlan(), ANSWER_TIMEOUT_S)

    async def explain_request(self, rid: str) -> Response:
        """Explains why a request waits: the rule, its numbers, the request before it, and when it
        will run."""
        return await self._ask(ExplainRequest(rid), ANSWER_TIMEOUT_S)

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def show_throttle(self) -> Response:
        """The knobs of the throttle, their ranges, and past changes with their authors."""
        return await self._ask(ShowThrottle(), ANSWER_TIMEOUT_S)

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def change_throttle(self, request: Request) -> Response:
        """Changes knobs between two steps, for good or for some time."""
        try:
            body = read_body(await _body_of(request), ThrottleBody)
            question = body.question(self._keys.author_of(request))
        except RequestError as error:
            return reply_to(error)
        return await self._ask(question, ANSWER_TIMEOUT_S)

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def tune_throttle(self, request: Request) -> Response:
        """Proposes knobs for latencies, by running the last minutes again in the simulator."""
        # This goes on when the client leaves, and applies the proposal if that was asked.
        author = self._keys.author_of(request)
        try:
            body = read_body(await _body_of(request), TuneBody, HOW_TO_TUNE)
            body.check()
            self._tuner.begin()
        except RequestError as error:
            return reply_to(error)
        try:
            return await self._tune(body, author)
        except RequestError as error:
            return reply_to(error)
        finally:
            self._tuner.end()

    async def _tune(self, body: TuneBody, author: Author) -> Response:
        """Raises RequestError if nothing can be proposed."""
        work = await self._operators.ask(ShowRecentWork(body.window_s), ANSWER_TIMEOUT_S)
        if work is None:
            return _no_answer(ANSWER_TIMEOUT_S)
        if work.status != 200:
            return _json(work)
        recent = msgspec.msgpack.decode(work.body, type=RecentWork)
        policy = str(recent.knobs["policy"])
        proposal = msgspec.msgpack.decode(await self._tuner.run(body, work.body, policy))
        reply: dict[str, Any] = {"target": {"ttft_ms": body.ttft_ms, "tpot_ms": body.tpot_ms}}
        reply |= describe_window(recent, body.ttft_ms, body.tpot_ms) | proposal
        reply["applied"] = None
        if body.apply and proposal["knobs"]:
            question = ChangeThrottle(proposal["knobs"], author, body.revert_after_s, "tune")
            answer = await self._operators.ask(question, ANSWER_TIMEOUT_S)
            if answer is None:
                return _no_answer(ANSWER_TIMEOUT_S)
            reply["applied"] = msgspec.json.decode(answer.body)
        return Response(msgspec.json.encode(reply), media_type="application/json")

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def change_plan(self, request: Request) -> Response:
        """Moves layers between stages, or predicts the effect."""
        try:
            question = read_body(await _body_of(request), PlanChange, _HOW_TO_ASK).question()
        except RequestError as error:
            return reply_to(error)
        if question.preview:
            return await self._ask(question, ANSWER_TIMEOUT_S)
        return await self._ask(question, self._move_timeout_s + SWITCH_TIMEOUT_S)

    async def _ask(self, question: Question, timeout_s: float) -> Response:
        try:
            answer = await self._operators.ask(question, timeout_s)
        except RequestError as error:
            return reply_to(error)
        return _no_answer(timeout_s) if answer is None else _json(answer)


async def _body_of(request: Request) -> bytes:
    """The whole body. Raises RequestError where the client has left."""
    try:
        return await request.body()
    except ClientDisconnect as error:
        raise RequestError("the client has left") from error


def _json(answer: OperatorAnswer) -> Response:
    return Response(answer.body, answer.status, media_type="application/json")


def _no_answer(timeout_s: float) -> Response:
    return error_reply(
        f"the scheduler has not answered within {timeout_s:g} s; a move that has begun goes on, "
        "and GET /pipeline/plan shows how it ends",
        504,
    )
