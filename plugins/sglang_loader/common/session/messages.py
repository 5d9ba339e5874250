"""Messages of one sync session between a trainer rank and an engine rank, on its device or another.

The `update_weights_from_tensor` request that opens a session has only its descriptor. All other
messages go over a socket that the trainer binds, in a private folder of the host that they share:

    engine                                   trainer
    Hello(what it has and holds)      ->
                                      <-     Welcome
                                      <-     LoadBucket(index, buffers, slot, layout)
    LoadDone(index)                   ->     its staging buffer may be written again
                                      ...
                                      <-     Finish(counts)
    LoadDone(what was in flight)      ->
    Loaded(how)                       ->     this TP rank has read every byte. All TP ranks have
                                             got everything, and it fits
                                      <-     Commit, when every trainer rank has got Loaded
    Published                         ->     all TP ranks have got Commit, and this one has
                                             published the weights; its prefix cache is dropped
                                      <-     Abort(reason), at any time
    Failed(traceback), at any time    ->

By the copy table there are no buckets. Instead of the LoadBuckets:

                                      <-     Store(bytes), for what the engine has not stored
                                      <-     LoadShards(weight map, bases)
    Rounds(reads), if they are wanted ->
    LoadDone(0)                       ->     the shards may still be read
                                      <-     LoadRound(index), for each round
    LoadDone(index)                   ->

Loaded is an engine rank's acknowledged prepare. All TP ranks of the engine have launched the loads
of the whole sync, and this one's device has made them. If the session proves a route, the proof was
good on all of them. By their common verdict the sync fits
the model. With `manifest_check` off there is a verdict only if a failed sync may have left a gap.
From then on, one replica can publish what another does not publish only if a process dies or fails
between the Commits. The engine publishes weights only after the Commit. With the Commit of a sync
by the copy table the trainer confirms that on every rank the parameters were where they had been
located. An Abort, or the
trainer's death, overtakes all earlier messages: a slow engine must not act on a sync that its
trainer has given up.

Hello names the load plan that the engine holds, and the bytes that it has stored. The weight map
and the bases that LoadShards names are the same in most syncs, so they are stored once. Shards that
the engine rank cannot map are sent in rounds (`rounds`). The engine rank decides which bytes each
trainer rank sends in which round, and in which order. It reports that unless the trainer has it.

A descriptor with a `proof` opens a session that must leave the weights as they are, bit for bit
(`session.proof`).

An engine on other devices has a session with the trainer's first rank, over TCP, and gets the bytes
in an update group (`broadcast.update_group`). Buckets come by broadcast, rounds from all trainer
ranks. The engine sends Receiving when a buffer is free and the engine has begun to receive. The
trainer sends the bytes when it has Receiving from all engine ranks. So the trainer never waits in
gloo, which has no abort, for an engine that has failed. If Loaded names a trainer rank's own host,
the engine may map the parameters of that rank instead. The descriptor is signed with a secret of
the group's ranks, so that an engine connects to no other process.

Every message has the version and the session's token. msgspec rejects a missing field, a wrong
type, a number out of its range or an unknown field. Nothing is unpickled. The version changes
whenever a field does.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from sglang_loader.common.regions.read import Size
from sglang_loader.common.shared_memory import BufferHandle

SESSION_VERSION = 24
SESSION_FORMAT = "sglang_loader.session"
"""`load_format` of the request that opens a session. The request has a descriptor for each TP rank.
"""


MAX_TIMEOUT_S = 86_400.0
"""The largest `timeout_s` of a descriptor. An engine that waits for a trainer serves no requests.
"""


Proof = Literal["none", "route", "served"]
"""The kind of proof that a session makes.

"route": the session brings the weights that the engine holds, by the route that is to be proven,
and the engine refuses other bytes. "served": the session brings a full export through
`load_weights`, and the engine reports the tensors that it held with other bytes.
"""

LaterProof = Literal["none", "later", "next_sync"]
"""The need for another proof, with other weights, that would show more.

