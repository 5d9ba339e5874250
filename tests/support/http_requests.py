"""Plain HTTP to an SGLang server: memory stages and greedy generation."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

PROMPT = "The weights of this model are random, and so"


def post(url: str, endpoint: str, payload: dict[str, Any]) -> tuple[int, str]:
    """Status and text of the reply, whatever the status."""
    request = urllib.request.Request(
        f"{url}/{endpoint}",
        json.dumps(payload).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def get(url: str, endpoint: str) -> tuple[int, str]:
    """Status and text of the reply, whatever the status."""
    try:
        with urllib.request.urlopen(f"{url}/{endpoint}", timeout=120) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def release(url: str, *tags: str) -> tuple[int, str]:
    """Ask the server to release the memory of `tags`."""
    return post(url, "release_memory_occupation", {"tags": list(tags)})


def resume(url: str, *tags: str) -> tuple[int, str]:
    """Ask the server to resume the memory of `tags`."""
    return post(url, "resume_memory_occupation", {"tags": list(tags)})


def generate(url: str, num_tokens: int = 24) -> list[list[float]]:
    """Greedy tokens with their log-probabilities: `[[logprob, token id], ...]`.

    The prefix cache is dropped first: with a prefix from it the last bits may differ.
    """
    _flush(url)
    status, text = post(url, "generate", _greedy(num_tokens))
    assert status == 200, text
    tokens = json.loads(text)["meta_info"]["output_token_logprobs"]
    return [[logprob, token] for logprob, token, _ in tokens]


@contextlib.contextmanager
def answer_to(url: str, rid: str) -> Iterator[Future[tuple[int, str]]]:
    """Status and text of the answer to a request with an id, as soon as there is one."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(post, url, "generate", {**_greedy(24), "rid": rid})


def _flush(url: str, timeout_s: float = 10) -> None:
    """Drop the prefix cache, which SGLang refuses while the request before is being wound up."""
    deadline = time.monotonic() + timeout_s
    while (reply := post(url, "flush_cache", {}))[0] != 200:
        assert time.monotonic() < deadline, reply
        time.sleep(0.1)


def _greedy(num_tokens: int) -> dict[str, Any]:
    return {
        "text": PROMPT,
        "sampling_params": {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True},
        "return_logprob": True,
    }


@contextlib.contextmanager
def running_generation(url: str, num_tokens: int) -> Iterator[None]:
    """A request that has its first token when the block starts and ends with the block."""
    payload = {
        "text": PROMPT,
        "sampling_params": {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True},
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(payload).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        assert reply.readline().startswith(b"data: ")
        yield
        assert b"[DONE]" in reply.read(), "the request did not come to its end"
