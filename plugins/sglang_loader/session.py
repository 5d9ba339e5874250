"""SGLang custom weight loader that serves a whole sync: one request, buckets over a private socket.

SGLang calls `load_session` in each TP worker for the one `update_weights_from_tensor` request that
opens a session; it returns when the trainer has committed and the device has every byte, or raises.
The trainer may write into a buffer again as soon as it gets `BucketDone`: that is sent after the
stream has finished.
"""

from __future__ import annotations

import logging
import traceback
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from sglang_loader import session_messages as wire
from sglang_loader.bucket_loader import NamedTensors, synchronize
from sglang_loader.engine_context import device_of, engine_context, tp_rank
from sglang_loader.load_plan import BucketLayout
from sglang_loader.plan_store import ModelLoader, SyncOutcome, loader_of
from sglang_loader.session_channel import Channel
from sglang_loader.session_messages import FromTrainer, SessionDescriptor, SessionError
from sglang_loader.shared_buffer import BufferHandle, map_buffer

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 30.0
MAX_LAYOUTS = 4096


def load_session(model: Any, named_tensors: NamedTensors) -> None:
    """Serve the session that the request invites to.

    Args:
        model: the SGLang model.
        named_tensors: one pair; the name is the session's descriptor, the tensor means nothing.

    Raises:
        SessionError: the trainer is gone, silent, aborted, or broke the protocol.
        Exception: what the model's `load_weights` raised; the trainer gets the traceback too.
    """
    if len(named_tensors) != 1:
        raise SessionError(f"a session is one (descriptor, tensor), got {len(named_tensors)}")
    descriptor = wire.decode_descriptor(named_tensors[0][0])
    if _visits.is_repeated(descriptor.token, model):
        return
    _Session(descriptor, _visits.models or (model,)).run()
    _visits.served = descriptor.token


class _Visits:
    """Which models a request visits: SGLang calls the loader for the draft, then for the target."""

    def __init__(self) -> None:
        self.models: tuple[Any, ...] = ()
        self.served: str | None = None

    def is_repeated(self, token: str, model: Any) -> bool:
        """True if the session that this call names has already loaded `model` with the others."""
        if token != self.served:
            return False
        if any(model is visited for visited in self.models):
            return True
        raise SessionError(
            "the engine asks for one session twice: this kind of speculative decoding needs "
            "another weight sync mode than 'compiled'"
        )


_visits = _Visits()


@contextmanager
def loading_into(models: Sequence[Any]) -> Iterator[None]:
    """Have the session of the request in this block load its buckets into all of `models`."""
    _visits.models = tuple(models)
    try:
        yield
    finally:
        _visits.models = ()


class _Layouts:
    """Layouts by digest, so that a known one need not travel again."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[BucketLayout, frozenset[str]]] = OrderedDict()

    @property
    def digests(self) -> list[str]:
        return list(self._known)

    def get(self, digest: str, encoded: bytes | None) -> tuple[BucketLayout, frozenset[str]]:
        """The layout and its tensors' names."""
        if encoded is not None and digest not in self._known:
            layout = wire.decode_layout(encoded, digest)
            names = frozenset(tensor.name for tensor in layout.tensors)
            if len(names) != len(layout.tensors):
                raise SessionError("a bucket has two tensors of one name")
            self._known[digest] = layout, names
            while len(self._known) > MAX_LAYOUTS:
                self._known.popitem(last=False)
        if digest not in self._known:
            raise SessionError(f"the layout with digest {digest} was never sent")
        self._known.move_to_end(digest)
        return self._known[digest]


class _Mappings:
    """The trainer's buffers in this process, by handle; they may outlive a session."""

    def __init__(self) -> None:
        self._mapped: dict[object, torch.Tensor] = {}
        self._used: set[object] = set()

    def get(self, handle: BufferHandle, device: torch.device) -> torch.Tensor:
        """Map the memory, or find it mapped."""
        buffer = map_buffer(handle, device)
        key = (buffer.data_ptr(), buffer.numel())
        self._used.add(key)
        return self._mapped.setdefault(key, buffer)

    def end_session(self, *, keep: bool) -> bool:
        """Unmap what the session did not use, or all; True if anything was dropped."""
        kept = {key: self._mapped[key] for key in self._used} if keep else {}
        dropped = len(kept) < len(self._mapped)
        self._mapped, self._used = kept, set()
        return dropped


