"""The reply to a request that our own routes and checks refuse, as upstream writes its errors."""

from http import HTTPStatus

from starlette.responses import JSONResponse

from sgl_pipeline.errors import RequestError


def error_reply(message: str, status: int = HTTPStatus.BAD_REQUEST) -> JSONResponse:
    """A reply of `status` that says `message`."""
    return JSONResponse({"error": {"message": message}}, status)


def reply_to(error: RequestError) -> JSONResponse:
    """The reply that `error` asks for."""
    return error_reply(str(error), error.status_code)