"later": storages hold the same bytes as others, so that a swap of the two is not seen. "next_sync":
the load plan is one that an earlier process has saved, and the proof cannot show what the plan
leaves out.
"""

ManifestCheck = Literal["error", "off"]
"""error: a sync fails if its tensors do not fit the engine's model. off: nothing is checked."""

Words: TypeAlias = Annotated[int, msgspec.Meta(ge=0, multiple_of=8)]
"""A number of bytes, in whole words of an all-to-all."""


class SessionError(RuntimeError):
    """A failed session: the peer violated the protocol, is gone, or is silent."""


class PeerLost(SessionError):
    """A peer that is gone, or did not answer within the time limit."""


class SessionDescriptor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The invitation of one engine rank to a session.

    Attributes:
        version: `SESSION_VERSION` of the trainer.
        endpoint: zmq address that the trainer rank has bound.
        token: a random text that each message must carry.
        sync: a random text, the same for all sessions in which a sync brings the same weights.
        timeout_s: longest silence that either side tolerates, in seconds.
        uses_plan: if True, replay a load plan, or make one. If False, load every bucket with the
            model's own `load_weights`.
        manifest_check: "error" fails the sync if the tensors do not fit the model or are
            incomplete. "off" does not check.
        proof: what this session proves, see `Proof`.
        syncs_draft: with speculative decoding, load the draft model as well as its target.
        group: name of the update group in which buckets come. If "", the engine maps all buckets.
        senders: name of the update group in which all trainer ranks send, or "" if there is none.
        signature: see `signed`. "" without a group.
    """

    version: int
    endpoint: str
    token: str
    sync: str
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_TIMEOUT_S)]
    uses_plan: bool
    manifest_check: ManifestCheck
    proof: Proof
    syncs_draft: bool
    group: str = ""
    senders: str = ""
    signature: str = ""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    version: int = SESSION_VERSION
    token: str = ""


class Hello(_Message, frozen=True, kw_only=True):
    """The engine's message that it is ready for the session.

    Attributes:
        buffers: names of buffers that are still mapped from an earlier session.
        stored: digests of what is still stored from an earlier session.
        plan: name of the load plan by which this sync may be loaded, or "" if there is none.
        wants_proof: a user has requested a proof of this sync from the engine's server, or a saved
            load plan awaits a proof with other weights. Another trainer does not know of that.
    """

    buffers: list[str]
    stored: list[str]
    plan: str
    wants_proof: bool


class Welcome(_Message, frozen=True, kw_only=True):
    """The trainer's message that buckets, or shards, will follow."""


class Store(_Message, frozen=True, kw_only=True):
    """The trainer's message to store bytes, which LoadShards names by their digest.

    LoadShards drops all other stored bytes.
    """

    data: bytes


class SharedBuffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A buffer of the trainer, which the engine maps.

    Attributes:
        slot: its number in this session.
        name: name of one block of memory for as long as the block is allocated.
        handle: with a handle the engine maps the buffer, else it still has it mapped. Each handle
            is sent once.
        keep: keep the buffer mapped after the session.
    """

    slot: int
    name: str
    # torch counts the receivers of a handle, and frees the memory when all have dropped it.
    handle: BufferHandle | None
    keep: bool


class LoadBucket(_Message, frozen=True, kw_only=True):
    """The trainer's message to load a bucket.

    Attributes:
        index: position among the loads of the session, from 0.
        buffers: the staging buffer of the bucket, if no earlier bucket of this session had it.
        slot: the staging buffer that the bucket lies in. Meaningless if the bucket is broadcast.
        layout: as `encode_layout` writes it. It is the same in most syncs, so it is encoded once.
    """

    index: int
    buffers: list[SharedBuffer]
    slot: Size
    layout: bytes


class LoadShards(_Message, frozen=True, kw_only=True):
    """The trainer's message to load the whole sync by the copy table.

    The engine maps the trainer ranks' own parameters, also in a session with a group. What it
    cannot map follows in rounds.

    Attributes:
        index: position among the loads of the session, always 0.
        buffers: the blocks that the parameters lie in. The bases number them in this order.
        host: the host of these blocks, as `Loaded.host`.
        weight_map: digest of the stored weight map, see `weight_map`.
        bases: digest of the stored bases of the map's shards, as this engine rank reads them.
        num_ranks: the number of trainer ranks.
        round_bytes: about the largest size of a round.
        rounds: digest of the rounds of this engine rank that the trainer has, or "". None if the
            engine rank need not report any.
    """

    index: int
    buffers: list[SharedBuffer]
    host: str
    weight_map: str
    bases: str
    num_ranks: Size
    round_bytes: Annotated[int, msgspec.Meta(ge=1)]
    rounds: str | None


class LoadRound(_Message, frozen=True, kw_only=True):
    """The trainer's message to load the next round.

    Attributes:
        index: position among the loads of the session.
        buffers: the staging buffer of the round, if no earlier round of this session had it.
        slot: the staging buffer that the round lies in. Meaningless if the round is received.
        receives: the bytes from each rank of the group, if the round is received.
    """

    index: int
    buffers: list[SharedBuffer]
    slot: Size
    receives: list[Words]


class Finish(_Message, frozen=True, kw_only=True):
    """The trainer's message that everything was announced.

    Attributes:
        num_loads: the LoadBucket, LoadShards and LoadRound messages of the whole session.
        num_tensors: in the whole session.
    """

    num_loads: int
    num_tensors: int


class Commit(_Message, frozen=True, kw_only=True):
    """The trainer's message that the weights may be published: all engine ranks have read them.

    Attributes:
        is_last: if False, another session of the same sync follows at once, and no request may run
            before it has ended.
    """

    is_last: bool


class Abort(_Message, frozen=True, kw_only=True):
    """The trainer's message that the sync has failed."""

    reason: str


class Rounds(_Message, frozen=True, kw_only=True):
    """The engine's message on the bytes that trainer ranks are to send to this engine rank.

    Attributes:
        digest: of the rounds.
        data: the rounds, encoded (see `rounds`), or None if LoadShards has named the same digest.
    """

    digest: str
    data: bytes | None


class LoadDone(_Message, frozen=True, kw_only=True):
    """The engine's message that the device has finished what the engine launched for one load.

    The staging buffer of a bucket or of a round may be written again. Mapped shards must not change
    until the sync is over: between rounds the engine still reads them.
    """

    index: int


class Receiving(_Message, frozen=True, kw_only=True):
    """The engine's message that it is ready to receive a load. The trainer may send the bytes."""

    index: int


MAKING_PLAN = "the plan is being made"
"""`Loaded.reason` of a first sync. This reason is no problem."""

PROVING_SAVED_PLAN = "a saved load plan will be proven"
"""`Loaded.reason` of a first sync that was not traced. This reason is no problem."""


class Loaded(_Message, frozen=True, kw_only=True):
    """The engine's message that this rank has all weights.

    The engine rank has stopped reading the trainer's memory.

    Attributes:
        num_replayed: buckets loaded by the load plan.
        num_eager: buckets loaded by the model's own `load_weights`.
        reason: the reason why not all buckets were replayed, or None.
        has_plan: a load plan holds, by which the engine can load the next sync.
        saved_plan_misfits: there is no load plan, as a saved one was tried in vain. The next sync
            is traced.
        differing: in a session with proof "served", the tensors that this rank held with other
            bytes than the export has.
        later_proof: in a session with a proof, the need for another.
        host: the same in processes that may be able to map each other's memory.
        seconds: the engine rank's time in the session: "waiting" for the trainer, "launching"
            (Python code and eager loads), "copying" (waiting for the device), "proving" (taking
            digests, in a session with a proof).
    """

    num_replayed: int
    num_eager: int
    reason: str | None
    has_plan: bool
    saved_plan_misfits: bool
    differing: list[str]
    later_proof: LaterProof
    host: str
    seconds: dict[str, float]


