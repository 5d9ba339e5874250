"""Plain HTTP to an SGLang server: memory stages and greedy generation."""

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

PROMPT = "The weights of this model are random, and so"


class Reply(NamedTuple):
    """An HTTP reply; status 0: none came within the limit."""

    status: int
    text: str


def open_url(url: str, body: bytes | None, limit_s: float) -> Any:
    """The reply as it comes; a POST if there is a body."""
    call = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    return urllib.request.urlopen(call, timeout=limit_s)


def request(url: str, body: bytes | None = None, *, limit_s: float = 120) -> Reply:
    try:
        with open_url(url, body, limit_s) as reply:
            return Reply(reply.status, reply.read().decode(errors="replace"))
    except urllib.error.HTTPError as error:
        return Reply(error.code, error.read().decode(errors="replace"))
    except (OSError, http.client.HTTPException) as error:
        return Reply(0, repr(error))


def post(url: str, endpoint: str, payload: dict[str, Any]) -> Reply:
    return request(f"{url}/{endpoint}", json.dumps(payload).encode())


def get(url: str, endpoint: str) -> Reply:
    return request(f"{url}/{endpoint}")


def release(url: str, *tags: str) -> Reply:
    return post(url, "release_memory_occupation", {"tags": list(tags)})


def resume(url: str, *tags: str) -> Reply:
    return post(url, "resume_memory_occupation", {"tags": list(tags)})


def greedy(num_tokens: int, prompt: str = PROMPT, **more: Any) -> dict[str, Any]:
    """The body of a request for greedy tokens."""
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    return {"text": prompt, "sampling_params": sampling, **more}


def generate(url: str, num_tokens: int = 24) -> list[list[float]]:
    """Greedy tokens with their log-probabilities: `[[logprob, token id], ...]`.

    The prefix cache is dropped first: with a prefix from it the last bits may differ.
    """
    flush(url)
    status, text = post(url, "generate", greedy(num_tokens, return_logprob=True))
    assert status == 200, text
    return tokens_in(text)


def tokens_in(text: str) -> list[list[float]]:
    """`[[logprob, token id], ...]` of an answer."""
    tokens = json.loads(text)["meta_info"]["output_token_logprobs"]
    return [[logprob, token] for logprob, token, _ in tokens]


def status_of_request(url: str) -> int:
    """HTTP status of a short request for tokens: 200 where the engine serves."""
    return post(url, "generate", greedy(2)).status


@contextlib.contextmanager
def answer_to(url: str, rid: str) -> Iterator[Future[Reply]]:
    """The answer to a request with an id, as soon as there is one."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(post, url, "generate", greedy(24, rid=rid, return_logprob=True))


def flush(url: str) -> None:
    """Drop the prefix cache, which SGLang refuses while the request before is being wound up."""
    deadline = time.monotonic() + 10
    while (reply := post(url, "flush_cache", {})).status != 200:
        assert time.monotonic() < deadline, reply
        time.sleep(0.1)


@contextlib.contextmanager
def paused_generation(url: str, num_tokens: int) -> Iterator[None]:
    """A request that has its first token, and is paused for the length of the block, so that it
    does not end while somebody waits for it. One that ended before its pause is made again.
    """
    body = json.dumps(greedy(num_tokens, stream=True)).encode()
    for _ in range(5):
        with open_url(f"{url}/generate", body, 120) as reply:
            assert reply.readline().startswith(b"data: ")
            assert post(url, "pause_generation", {"mode": "in_place"}).status == 200
            # SGLang flushes its cache only where no request runs.
            if runs := post(url, "flush_cache", {}).status != 200:
                yield
            assert post(url, "continue_generation", {}).status == 200
            assert b"[DONE]" in reply.read(), "the request did not come to its end"
        if runs:
            return
    raise AssertionError("each of 5 requests ended before its pause")
