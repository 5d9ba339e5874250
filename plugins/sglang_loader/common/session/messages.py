"""Messages of one sync session between a trainer rank and an engine rank, on its device or another.

A descriptor is all that the `update_weights_from_tensor` request has that opens the session;
everything else goes over a socket that the trainer binds, in a private folder of the host that they
share:

    engine                                   trainer
    Hello(what it has and holds)      ->
                                      <-     Welcome
                                      <-     LoadBucket(index, buffers, pieces, layout)
    BucketDone(index)                 ->     its memory may be written again
                                      ...
                                      <-     Finish(counts)
    BucketDone(what was in flight)    ->
    Loaded(how)                       ->     this rank has read every byte
                                      <-     Commit, when every trainer rank has heard Loaded
    Published                         ->     all TP ranks serve the weights; the prefix cache is
                                             dropped
                                      <-     Abort(reason), at any time
    Failed(traceback), at any time    ->

Nothing is published that the trainer has not confirmed: its memory held what it was to hold until
the engine had read it, on every rank. Nor is a set of tensors that the engine finds not to fit its
model: each TP rank looks at what became of it before Loaded, and all judge it together after the
Commit. An Abort, or the trainer's death, overtakes whatever was sent before it: an engine that was
held up must not act on what its trainer has given up meanwhile.

Hello names the arrangements by which buckets may come in this sync (see `layout`); any bucket may
come whole. Loaded brings the trainer arrangements that it does not know.

An engine on other devices has a session with the trainer's first rank, over TCP, and gets the bytes
in an update group (`broadcast.update_group`): by broadcast, or from all trainer ranks, which send
what it reads of their shards; a LoadBucket's pieces say where it is in what is received. It answers
Receiving as soon as a buffer is free and it has begun to receive; when all engine ranks have, the
trainer begins to send. So nothing that the trainer sends waits for an engine that has failed: gloo
cannot abort that. If Loaded says that it is on the trainer's own host, it may map the trainer
ranks' parameters instead. The descriptor is signed with what only the group's ranks know, so that
an engine connects to nobody else.

Every message carries the version and the session's token. msgspec rejects a missing field, a wrong
type, a number out of its range or an unknown field; nothing is unpickled. The version changes
whenever a field does.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import msgspec

from sglang_loader.common.check_remarks import ManifestCheck
from sglang_loader.common.regions.arrangement import Size
from sglang_loader.common.shared_memory import CpuHandle, CudaHandle

SESSION_VERSION = 16
SESSION_FORMAT = "sglang_loader.session"
"""`load_format` of the request that opens a session: one descriptor for each TP rank."""


MAX_TIMEOUT_S = 86_400.0
"""Longest silence that a descriptor may ask an engine to tolerate, in seconds: an engine that waits
for a trainer serves nobody."""


Words: TypeAlias = Annotated[int, msgspec.Meta(ge=0, multiple_of=8)]
"""Bytes, as an all-to-all moves them."""


class SessionError(RuntimeError):
    """The session broke: protocol violated, peer gone or silent."""


class SessionDescriptor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Invites one engine rank to a session.

    Attributes:
        version: `SESSION_VERSION` of the trainer.
        endpoint: zmq address that the trainer rank has bound.
        token: random; each message must carry it.
        timeout_s: longest silence that either side tolerates, in seconds.
        uses_plan: replay a load plan, or make one; False: every bucket goes through the model's
            own loader.
        manifest_check: publish nothing ("error"), or say so ("warn"), if the tensors that came do
            not fit the model or are not all of it; "off": nobody looks.
        recheck_every_n_syncs: check the load plan against the model's own loader in every n-th
            sync; 0: only when it is made.
        syncs_draft: with speculative decoding: load a draft model as well as its target.
        host: of the trainer rank, see `Loaded`.
        group: name of the update group in which the buckets come that are not `read_only`; "":
            the engine maps all.
        senders: name of the one in which all trainer ranks send, too; "": there is none.
        signature: see `signed`; "" where there is no group.
    """

    version: int
    endpoint: str
    token: str
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_TIMEOUT_S)]
    uses_plan: bool
    manifest_check: ManifestCheck
    recheck_every_n_syncs: int
    syncs_draft: bool
    host: str
    group: str = ""
    senders: str = ""
    signature: str = ""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    version: int = SESSION_VERSION
    token: str = ""


