"""Names one update request, so that the server can tell a repetition from the next one.

A sync has a random id and numbers its update requests 0, 1, 2, ...; each carries both in the
header `Idempotency-Key` (IETF draft-ietf-httpapi-idempotency-key-header): `"<sync id>/<number>"`.
A server that keeps keys says so in the header `Idempotency-Supported` of its replies, and to
`OPTIONS` with a key.

    keys = UpdateKeys()
    next(keys), next(keys)      # UpdateKey("9f…", 0), UpdateKey("9f…", 1)
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

KEY_HEADER = "Idempotency-Key"
SUPPORTED_HEADER = "Idempotency-Supported"
REPLAYED_HEADER = "Idempotency-Replayed"

# Update requests are the only ones that may not simply be repeated.
KEYED_PATHS = ("/update_weights_from_tensor", "/update_weights_from_distributed")

_FORMAT = re.compile(r'"([A-Za-z0-9_-]{8,64})/(0|[1-9][0-9]{0,9})"')


@dataclass(frozen=True)
class UpdateKey:
    """One update request of one sync; `sequence` counts from 0 without a gap."""

    sync_id: str
    sequence: int

    @property
    def header(self) -> str:
        """The value of `Idempotency-Key`, a quoted string."""
        return f'"{self.sync_id}/{self.sequence}"'

    @classmethod
    def parse(cls, header: str) -> UpdateKey:
        """Read the header's value.

        Raises:
            ValueError: it is not one of our keys.
        """
        match = _FORMAT.fullmatch(header.strip())
        if match is None:
            raise ValueError(f'{KEY_HEADER}: {header!r}: expected "<sync id>/<sequence number>"')
        return cls(match[1], int(match[2]))


class UpdateKeys:
    """The keys of one sync, in order; an iterator without end."""

    def __init__(self) -> None:
        self._sync_id = secrets.token_hex(16)
        self._sequence = 0

    def __iter__(self) -> UpdateKeys:
        return self

    def __next__(self) -> UpdateKey:
        key = UpdateKey(self._sync_id, self._sequence)
        self._sequence += 1
        return key