_layouts = _Layouts()
_mappings = _Mappings()


class _Session:
    """The engine's part of one session."""

    def __init__(self, descriptor: SessionDescriptor, models: Sequence[Any]) -> None:
        self._descriptor = descriptor
        self._loaders: list[ModelLoader] = [loader_of(model) for model in models]
        self._models = models
        self._device = device_of(models[0])
        self._slots: dict[int, torch.Tensor] = {}
        self._names: list[frozenset[str]] = []

    def run(self) -> None:
        """Serve until commit; tell the trainer of a failure before raising it."""
        channel: Channel[FromTrainer] = Channel(
            self._descriptor.endpoint,
            bind=False,
            token=self._descriptor.token,
            timeout_s=self._descriptor.timeout_s,
            decode=wire.decode_from_trainer,
            peer="trainer",
        )
        with channel:
            try:
                self._serve(channel)
            except Exception:
                text = f"TP rank {tp_rank()}: {traceback.format_exc()}"
                with suppress(SessionError):  # the trainer may be what is gone
                    channel.send(wire.Failed, traceback=text)
                raise
            finally:
                self._let_go()

    def _serve(self, channel: Channel[FromTrainer]) -> None:
        channel.send(wire.Hello, layouts=_layouts.digests)
        welcome = channel.receive(timeout_s=HANDSHAKE_TIMEOUT_S)
        if isinstance(welcome, wire.Abort):
            raise SessionError(f"the trainer aborted the sync: {welcome.reason}")
        if not isinstance(welcome, wire.Welcome):
            raise SessionError(f"expected Welcome, got {type(welcome).__name__}")
        for model, loader in zip(self._models, self._loaders, strict=True):
            loader.start(
                engine_context(model),
                recheck_every_n_syncs=self._descriptor.recheck_every_n_syncs,
            )
        while True:
            message = channel.receive()
            if isinstance(message, wire.LoadBucket):
                self._load(message)
                channel.send(wire.BucketDone, index=message.index)
            elif isinstance(message, wire.MapBuffer):
                self._slots[message.slot] = _mappings.get(message.handle, self._device)
            elif isinstance(message, wire.Commit):
                outcome = self._commit(message)
                channel.send(
                    wire.Committed,
                    num_replayed=outcome.num_replayed,
                    num_eager=outcome.num_eager,
                    reason=outcome.reason,
                    may_read_in_place=outcome.may_read_in_place,
                )
                return
            elif isinstance(message, wire.Abort):
                raise SessionError(f"the trainer aborted the sync: {message.reason}")
            else:
                raise SessionError(f"unexpected {type(message).__name__}")

    def _load(self, message: wire.LoadBucket) -> None:
        if message.index != len(self._names):
            raise SessionError(f"got bucket {message.index}, expected {len(self._names)}")
        if message.slot not in self._slots:
            raise SessionError(f"bucket {message.index} lies in slot {message.slot}: not mapped")
        layout, names = _layouts.get(message.digest, message.layout)
        buffer = self._slots[message.slot]
        if message.offset < 0 or message.offset + layout.nbytes > buffer.numel():
            raise SessionError(
                f"bucket {message.index} at bytes {message.offset}+{layout.nbytes} leaves the "
                f"buffer of {buffer.numel()}"
            )
        source = buffer[message.offset : message.offset + layout.nbytes]
        for loader in self._loaders:
            loader.load(message.index, layout, source, read_only=message.read_only)
        self._names.append(names)
        synchronize(self._device)

    def _commit(self, commit: wire.Commit) -> SyncOutcome:
        """Every announced tensor came exactly once."""
        num_tensors = sum(map(len, self._names))
        if (commit.num_buckets, commit.num_tensors) != (len(self._names), num_tensors):
            raise SessionError(
                f"{num_tensors} tensors in {len(self._names)} buckets came, the trainer sent "
                f"{commit.num_tensors} in {commit.num_buckets}"
            )
        distinct = len(frozenset().union(*self._names))
        if distinct != num_tensors:
            raise SessionError(f"{num_tensors} tensors came, but only {distinct} names")
        outcomes = [loader.finish() for loader in self._loaders]
        synchronize(self._device)
        return min(outcomes, key=lambda outcome: outcome.num_replayed)

    def _let_go(self) -> None:
        self._slots.clear()
        if _mappings.end_session(keep=self._descriptor.keep_mappings):
            for loader in self._loaders:
                loader.unbind()
