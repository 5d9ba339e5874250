"""A TP rank that fails before its session tells the trainer of a valid invitation, and no other."""

from functools import partial
from types import SimpleNamespace

import msgspec
import pytest

from sglang_loader.common.session.channel import trainer_end_on_network
from sglang_loader.common.session.messages import (
    SESSION_VERSION,
    Failed,
    SessionDescriptor,
    encode_descriptor,
    signed,
)
from sglang_loader.hooks import update_groups, weights
from sglang_loader.session import serve

SECRET, LIMIT_S = b"of the group", 5.0


@pytest.fixture
def trainer():
    with trainer_end_on_network("127.0.0.1") as channel:
        channel.begin("token", timeout_s=LIMIT_S)
        yield channel


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    monkeypatch.setattr(update_groups, "update_groups", lambda _: {"g": object()})
    monkeypatch.setattr(update_groups, "_secrets", {"g": SECRET})
    monkeypatch.setattr(weights, "entry_bytes", lambda data: data)
    monkeypatch.setattr(
        weights, "TPRanks", lambda _: SimpleNamespace(rank=0, size=1, gather=lambda item: [item])
    )
    monkeypatch.setattr(serve, "tp_rank", lambda: 0)
    unmapped = []
    monkeypatch.setattr(serve.mapped, "release_all", lambda: unmapped.append(True))
    return unmapped


class Update:
    """An update whose models have no loader, so that no session is made."""

    models = (None,)
    flush = begin_writing = begin_bucket = None
    failure_kind = "other"

    def run(self, load, await_commit, report):
        _, failure = weights.run_step(load)
        weights.run_step(partial(report, failure))
        return [failure]


def serve_once(descriptor, num_ranks=1):
    descriptors = [encode_descriptor(descriptor)] * num_ranks
    request = SimpleNamespace(serialized_named_tensors=descriptors, rid=None)
    updater = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=None))
    return weights._serve_session(Update(), updater, request)


def invitation(trainer, group="g"):
    return SessionDescriptor(
        version=SESSION_VERSION,
        endpoint=trainer.endpoint,
        token="token",
        sync="",
        timeout_s=LIMIT_S,
        uses_plan=True,
        manifest_check="off",
        proof="none",
        syncs_draft=False,
        group=group,
    )


def test_trainer_of_a_signed_invitation_is_told_once(trainer, engine):
    descriptor = signed(invitation(trainer), SECRET)
    (failure,) = serve_once(descriptor)
    message = trainer.receive()
    assert isinstance(message, Failed) and message.traceback == f"TP rank 0: {failure}"
    assert engine == [True]
    serve_once(descriptor)  # a proxy repeats it
    assert engine == [True]


def test_a_trainer_of_another_tp_size_is_told(trainer):
    (failure,) = serve_once(signed(invitation(trainer), SECRET), num_ranks=2)
    assert "the trainer's replica has 2 ranks, this engine has 1 TP ranks" in failure
    assert trainer.receive().traceback == f"TP rank 0: {failure}"


@pytest.mark.parametrize("secret", [b"another", None])
def test_no_other_process_is_connected_to(trainer, engine, secret):
    descriptor = invitation(trainer, group="g" if secret else "unknown")
    (failure,) = serve_once(signed(descriptor, secret or SECRET))
    assert "signature" in failure or "not in group" in failure
    assert not trainer.wait(0.5) and not trainer.has_heard and not engine


def test_no_address_of_another_host_without_a_group(trainer, engine):
    serve_once(invitation(trainer, group=""))
    assert not trainer.wait(0.5) and not engine


def test_without_a_signature_no_group_is_given(trainer):
    unsigned = invitation(trainer, group="")
    assert update_groups.groups_of(None, msgspec.structs.replace(unsigned, senders="g")) == []
    signed_one = signed(msgspec.structs.replace(invitation(trainer), senders="g"), SECRET)
    assert len(update_groups.groups_of(None, signed_one)) == 2, "the control"


@pytest.mark.parametrize("breaks", [False, True])
def test_no_rank_answers_while_another_still_reads(trainer, engine, monkeypatch, breaks):
    """If another TP rank has failed, this one's device may still copy."""
    steps = []

    def stop_reading():
        steps.append("stop")
        assert not breaks, "the device failed"

    def meet(item):
        steps.append("meet")
        return [item]

    session = SimpleNamespace(
        load=lambda: None,
        stop_reading=stop_reading,
        conclude=lambda *_: steps.append("conclude"),
        differing=[],
    )
    monkeypatch.setattr(weights, "Session", lambda *_, **__: session)
    monkeypatch.setattr(weights, "TPRanks", lambda _: SimpleNamespace(rank=0, size=1, gather=meet))
    monkeypatch.setattr(Update, "run", lambda _, load, *__: load() or ["TP rank 1: it failed"])
    failures = serve_once(signed(invitation(trainer), SECRET))
    assert failures == ["TP rank 1: it failed"]
    assert steps == ["stop", "meet", "conclude"]
