"""What a stage cost, on its way from the engine to the reply over HTTP."""

import asyncio
import json

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from sglang_loader.common.stage_costs import joined, stage_costs_in
from sglang_loader.hooks.http import install_middleware, leave_costs

COSTS = {"weights": {"seconds": [0.5], "gpu_bytes": [3], "host_bytes": [2]}}


def application(status=200, costs=COSTS):
    """Answers `null` as SGLang's endpoints do, or an error."""

    async def endpoint(request):
        leave_costs(request, costs)
        return JSONResponse(None if status == 200 else {"error": "no"}, status_code=status)

    paths = ("/release_memory_occupation", "/resume_memory_occupation", "/generate")
    app = Starlette(routes=[Route(path, endpoint, methods=["POST"]) for path in paths])
    for _ in range(2):
        install_middleware(app)
    assert len(app.user_middleware) == 1
    return app


def post(app, path):
    """Status, decoded body, and the length that the headers tell."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [],
        "query_string": b"",
        "http_version": "1.1",
    }
    asyncio.run(app(scope, receive, send))
    body = b"".join(message.get("body", b"") for message in sent[1:])
    length = int(dict(sent[0]["headers"])[b"content-length"])
    assert length == len(body)
    return sent[0]["status"], json.loads(body)


@pytest.mark.parametrize("path", ("/release_memory_occupation", "/resume_memory_occupation"))
def test_a_stages_reply_carries_its_costs(path):
    status, content = post(application(), path)
    assert (status, content) == (200, {"stages": COSTS})
    assert stage_costs_in(content) == COSTS


@pytest.mark.parametrize(
    ("status", "costs", "path", "body"),
    (
        (400, COSTS, "/release_memory_occupation", {"error": "no"}),
        (200, {}, "/release_memory_occupation", None),
        (200, COSTS, "/generate", None),
    ),
    ids=("refused", "nothing to do", "another endpoint"),
)
def test_other_replies_stay_as_they_are(status, costs, path, body):
    assert post(application(status, costs), path) == (status, body)
    assert stage_costs_in(body) == {}


def test_costs_without_a_request_are_dropped():
    leave_costs(None, COSTS)


def test_replies_of_several_groups_are_joined():
    assert joined([COSTS, {}, COSTS])["weights"]["gpu_bytes"] == [3, 3]
    assert joined([]) == {}
