"""An engine whose replies to updates are bad or lost, and a request with such a reply."""

from concurrent.futures import Future

from verl_sglang_sync.engine.engine_ranks import OpeningRequest
from verl_sglang_sync.engine.server_client.errors import ReplyLost, RequestFailed

BAD = RequestFailed("the engine is out of memory", endpoint="http://h:1/update", status=400)
LOST = ReplyLost("the reply was lost", endpoint="http://h:1/update")


class FailsReplies:
    """An `Engine` whose reply is `error`, at once."""

    def __init__(self, error):
        self._error = error

    def submit(self, call):
        """Fails at once."""
        reply = Future()
        reply.set_exception(self._error)
        return reply


def failed_request(error):
    """It has left, and this is its reply."""
    request = OpeningRequest(FailsReplies(error), "1")
    request.post([b"a descriptor"])
    return request