class Hello(_Message, frozen=True, kw_only=True):
    """Engine: here I am.

    Attributes:
        buffers: those that are still mapped from an earlier session.
        arrangements: digest of those by which buckets may come arranged; "": all must be whole.
    """

    buffers: list[str]
    arrangements: str


class Welcome(_Message, frozen=True, kw_only=True):
    """Trainer: go on."""


class SharedBuffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A buffer of the trainer, which `slot` names from now on.

    Attributes:
        slot: number within this session.
        name: of one block of memory for as long as it is allocated.
        handle: None where the engine still has the buffer mapped: torch counts the receivers of a
            handle, so each handle is sent once.
        keep: keep the buffer mapped after the session.
    """

    slot: int
    name: str
    handle: CpuHandle | CudaHandle | None
    keep: bool


class BucketPiece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Consecutive bytes of a bucket, and where they are.

    Attributes:
        slot: the buffer.
        offset: of the piece's first byte in that buffer; in the shards, where there are some.
        start: of the piece's first byte in the bucket's layout.
        nbytes: length.
        dims: `(count, stride in bytes)`, outermost first: the counts are the digits of the n-th
            byte of the piece; (): the bytes are consecutive.
        shards: `(slot, offset, length)` of what the bytes are spread over, put one behind another;
            the first is in `slot`; (): they are in one buffer.
    """

    slot: Size
    offset: Size
    start: Size
    nbytes: Size
    dims: tuple[tuple[Size, Size], ...] = ()
    shards: tuple[tuple[Size, Size, Size], ...] = ()


class LoadBucket(_Message, frozen=True, kw_only=True):
    """Trainer: load a bucket.

    Attributes:
        index: position in the session, from 0.
        buffers: those that its pieces are the first to lie in.
        pieces: where its bytes are, by ascending `start`: one piece where it was packed, several
            where it is exchanged or pulled; of one that is broadcast or sent, in what is
            received, as slot 0. Encoded, see `encode_pieces`: they are the same in most syncs.
        layout: encoded, see `layout`; likewise.
        read_only: the pieces are trainer ranks' own memory, which the engine maps also in a session
            with a group, and may part a tensor anywhere.
        arranged: the bytes are those that the engine reads, as its Hello names them; False: as the
            layout says.
        receives: of one that is sent: for each all-to-all in which it comes the bytes from each
            rank of the group; they lie one behind the other.
    """

    index: int
    buffers: list[SharedBuffer]
    pieces: bytes
    layout: bytes
    read_only: bool
    arranged: bool
    receives: list[list[Words]] = []


class Finish(_Message, frozen=True, kw_only=True):
    """Trainer: everything was sent; the counts of the whole session. Buckets may be in flight yet.
    `arrangements`: digest of those that the trainer knows; None: it wants none.
    """

    num_buckets: int
    num_tensors: int
    arrangements: str | None


class Commit(_Message, frozen=True, kw_only=True):
    """Trainer: every rank's engine has read what it was to read; publish it."""


class Abort(_Message, frozen=True, kw_only=True):
    """Trainer: the sync failed elsewhere."""

    reason: str


class BucketDone(_Message, frozen=True, kw_only=True):
    """Engine: the device has finished with the bucket."""

    index: int


class Receiving(_Message, frozen=True, kw_only=True):
    """Engine: it receives the bucket from now on, and the trainer may send it."""

    index: int


MAKING_PLAN = "the plan is being made"
"""`Loaded.reason` of a first sync, which is as it should be."""


class Loaded(_Message, frozen=True, kw_only=True):
    """Engine: all weights of this rank are in place, and no memory of the trainer's is read more.

    Attributes:
        num_replayed: buckets loaded by the compiled plan.
        num_eager: buckets loaded by the model's own loader.
        reason: why not all were replayed.
        may_read_in_place: a plan holds: buckets may be the trainer's memory.
        host: equal in processes that can map each other's memory, as far as the engine knows.
        arrangements: encoded, for later syncs; None where there is nothing that the trainer wants.
        seconds: how the engine rank spent the session: "waiting" for the trainer with nothing to
            do, "launching" (its own Python, and whatever is loaded eagerly), "copying" (the device
            had yet to finish).
    """

    num_replayed: int
    num_eager: int
    reason: str | None
    may_read_in_place: bool
    host: str
    arrangements: bytes | None
    seconds: dict[str, float]


