"""The bytes that trainer ranks send to one engine rank, in rounds, as the engine rank lists them.

data = encode_rounds([SentRound(parts), ...])         # engine rank
rounds = decode_rounds(data, num_ranks)               # its trainer rank
data = encode_parts({reader: parts_of(rounds, rank)})     # for trainer rank `rank`
for reader, parts in decode_parts(data).items(): ...      # on that rank
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang_loader.common.layout import WireError
from sglang_loader.common.regions.read import Read
from sglang_loader.common.session.messages import Words


class RoundPart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The bytes that one trainer rank sends in one round.

    Attributes:
        reads: the parts of its shards. `Read.memory` is the number of the shard in the weight map,
            and `Read.start` the offset among the bytes of this part.
        size: the bytes, in whole words.
    """

    reads: tuple[Read, ...]
    size: Words


@dataclass(frozen=True, slots=True)
class SentRound:
    """The bytes of one round, by the trainer rank that sends them."""

    parts: tuple[RoundPart, ...]

    @property
    def sizes(self) -> list[int]:
        """The bytes by trainer rank, in whole words."""
        return [part.size for part in self.parts]

    @property
    def payloads(self) -> list[int]:
        """The bytes by trainer rank, without the gaps between the reads."""
        return [sum(read.nbytes for read in part.reads) for part in self.parts]


_encoder = msgspec.msgpack.Encoder()
_rounds_decoder = msgspec.msgpack.Decoder(list[tuple[RoundPart, ...]])
_parts_decoder = msgspec.msgpack.Decoder(dict[int, list[RoundPart]])


def encode_rounds(rounds: Iterable[SentRound]) -> bytes:
    """Encode the rounds of an engine rank."""
    return _encoder.encode([sent.parts for sent in rounds])


def decode_rounds(data: bytes, num_ranks: int) -> list[SentRound]:
    """Parse and check rounds.

    Args:
        num_ranks: the number of trainer ranks.

    Raises:
        WireError: not rounds, not of so many ranks, or a read that leaves the bytes of its part.
    """
    rounds = []
    for number, parts in enumerate(_parsed(_rounds_decoder, data)):
        if len(parts) != num_ranks:
            raise WireError(f"round {number} is sent by {len(parts)} ranks, not {num_ranks}")
        _check_sizes(parts)
        rounds.append(SentRound(parts))
    return rounds


def parts_of(rounds: Iterable[SentRound], rank: int) -> list[RoundPart]:
    """Return the part of one trainer rank in each round."""
    return [sent.parts[rank] for sent in rounds]


def encode_parts(by_reader: Mapping[int, Sequence[RoundPart]]) -> bytes:
    """Encode one trainer rank's parts of the rounds of several engine ranks."""
    return _encoder.encode(by_reader)


def decode_parts(data: bytes) -> dict[int, list[RoundPart]]:
    """Parse the output of `encode_parts`.

    Raises:
        WireError: not the output of `encode_parts`.
    """
    by_reader: dict[int, list[RoundPart]] = _parsed(_parts_decoder, data)
    for parts in by_reader.values():
        _check_sizes(parts)
    return by_reader


def _check_sizes(parts: Iterable[RoundPart]) -> None:
    for part in parts:
        stop = max((read.start + read.nbytes for read in part.reads), default=0)
        if stop > part.size:
            raise WireError(f"a part of a round packs {stop} bytes, and sends {part.size}")


def _parsed(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise WireError(f"not rounds: {error}") from None
