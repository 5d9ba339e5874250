"""Errors of a request to a server. Each names the endpoint, the failure, rank and replica."""

from __future__ import annotations


class ServerError(RuntimeError):
    """A request to a server that did not succeed.

    Attributes:
        endpoint: URL of the request. "" only while Ray unpickles the error.
        status: HTTP status of the reply, or None if there was none.
        message: the server's message, or the reason why there was no reply.
        rank: the trainer's rank, or None outside of a trainer.
        replica: number of the rollout replica, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        endpoint: str = "",
        status: int | None = None,
        rank: int | None = None,
        replica: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.endpoint = endpoint
        self.status = status
        self.rank = rank
        self.replica = replica

    def __str__(self) -> str:
        who = [
            f"{name} {number}"
            for name, number in (("rank", self.rank), ("replica", self.replica))
            if number is not None
        ]
        status = [] if self.status is None else [f"HTTP {self.status}"]
        return ": ".join([*([", ".join(who)] if who else []), self.endpoint, *status, self.message])


class ServerUnreachable(ServerError):
    """No connection: nothing was executed."""


class ReplyLost(ServerError):
    """No complete reply in time. The request may have been executed."""


class NotAuthorized(ServerError):
    """The server refused the API key, or wants one: 401 or 403."""


class RequestFailed(ServerError):
    """The server answered that the operation failed."""


class RouterError(ServerError):
    """A failed request to SGLang's router. The message names router and server."""