class Published(_Message, frozen=True, kw_only=True):
    """Engine: the weights are in place on all TP ranks, and what was cached of the old is gone.

    The reply to the request that opened the session says the same, later.
    """


class Failed(_Message, frozen=True, kw_only=True):
    """Engine: loading failed here, or on another TP rank.

    Attributes:
        traceback: with the TP rank.
        cannot_map: nothing was read, because this process cannot map the trainer's memory.
    """

    traceback: str
    cannot_map: bool = False


FromTrainer = Welcome | LoadBucket | Finish | Commit | Abort
FromEngine = Hello | Receiving | BucketDone | Loaded | Published | Failed

_encoder = msgspec.msgpack.Encoder()
_from_trainer = msgspec.msgpack.Decoder(FromTrainer)
_from_engine = msgspec.msgpack.Decoder(FromEngine)
_pieces = msgspec.msgpack.Decoder(list[BucketPiece])
_descriptor = msgspec.json.Decoder(SessionDescriptor)


def encode(message: FromTrainer | FromEngine) -> bytes:
    """Serialise a message."""
    return _encoder.encode(message)


def encode_pieces(pieces: Sequence[BucketPiece]) -> bytes:
    """Serialise where a bucket's bytes are; `decode_pieces` gives the list back."""
    return _encoder.encode(pieces)


def decode_pieces(data: bytes) -> list[BucketPiece]:
    """Parse what `encode_pieces` wrote; SessionError is raised if it is something else."""
    return _decode(_pieces, data)  # type: ignore[no-any-return]


def decode_from_trainer(data: bytes) -> FromTrainer:
    """Parse what an engine received; SessionError is raised if it is no message of a trainer."""
    return _decode(_from_trainer, data)  # type: ignore[no-any-return]


def decode_from_engine(data: bytes) -> FromEngine:
    """Parse what a trainer received; SessionError is raised if it is no message of an engine."""
    return _decode(_from_engine, data)  # type: ignore[no-any-return]


def encode_descriptor(descriptor: SessionDescriptor) -> bytes:
    """Serialise a descriptor."""
    return msgspec.json.encode(descriptor)


def decode_descriptor(data: bytes) -> SessionDescriptor:
    """Parse a descriptor; SessionError is raised if it is none, or of another version. Its endpoint
    is checked by `channel.engine_end`, which connects to it.
    """
    try:
        descriptor = _descriptor.decode(data)
    except msgspec.MsgspecError as error:
        raise SessionError(f"not a session descriptor: {error}; got {data[:120]!r}") from None
    check_version(descriptor.version)
    return descriptor


def signed(descriptor: SessionDescriptor, secret: bytes) -> SessionDescriptor:
    """The descriptor of a session with a group, with a code over all of its fields; for the secret
    see `update_group.secret_of`.
    """
    unsigned = msgspec.structs.replace(descriptor, signature="")
    unsigned = _descriptor.decode(encode_descriptor(unsigned))  # 60 seconds arrive as 60.0
    code = hashlib.blake2b(encode_descriptor(unsigned), key=secret, digest_size=16)
    return msgspec.structs.replace(unsigned, signature=code.hexdigest())


def check_signature(descriptor: SessionDescriptor, secret: bytes) -> None:
    """Raise SessionError unless the trainer of this group has made the descriptor as it is."""
    expected = signed(descriptor, secret).signature
    if not hmac.compare_digest(descriptor.signature.encode(), expected.encode()):
        raise SessionError(
            f"the session of {descriptor.group} is not one of its trainer's, or was changed on its "
            "way"
        )


def check_version(version: int) -> None:
    """Raise SessionError unless the peer speaks our version."""
    if version != SESSION_VERSION:
        raise SessionError(
            f"session version {version}, this side speaks {SESSION_VERSION}: the trainer and the "
            "engine have different releases of verl-sglang-sync installed"
        )


def _decode(decoder: Any, data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise SessionError(f"not a session message: {error}; got {data[:60]!r}") from None
