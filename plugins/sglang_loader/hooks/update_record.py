"""Which update request is the next one, which is a repetition, and which may not run at all.

Pure bookkeeping of one server: the sync in progress, its last request with the reply, and the ids
of syncs that are over. A sync's requests run one after another, each once; a failed one ends it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from sglang_loader.common.update_keys import UpdateKey

MAX_PAST_SYNCS = 1024


class KeyConflict(RuntimeError):
    """The request must not run: it is out of order, of an older sync, or comes after a failure."""


@dataclass(frozen=True)
class Reply:
    """A reply as it goes over HTTP, kept for repetitions."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


@dataclass
class UpdateEntry:
    """One request that runs or has run.

    Attributes:
        key: its name.
        digest: of its body.
        reply: None while it runs.
        finished: set with the reply.
    """

    key: UpdateKey
    digest: bytes
    reply: Reply | None = None
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    def finish(self, reply: Reply) -> None:
        """Keep the reply and wake everyone who waits for it."""
        self.reply = reply
        self.finished.set()


class UpdateRecord:
    """The record of one server; bounded: one entry, and the ids of `MAX_PAST_SYNCS` syncs."""

    def __init__(self) -> None:
        self._last: UpdateEntry | None = None
        self._past: OrderedDict[str, None] = OrderedDict()

    def find(self, key: UpdateKey) -> UpdateEntry | None:
        """The entry if `key` repeats the last request, None if it may run now.

        Raises:
            KeyConflict: neither; the message says what was expected.
        """
        last = self._last
        if last is None or key.sync_id != last.key.sync_id:
            if key.sync_id in self._past:
                raise KeyConflict(f"sync {key.sync_id} is over: a later one has started")
            if key.sequence != 0:
                raise KeyConflict(
                    f"update {key.sequence} of sync {key.sync_id}, of which this server has seen "
                    "none: a sync starts with update 0"
                )
            return None
        if key.sequence == last.key.sequence:
            return last
        if key.sequence != last.key.sequence + 1:
            raise KeyConflict(
                f"update {key.sequence} of sync {key.sync_id} is out of order: expected "
                f"{last.key.sequence + 1}, or a repetition of {last.key.sequence}"
            )
        if last.reply is None:
            raise KeyConflict(f"update {last.key.sequence} of sync {key.sync_id} is still running")
        if last.reply.status >= 400:
            raise KeyConflict(
                f"update {last.key.sequence} of sync {key.sync_id} failed: start a new sync"
            )
        return None

    def begin(self, key: UpdateKey, digest: bytes) -> UpdateEntry:
        """Enter a request that is about to run; `find` has just returned None for it."""
        if self._last is not None and self._last.key.sync_id != key.sync_id:
            self._past[self._last.key.sync_id] = None
            while len(self._past) > MAX_PAST_SYNCS:
                self._past.popitem(last=False)
        self._last = UpdateEntry(key, digest)
        return self._last
