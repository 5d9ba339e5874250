"""What must hold after every fault: a broken invariant raises `Violation`.

engine = StormEngine(served, models)
label = engine.served()        # the version that is served, proven bit for bit; None: it waits
stream = Stream(engine, prompt, 64); stream.start(); ...; stream.check()
"""

import http.client
import json
import threading
import time
import urllib.error
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from support.http_requests import Reply, flush, greedy, open_url, request
from support.served import Served
from support.storm_trainer import slot_of
from support.trainer import Hashes

NUM_TOKENS = 64
LOGPROB_TOLERANCE = 1e-3
PROBE_S = 4.0
REPLY_S = 10.0
PROMPTS = ("The weights of this model are random, and so", "One version, from its first token on")

Tokens = list[tuple[int, float]]
"""Greedy tokens with their log-probabilities."""


class Violation(Exception):
    """A broken invariant.

    Attributes:
        kind: "wrong weights", "mixed stream", "given up, yet served", "hang", "split ranks",
            "bad sync accepted", "not recovered", "engine died", "silent cut", "leak".
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


def _body(prompt: str, num_tokens: int, *, stream: bool = False) -> bytes:
    return json.dumps(greedy(num_tokens, prompt, return_logprob=True, stream=stream)).encode()


def _tokens_of(answer: dict[str, Any]) -> Tokens:
    logprobs = answer["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in logprobs] == answer["output_ids"][: len(logprobs)]
    return [(token, logprob) for logprob, token, _ in logprobs]


def num_equal(tokens: Tokens, reference: Tokens) -> int:
    """How many tokens, from the first on, are those of the reference."""
    pairs = zip(tokens, reference, strict=False)
    same = [t == u and abs(p - q) < LOGPROB_TOLERANCE for (t, p), (u, q) in pairs]
    return [*same, False].index(False)


class StormEngine:
    """The server as its users see it, and by version slot what it holds and answers.

    The references are made by SGLang's own `/update_weights_from_disk`, not by the code under test.
    """

    def __init__(self, engine: Served, models: list[Path]) -> None:
        self.server, self.url, self.pid = engine, engine.url, engine.process.pid
        self.hashes: list[Hashes] = []
        self.tokens: list[dict[str, Tokens]] = []
        for slot, model in enumerate(models):
            flush(self.url)  # else SGLang ends, if the request before is still being wound up
            body = {"model_path": str(model), "weight_version": str(slot), "flush_cache": True}
            loaded = self.post("update_weights_from_disk", json.dumps(body).encode())
            assert loaded.status == 200, loaded
            self.hashes.append(engine.hashes(REPLY_S))
            self.tokens.append({prompt: self._reference(prompt) for prompt in PROMPTS})
        assert len({str(hashes) for hashes in self.hashes}) == len(models)

    def _reference(self, prompt: str) -> Tokens:
        """Greedy tokens, with and without a cached prefix; both must agree."""
        replies = [self.post("generate", _body(prompt, NUM_TOKENS)) for _ in range(2)]
        first, second = (_tokens_of(json.loads(reply.text)) for reply in replies)
        assert num_equal(first, second) == NUM_TOKENS, "they depend on the prefix cache"
        return first

    def post(self, endpoint: str, body: bytes, *, limit_s: float = REPLY_S) -> Reply:
        """POST to the server itself."""
        return request(f"{self.url}/{endpoint}", body, limit_s=limit_s)

    def _answer(self, limit_s: float) -> tuple[str, Tokens] | None:
        """(prompt, its tokens) if a request is answered; None: it waits, or is refused."""
        prompt = PROMPTS[int(time.monotonic() * 1000) % len(PROMPTS)]
        reply = self.post("generate", _body(prompt, 8), limit_s=limit_s)
        if reply.status == 200:
            return prompt, _tokens_of(json.loads(reply.text))
        if reply.status in (0, 503):
            return None
        raise Violation("not recovered", f"/generate: {reply.status} {reply.text[:300]}")

    def served(self, *, limit_s: float = PROBE_S) -> str | None:
        """The label of what is served, proven to be that version; None: nothing is served.

        Args:
            limit_s: of the answer to a request, after which nothing is served.
        """
        for _ in range(5):
            label, answer = self.server.version, self._answer(limit_s)
            if answer is None:
                return None
            found = self.server.hashes(REPLY_S)
            if self.server.version == label:
                break
            time.sleep(0.2)
        else:
            raise Violation("wrong weights", "the version changes all the time")
        if not label.isdigit():
            raise Violation("wrong weights", f"serves version {label!r}, which nobody published")
        slot, (prompt, tokens) = slot_of(label), answer
        if found != self.hashes[slot]:
            raise Violation("wrong weights", f"reports {label}, holds {self._described(found)}")
        if num_equal(tokens, self.tokens[slot][prompt]) < len(tokens):
            raise Violation("wrong weights", f"version {label} answered {tokens}")
        return label

    def _described(self, found: Hashes) -> str:
        """By TP rank, how many tensors are those of each version, and which of none."""
        ranks = []
        for rank, hashes in enumerate(found):
            known = [reference[rank] for reference in self.hashes]
            counts = [sum(hashes[n] == k[n] for n in hashes) for k in known]
            strange = [n for n in hashes if all(hashes[n] != k[n] for k in known)]
            ranks.append(f"rank {rank}: tensors by slot {counts}, of none {strange[:4]}")
        return "; ".join(ranks)

    def processes(self) -> list[psutil.Process]:
        """The server's processes."""
        try:
            root = psutil.Process(self.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def resources(self) -> dict[str, int]:
        """Open files, threads and resident MB of all the server's processes."""
        processes = self.processes()
        return {
            "fds": sum(each.num_fds() for each in processes),
            "threads": sum(each.num_threads() for each in processes),
            "rss_mb": sum(each.memory_info().rss >> 20 for each in processes),
        }


class Stream(threading.Thread):
    """A user's streamed request; `check` says whether one version answered it."""

    def __init__(self, url: str, prompt: str, num_tokens: int) -> None:
        super().__init__(daemon=True)
        self._url, self.prompt, self._num_tokens = url, prompt, num_tokens
        self.tokens: Tokens = []
        self._finish: dict[str, Any] = {}
        self._status, self._error, self._is_done = 0, "", False

    def run(self) -> None:
        """Send the request and read to the end."""
        body = _body(self.prompt, self._num_tokens, stream=True)
        try:
            with open_url(f"{self._url}/generate", body, 30) as reply:
                self._status = reply.status
                for line in reply:
                    self._read(line.decode().removeprefix("data: ").strip())
        except urllib.error.HTTPError as error:
            self._status = error.code
        except (OSError, http.client.HTTPException) as error:
            self._error = repr(error)

    def _read(self, data: str) -> None:
        self._is_done |= data == "[DONE]"
        if data.startswith("{"):
            answer = json.loads(data)
            if "error" in answer:
                self._finish = {"type": "error", **answer}
                return
            self.tokens = _tokens_of(answer)
            self._finish = answer["meta_info"]["finish_reason"] or self._finish

    def check(self, versions: Sequence[Mapping[str, Tokens]], *, may_be_cut: bool = False) -> None:
        """One version gave all tokens; fewer than asked for are explained.

        Args:
            versions: what each answers to the prompt.
            may_be_cut: the engine was killed meanwhile: nobody is left to explain it.

        Raises:
            Violation: neither.
        """
        self.join(60)
        if self.is_alive():
            raise Violation("hang", f"a stream does not end; {len(self.tokens)} tokens came")
        equal = [num_equal(self.tokens, known[self.prompt]) for known in versions]
        if max(equal) < len(self.tokens):
            raise Violation("mixed stream", f"follows the versions for {equal} tokens: {self}")
        is_explained = self._status >= 400 or self._finish.get("type") in ("abort", "error")
        if not (self.is_whole or is_explained or self._error or may_be_cut):
            raise Violation("silent cut", str(self))

    @property
    def is_whole(self) -> bool:
        """True if all tokens that were asked for have come."""
        return self._is_done and len(self.tokens) == self._num_tokens

    def __repr__(self) -> str:
        state = self._status, len(self.tokens), self._finish, self._error, self._is_done
        return f"stream of {self._num_tokens}: (status, tokens, finish, error, done) = {state}"


def shared_memory() -> dict[Path, int]:
    """Files of torch's shared memory on this host, and by their names, who has made them."""
    named = [(path, path.name.split("_")[1]) for path in Path("/dev/shm").glob("torch_*")]
    return {path: int(pid) for path, pid in named if pid.isdigit()}


def strays(folder: Path) -> list[str]:
    """Processes whose environment names the storm's folder, or whose output goes there.

    A fork's environment is the one that it was forked with; of what it executes, it is its own.
    """
    found = []
    for process in psutil.process_iter(["pid", "name"]):
        entry = Path(f"/proc/{process.pid}")
        try:
            is_told = str(folder).encode() in (entry / "environ").read_bytes()
            if is_told or (entry / "fd" / "1").readlink().is_relative_to(folder):
                found.append(f"{process.pid} {process.info['name']}")
        except OSError:
            continue
    return found
