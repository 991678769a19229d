"""Errors whose message is meant for the user: one line that says what was wrong and what would be right.

The command line prints them after 'error:' without a traceback; the server turns a RequestError into a 4xx.
Anything else that is raised is a fault of Headrace.
"""


class HeadraceError(Exception):
    """Base of all errors that the user can act upon."""


class ConfigError(HeadraceError):
    """A setting is unknown, out of range, or asks for something that is not there."""


class ModelError(HeadraceError):
    """A model cannot be found, read or understood. The message names the file and the fault."""


class CapacityError(HeadraceError):
    """The machine is too small for what was asked; the message says what would fit."""


class RequestError(HeadraceError):
    """A request cannot be served as it stands. `param` names the field at fault, where there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class OverloadedError(HeadraceError):
    """There is more to do than fits, or a request has waited for too long; later there may be room.

    retry_after: seconds after which to try again. has_waited: whether the request was in the queue already.
    """

    def __init__(self, message: str, retry_after: int, *, has_waited: bool = False) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.has_waited = has_waited
