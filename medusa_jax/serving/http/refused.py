"""Errors of calls without an answer, in the form that OpenAI's clients expect."""

from typing import Any


class Refused(Exception):
    """A call that gets no answer.

    Attributes:
      status: of HTTP.
      param: the field that is to blame, if one is.
      code: a name for programs.
      retry_after: seconds to wait before trying again; 0: trying again is of no use.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int = 0,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The JSON object that is sent."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        about = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": about}
