"""What travels with a bucket that is broadcast to the engines: its layout, and what comes next.

Disaggregated mode sends one `update_weights_from_distributed` request per bucket and replica; the
bytes go over the process group that trainer and engines form. The request's one "tensor" is the
flat bucket, and its name is the encoded `BroadcastBucket`.

Whoever announces a bucket has the engine post a receive in the group, which the trainer's next
broadcast would meet, and gloo ends a process where the lengths differ. So an announcement carries a
code that only the group's ranks can compute: one that was changed on its way, or that somebody else
has made, is refused before anything is received.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from sglang_loader.common.check_remarks import ManifestCheck
from sglang_loader.common.layout import BucketLayout, WireError, decode_layout
from sglang_loader.common.session.messages import SESSION_VERSION, check_version

BROADCAST_EAGER = "sglang_loader.broadcast.eager"
BROADCAST_COMPILED = "sglang_loader.broadcast.compiled"
BROADCAST_FORMATS = (BROADCAST_EAGER, BROADCAST_COMPILED)
"""Values of `load_format`: how the engine loads the bucket, see `broadcast_receiver`."""


class BroadcastBucket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One bucket of one sync.

    Attributes:
        sync_id: unique per sync; the same for all of its buckets.
        index: position of the bucket in the sync, from 0.
        is_last: True for the final bucket.
        num_tensors: tensors sent in this sync up to and including this bucket.
        encoded_layout: where the bucket's tensors lie in its bytes.
        next_nbytes: length of the next bucket, in bytes, whose broadcast has begun too; 0 if this
            is the last. The engine receives it while it loads this one.
        timeout_s: longest time to wait for the bytes, in seconds.
        manifest_check: see `session.messages.SessionDescriptor`; of the last bucket.
        recheck_every_n_syncs: see `session.model_loader.ModelLoader.start`.
        version: of the sender's messages.
    """

    sync_id: str
    index: int
    is_last: bool
    num_tensors: int
    encoded_layout: bytes
    next_nbytes: int
    timeout_s: float
    manifest_check: ManifestCheck = "off"
    recheck_every_n_syncs: int = 0
    version: int = SESSION_VERSION

    @property
    def layout(self) -> BucketLayout:
        """Where the tensors lie.

        Raises:
            WireError: see `layout.decode_layout`.
        """
        return decode_layout(self.encoded_layout)


_decoder = msgspec.json.Decoder(BroadcastBucket)
_encoder = msgspec.json.Encoder()


def encode_bucket(bucket: BroadcastBucket, secret: bytes) -> str:
    """Serialise; `decode_bucket(encode_bucket(b, s), s) == b`.

    Args:
        bucket: what is announced.
        secret: of the group, see `update_group.secret_of`.
    """
    text = _encoder.encode(bucket).decode()
    return f"{_code(text, secret)} {text}"


def decode_bucket(text: str, secret: bytes) -> BroadcastBucket:
    """Parse and check.

    Args:
        text: what came.
        secret: of the group in which the bucket is to be received.

    Raises:
        WireError: not such a message, not of this group's trainer, or an impossible layout.
        SessionError: of another version.
    """
    code, _, content = text.partition(" ")
    if not hmac.compare_digest(code.encode(), _code(content, secret).encode()):
        raise WireError(
            "not a broadcast bucket of this group's trainer, or changed on its way, or of another "
            f"release of verl-sglang-sync: {text[:120]!r}"
        )
    try:
        bucket = _decoder.decode(content)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a broadcast bucket: {error}; got {content[:120]!r}") from None
    check_version(bucket.version)
    decode_layout(bucket.encoded_layout)
    if bucket.next_nbytes < 0 or (bucket.is_last and bucket.next_nbytes):
        raise WireError(
            f"bucket {bucket.index}: next_nbytes={bucket.next_nbytes}, is_last={bucket.is_last}"
        )
    return bucket


def _code(text: str, secret: bytes) -> str:
    return hashlib.blake2b(text.encode(), key=secret, digest_size=16).hexdigest()
