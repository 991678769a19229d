"""What goes wrong, in OpenAI's form: `{"error": {"message", "type", "param", "code"}}` and an HTTP status."""

import json
import logging
import traceback
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response

from headrace.errors import HeadraceError, OverloadedError, RequestError

logger = logging.getLogger(__name__)


class ApiError(Exception):
    """An error with its HTTP status. `param` names the field of the request at fault, `code` the kind of error.

    closes: the connection is of no more use, as there is unread data on it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        closes: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = (headers or {}) | ({"connection": "close"} if closes else {})

    @property
    def kind(self) -> str:
        return "invalid_request_error" if self.status < 500 else "server_error"

    @property
    def reason(self) -> str:
        """What it is counted as."""
        return self.code or self.kind

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


def to_json(content: Any) -> bytes:
    # A lone surrogate, which an error message may quote from the request, cannot be UTF-8; it becomes '?'.
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


def error_response(error: ApiError) -> JsonResponse:
    return JsonResponse(error.body(), error.status, error.headers)


def as_api_error(error: Exception, request_id: str) -> ApiError:
    """Any exception as an ApiError. What no one foresaw is a 500: the log has its traceback under the request's id."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), param=error.param)
        case OverloadedError():
            # Who has not waited yet should send less; who has waited in vain has met a server that is too slow.
            status, code = (503, "queue_timeout") if error.has_waited else (429, "queue_full")
            return ApiError(status, str(error), code=code, headers={"retry-after": str(error.retry_after)})
        case HTTPException(status_code=404):
            return ApiError(404, "there is no such route; the API is under /v1", code="unknown_url")
        case HTTPException(status_code=405):
            allowed = Headers(error.headers).get("allow", "")
            message = f"this route does not take this method, only {allowed}"
            return ApiError(405, message, code="method_not_allowed", headers={"allow": allowed})
        case HTTPException():
            return ApiError(error.status_code, str(error.detail))
        case HeadraceError():
            return ApiError(503, str(error))
    # Not the error's own text, which may quote what the client said.
    where = "".join(traceback.format_tb(error.__traceback__))
    logger.error("a %s ended a request:\n%s", type(error).__name__, where, extra={"request_id": request_id})
    return ApiError(500, f"an internal error; the server's log tells more of request {request_id}")
