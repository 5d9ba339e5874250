"""What must hold after every fault: one place for the storm's invariants and its findings.

    engine = StormEngine(served, models)
    served = engine.served()        # the version that is served, proven bit for bit; None: it waits
    stream = Stream(engine.url, prompt).start(); ...; stream.check(engine.references)

A broken invariant raises `Violation`, with a kind that the report counts by.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from support.engine_loaders import HASH_LOADER
from support.http_requests import Reply, greedy, open_url, request
from support.served import Served
from support.storm_trainer import slot_of
from support.trainer import Hashes, read_hashes, run_loader
from verl_sglang_sync.engine.server_client import SGLangServerClient

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


def _generate_body(prompt: str, num_tokens: int, *, stream: bool) -> bytes:
    body = greedy(num_tokens, prompt, return_logprob=True, stream=stream)
    return json.dumps(body).encode()


def _tokens_of(answer: dict[str, Any]) -> Tokens:
    logprobs = answer["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in logprobs] == answer["output_ids"][: len(logprobs)]
    return [(token, logprob) for logprob, token, _ in logprobs]


def equal(tokens: Tokens, reference: Tokens) -> bool:
    """True if `tokens` are how the reference begins."""
    return len(tokens) <= len(reference) and all(
        token == wanted and abs(logprob - expected) < LOGPROB_TOLERANCE
        for (token, logprob), (wanted, expected) in zip(tokens, reference, strict=False)
    )


@dataclass
class References:
    """By version slot: every TP rank's hashes, and each prompt's greedy tokens."""

    hashes: list[Hashes] = field(default_factory=list)
    tokens: list[dict[str, Tokens]] = field(default_factory=list)


class StormEngine:
    """The server as its users see it, and the references of all versions.

    The references are made by SGLang's own `/update_weights_from_disk`, not by the code under test.
    """

    def __init__(self, served: Served, models: list[Path]) -> None:
        self.server, self.url = served.server, served.url
        self._engine = served
        self._client = SGLangServerClient(self.url, timeout_s=REPLY_S)
        self.references = References()
        for slot, model in enumerate(models):
            body = {"model_path": str(model), "weight_version": str(slot), "flush_cache": True}
            loaded = self.post("update_weights_from_disk", json.dumps(body).encode())
            assert loaded.status == 200, loaded
            self.references.hashes.append(self.hashes())
            self.references.tokens.append({prompt: self._generate(prompt) for prompt in PROMPTS})
        assert len({str(hashes) for hashes in self.references.hashes}) == len(models)

    def post(self, endpoint: str, body: bytes, *, limit_s: float = REPLY_S) -> Reply:
        """POST to the server itself."""
        return request(f"{self.url}/{endpoint}", body, limit_s=limit_s)

    def _generate(self, prompt: str) -> Tokens:
        """Greedy tokens, with and without a cached prefix; both must agree."""
        answers = []
        for _ in range(2):
            reply = self.post("generate", _generate_body(prompt, NUM_TOKENS, stream=False))
            answers.append(_tokens_of(json.loads(reply.text)))
        assert equal(*answers), "greedy tokens depend on the prefix cache"
        return answers[0]

    def label(self) -> str:
        """The version that `/model_info` reports."""
        reply = request(f"{self.url}/model_info", limit_s=REPLY_S)
        self.must_live()
        if reply.status != 200:
            raise Violation("hang", f"/model_info: {reply}")
        return str(json.loads(reply.text)["weight_version"])

    def must_live(self) -> None:
        """Raise a violation with the end of the log if the server is gone."""
        if self.server.process.poll() is not None:
            log = self.server.log.read_text(errors="replace")
            cause = log.rfind("Traceback (most recent call last)")
            raise Violation("engine died", f"{self.server.log}: {log[cause:][:2000]}")

    def hashes(self) -> Hashes:
        """Of every tensor on every TP rank, taken in the engine's processes."""
        folder, tp = self._engine.folder, self._engine.tp
        for rank in range(tp):
            (folder / f"rank{rank}.json").unlink(missing_ok=True)
        run_loader(self._client, tp, HASH_LOADER, str(folder))
        return read_hashes(folder, tp)

    def serves(self, limit_s: float = PROBE_S) -> tuple[str, Tokens] | None:
        """(prompt, its tokens) if a request is answered; None: it waits, or is refused."""
        prompt = PROMPTS[int(time.monotonic() * 1000) % len(PROMPTS)]
        reply = self.post("generate", _generate_body(prompt, 8, stream=False), limit_s=limit_s)
        self.must_live()
        if reply.status == 200:
            return prompt, _tokens_of(json.loads(reply.text))
        if reply.status in (0, 503):
            return None
        raise Violation("not recovered", f"/generate: {reply.status} {reply.text[:300]}")

    def served(self) -> str | None:
        """The label of what is served, proven to be that version; None: nothing is served."""
        for _ in range(5):
            before = self.label()
            answer = self.serves()
            if answer is None:
                return None
            found = self._hashes_or_raise()
            if self.label() == before:
                break
            time.sleep(0.2)
        else:
            raise Violation("wrong weights", "the version changes all the time")
        if not before.isdigit():
            raise Violation("wrong weights", f"serves version {before!r}, which nobody published")
        slot = slot_of(before)
        if found != self.references.hashes[slot]:
            raise Violation("wrong weights", f"reports {before}, holds {self._described(found)}")
        prompt, tokens = answer
        if not equal(tokens, self.references.tokens[slot][prompt]):
            raise Violation("wrong weights", f"version {before} answered {tokens}")
        return before

    def _hashes_or_raise(self) -> Hashes:
        try:
            return self.hashes()
        except Exception as error:
            raise Violation("hang", f"it generates, and gives no hashes: {error}") from error

    def _described(self, found: Hashes) -> str:
        """By TP rank, how many tensors are those of each version, and of none."""
        ranks = []
        for rank, hashes in enumerate(found):
            known = [reference[rank] for reference in self.references.hashes]
            counts = [sum(hashes[n] == k[n] for n in hashes) for k in known]
            strange = [n for n in hashes if all(hashes[n] != k[n] for k in known)]
            ranks.append(f"rank {rank}: tensors by slot {counts}, of none {strange[:4]}")
        return "; ".join(ranks)

    def processes(self) -> list[psutil.Process]:
        """The server's processes."""
        try:
            root = psutil.Process(self.server.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def schedulers(self) -> list[int]:
        """Pids of the processes that load weights, one for each TP rank."""
        return self._engine.schedulers

    def resources(self) -> dict[str, int]:
        """Open files, threads and resident MB of all the server's processes."""
        total = {"fds": 0, "threads": 0, "rss_mb": 0}
        for process in self.processes():
            total["fds"] += process.num_fds()
            total["threads"] += process.num_threads()
            total["rss_mb"] += process.memory_info().rss >> 20
        return total


class Stream(threading.Thread):
    """A user's streamed request; `check` says whether one version answered it."""

    def __init__(self, url: str, prompt: str, num_tokens: int) -> None:
        super().__init__(daemon=True)
        self._url, self._prompt, self._num_tokens = url, prompt, num_tokens
        self._tokens: Tokens = []
        self._finish: dict[str, Any] | None = None
        self._status, self._error, self._is_done = 0, "", False

    def run(self) -> None:
        """Send the request and read to the end."""
        body = _generate_body(self._prompt, self._num_tokens, stream=True)
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
        if data == "[DONE]":
            self._is_done = True
        elif data:
            answer = json.loads(data)
            if "error" in answer:
                self._finish = {"type": "error", **answer}
                return
            self._tokens = _tokens_of(answer)
            self._finish = answer["meta_info"]["finish_reason"] or self._finish

    def check(self, references: References, *, may_be_cut: bool = False) -> None:
        """One version gave all tokens; fewer than asked for are explained.

        Args:
            references: of all versions.
            may_be_cut: the engine was killed meanwhile: nobody is left to explain it.

        Raises:
            Violation: neither.
        """
        self.join(60)
        if self.is_alive():
            raise Violation("hang", f"a stream does not end; {len(self._tokens)} tokens came")
        known = [tokens[self._prompt] for tokens in references.tokens]
        if not any(equal(self._tokens, reference) for reference in known):
            held = [
                next(i for i in range(len(self._tokens)) if not equal(self._tokens[: i + 1], k))
                for k in known
            ]
            raise Violation("mixed stream", f"follows the versions for {held} tokens: {self}")
        is_whole = self._is_done and len(self._tokens) == self._num_tokens
        is_explained = self._status >= 400 or (self._finish or {}).get("type") in ("abort", "error")
        if not (is_whole or is_explained or self._error or may_be_cut):
            raise Violation("silent cut", str(self))

    def __repr__(self) -> str:
        state = self._status, len(self._tokens), self._finish, self._error, self._is_done
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
                found.append(f"{process.pid} {process.name()}")
        except OSError:
            continue
    return found
