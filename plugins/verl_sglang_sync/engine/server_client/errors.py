"""Errors of a request to a server; each names the endpoint, the failure, rank and replica."""

from __future__ import annotations

from typing import Any


class ServerError(RuntimeError):
    """A request to a server did not succeed.

    Attributes:
        endpoint: URL of the request.
        status: HTTP status of the reply; None if there was none.
        message: the server's message, or what happened instead of a reply.
        rank: the trainer's rank that asked; None outside of a trainer.
        replica: the rollout replica that was asked.
    """

    def __init__(
        self,
        message: str,
        *,
        endpoint: str,
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

    def __reduce__(self) -> tuple[Any, ...]:  # Ray pickles errors; keywords would be lost
        return _rebuild, (type(self), self.message, {**self.__dict__})


def _rebuild(kind: type[ServerError], message: str, fields: dict[str, Any]) -> ServerError:
    error = kind(message, endpoint="")
    error.__dict__.update(fields)
    return error


class ServerUnreachable(ServerError):
    """No connection: nothing was executed."""


class ReplyLost(ServerError):
    """No whole reply came, in time or at all; the request may have been executed."""


class NotAuthorized(ServerError):
    """The server refused the API key, or wants one: 401 or 403."""


class RequestFailed(ServerError):
    """The server answered that the operation failed."""


class RouterError(ServerError):
    """SGLang's router did not do what it was asked; the message names router and server."""