class Published(_Message, frozen=True, kw_only=True):
    """The message that this engine rank has published the weights, and has no old prefix cache.

    All TP ranks of its engine have got Commit, so each of them does so.

    Requests run as soon as the gate is open: after the sync's last session, with the KV cache
    resumed.

    The reply to the request that opened the session reports the same, later.
    """


FailureKind = Literal["other", "cannot_map", "differs", "saved_plan_differs", "misfit"]


class Failed(_Message, frozen=True, kw_only=True):
    """The engine's message that loading failed on this or another TP rank.

    Attributes:
        traceback: with the TP rank.
        failure: "cannot_map" if this process cannot map the trainer's memory. "differs" if the
            proof has failed. "saved_plan_differs" if the proof of a load plan has failed that an
            earlier process had saved. The engine has dropped that plan. "misfit" if the tensors do
            not fit the model, and a repetition would not help.
    """

    traceback: str
    failure: FailureKind = "other"


Decoded = TypeVar("Decoded")
FromTrainer = Welcome | Store | LoadBucket | LoadShards | LoadRound | Finish | Commit | Abort
FromEngine = Hello | Rounds | Receiving | LoadDone | Loaded | Published | Failed

_encoder = msgspec.msgpack.Encoder()
FROM_TRAINER: msgspec.msgpack.Decoder[FromTrainer] = msgspec.msgpack.Decoder(FromTrainer)
FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
"""The decoders of a trainer's and of an engine's messages, for `decode`."""
_descriptor = msgspec.json.Decoder(SessionDescriptor)


def encode(message: FromTrainer | FromEngine) -> bytes:
    return _encoder.encode(message)


def decode(decoder: msgspec.msgpack.Decoder[Decoded], data: bytes) -> Decoded:
    """Parse the output of `encode`.

    Raises:
        SessionError: not the output of `encode`.
    """
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise SessionError(f"not a session message: {error}. Got {data[:60]!r}") from None


def encode_descriptor(descriptor: SessionDescriptor) -> bytes:
    return msgspec.json.encode(descriptor)


def decode_descriptor(data: bytes) -> SessionDescriptor:
    """Parse a descriptor of our version. `channel.engine_end` checks its endpoint.

    Raises:
        SessionError: not a descriptor, or of another version.
    """
    try:
        descriptor = _descriptor.decode(data)
    except msgspec.MsgspecError as error:
        raise SessionError(f"not a session descriptor: {error}. Got {data[:120]!r}") from None
    check_version(descriptor.version)
    return descriptor


def signed(descriptor: SessionDescriptor, secret: bytes) -> SessionDescriptor:
    """Return the descriptor, signed over all of its fields with its group's secret.

    Args:
        secret: the `secret_of` the group.
    """
    unsigned = msgspec.structs.replace(descriptor, signature="")
    unsigned = _descriptor.decode(encode_descriptor(unsigned))  # 60 becomes 60.0, as at the engine
    code = hashlib.blake2b(encode_descriptor(unsigned), key=secret, digest_size=16)
    return msgspec.structs.replace(unsigned, signature=code.hexdigest())


def check_signature(descriptor: SessionDescriptor, secret: bytes) -> None:
    """Raise SessionError unless the descriptor was signed with this secret and not changed."""
    expected = signed(descriptor, secret).signature
    if not hmac.compare_digest(descriptor.signature.encode(), expected.encode()):
        raise SessionError(
            f"the session descriptor for {descriptor.group} has a wrong signature: it is not the "
            "trainer's of that group, or was changed on its way"
        )


def check_version(version: int) -> None:
    """Raise SessionError unless the peer speaks our version."""
    if version != SESSION_VERSION:
        raise SessionError(
            f"session version {version}, this side speaks {SESSION_VERSION}: the trainer and the "
            "engine have different releases of verl-sglang-sync installed"
        )
