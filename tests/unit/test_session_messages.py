"""The session's wire format: round trips, and what is refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_loader.common.session import messages
from sglang_loader.common.session.messages import SessionError
from sglang_loader.common.shared_memory import CpuHandle

TOKEN = "ab" * 16
HANDLE = CpuHandle(nbytes=4, name="n")
FROM_TRAINER = [
    messages.Welcome(token=TOKEN),
    messages.LoadBucket(
        token=TOKEN,
        index=1,
        buffers=[
            messages.SharedBuffer(slot=0, name="b", handle=HANDLE, keep=True),
            messages.SharedBuffer(slot=1, name="c", handle=None, keep=False),
        ],
        slot=1,
        layout=b"x",
    ),
    messages.Store(token=TOKEN, data=b"x"),
    messages.LoadShards(
        token=TOKEN,
        index=0,
        buffers=[],
        host="h",
        weight_map="d",
        bases="e",
        num_ranks=2,
        round_bytes=8,
        rounds="",
    ),
    messages.LoadRound(token=TOKEN, index=1, buffers=[], slot=0, receives=[8, 16]),
    messages.Finish(token=TOKEN, num_loads=2, num_tensors=3),
    messages.Commit(token=TOKEN, is_last=False),
    messages.Abort(token=TOKEN, reason="why"),
]
FROM_ENGINE = [
    messages.Hello(token=TOKEN, buffers=["b"], stored=["d"], plan="p", wants_proof=False),
    messages.Rounds(token=TOKEN, digest="d", data=None),
    messages.LoadDone(token=TOKEN, index=1),
    messages.Loaded(
        token=TOKEN,
        num_replayed=1,
        num_eager=2,
        reason=None,
        has_plan=True,
        saved_plan_misfits=False,
        differing=["w"],
        later_proof="later",
        host="this one",
        seconds={"waiting": 0.5, "launching": 0.25},
    ),
    messages.Published(token=TOKEN),
    messages.Failed(token=TOKEN, traceback="trace", failure="differs"),
]


ENDS = [(m, messages.FROM_TRAINER, messages.FROM_ENGINE) for m in FROM_TRAINER]
ENDS += [(m, messages.FROM_ENGINE, messages.FROM_TRAINER) for m in FROM_ENGINE]


@pytest.mark.parametrize(("message", "decoder", "of_others"), ENDS)
def test_messages_round_trip_at_their_end(message, decoder, of_others):
    assert messages.decode(decoder, messages.encode(message)) == message
    with pytest.raises(SessionError, match="not a session message"):
        messages.decode(of_others, messages.encode(message))


@given(st.binary(max_size=64))
def test_noise_is_refused(data):
    with pytest.raises(SessionError):
        messages.decode(messages.FROM_TRAINER, data)


@pytest.mark.parametrize("message", FROM_TRAINER, ids=lambda m: type(m).__name__)
def test_missing_unknown_and_mistyped_fields_are_refused(message):
    fields = msgspec.to_builtins(message)
    last = list(fields)[-1]
    for broken in (
        {key: value for key, value in fields.items() if key != last},
        {**fields, "more": 1},
        {**fields, last: 3.5},
    ):
        if broken.keys() == {"type", "version"}:
            continue  # `token` has a default, which the channel refuses
        with pytest.raises(SessionError):
            messages.decode(messages.FROM_TRAINER, msgspec.msgpack.encode(broken))


@pytest.mark.parametrize("receives", [[8, 7], [16, -8]])
def test_parts_of_words_are_refused(receives):
    fields = msgspec.msgpack.decode(
        messages.encode(messages.LoadRound(token=TOKEN, index=1, buffers=[], slot=0, receives=[]))
    )
    with pytest.raises(SessionError, match=r"Expected `int` .* at `\$\.receives"):
        messages.decode(
            messages.FROM_TRAINER, msgspec.msgpack.encode({**fields, "receives": receives})
        )


DESCRIPTOR = messages.SessionDescriptor(
    version=messages.SESSION_VERSION,
    endpoint="ipc:///x",
    token=TOKEN,
    sync="",
    timeout_s=1,
    uses_plan=True,
    manifest_check="error",
    proof="none",
    syncs_draft=False,
)


def test_a_descriptor_of_another_version_is_refused():
    newer = msgspec.structs.replace(DESCRIPTOR, version=messages.SESSION_VERSION + 1)
    with pytest.raises(SessionError, match="different releases"):
        messages.decode_descriptor(messages.encode_descriptor(newer))
    with pytest.raises(SessionError, match="not a session descriptor"):
        messages.decode_descriptor(b"model.norm.weight")


@pytest.mark.parametrize("timeout_s", ["0.3", "600", str(messages.MAX_TIMEOUT_S)])
def test_a_descriptor_round_trips(timeout_s):
    descriptor = messages.decode_descriptor(with_limit(timeout_s))
    assert descriptor == msgspec.structs.replace(DESCRIPTOR, timeout_s=float(timeout_s))


@pytest.mark.parametrize(
    "timeout_s", ["0", "-1", str(messages.MAX_TIMEOUT_S + 1), "1e300", "NaN", "Infinity", "null"]
)
def test_engines_wait_bounded_whatever_a_descriptor_says(timeout_s):
    with pytest.raises(SessionError, match="not a session descriptor"):
        messages.decode_descriptor(with_limit(timeout_s))


def with_limit(timeout_s):
    """The descriptor's bytes with this limit in them."""
    limit = b'"timeout_s":1'
    assert limit in messages.encode_descriptor(DESCRIPTOR)
    return messages.encode_descriptor(DESCRIPTOR).replace(
        limit, b'"timeout_s":' + timeout_s.encode()
    )
