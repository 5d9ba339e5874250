"""Which models a session loads is what SGLang's own update would load, for each of its workers.

The workers are SGLang's classes, without the models and GPUs that their constructors want.
"""

from __future__ import annotations

import base64
import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from contract.tiny_architectures import prepare_process
from sglang_loader.common.session import messages as wire
from sglang_loader.common.session.messages import SESSION_FORMAT
from sglang_loader.hooks import weights as weight_updater_hooks
from sglang_loader.hooks.weight_update import SpeculationUnknown, models_of
from sglang_loader.hooks.weights import update_on_all_ranks

prepare_process()
pytest.importorskip("sglang", reason="needs the SGLang that the plugin supports")

SPECULATIVE = "sglang.srt.speculative"
TARGET, DRAFT = object(), object()


class Target:
    """Stands for SGLang's `TpModelWorker`."""

    def __init__(self, tp_rank: int = 0) -> None:
        self.tp_rank = tp_rank
        self.model_runner = SimpleNamespace(model=TARGET)

    def update_weights_from_tensor(self, request: Any) -> tuple[bool, str]:
        raise AssertionError("a session does not go this way")


def updater_with(module: str | None, name: str, draft: Any = None) -> Any:
    """SGLang's updater, with a draft worker of this class."""
    target, worker = Target(), None
    if module is not None:
        try:
            imported = importlib.import_module(f"{SPECULATIVE}.{module}")
        except ImportError as error:
            reason = " ".join(str(error).split())[:80]
            pytest.skip(f"SGLang imports {module} only where CUDA's libraries are: {reason}")
        worker = object.__new__(getattr(imported, name))
        worker._target_worker, worker._draft_worker = target, draft
    return SimpleNamespace(tp_worker=target, draft_worker=worker)


EAGLE = SimpleNamespace(draft_runner=SimpleNamespace(model=DRAFT))
MULTI = SimpleNamespace(draft_runner=EAGLE.draft_runner, draft_runner_list=[EAGLE.draft_runner] * 3)


@pytest.mark.parametrize(
    ("module", "name", "draft", "expected"),
    [
        (None, "", None, [TARGET]),
        ("eagle_worker_v2", "EAGLEWorkerV2", EAGLE, [DRAFT, TARGET]),
        ("standalone_worker_v2", "StandaloneWorkerV2", EAGLE, [DRAFT, TARGET]),
        ("ngram_worker", "NGRAMWorker", None, [TARGET]),
        ("dflash_worker_v2", "DFlashWorkerV2", EAGLE, [TARGET]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_models_are_those_of_sglangs_own_update(
    module: str | None, name: str, draft: Any, expected: list[Any]
) -> None:
    updater = updater_with(module, name, draft)
    assert models_of(updater, syncs_draft=True) == expected
    assert models_of(updater, syncs_draft=False) == [TARGET]


def test_a_worker_whose_models_are_not_known_is_refused() -> None:
    """SGLang's own update of this one raises; loading the first of its drafts alone would not."""
    updater = updater_with("multi_layer_eagle_worker_v2", "MultiLayerEagleWorkerV2", MULTI)
    with pytest.raises(SpeculationUnknown, match="MultiLayerEagleWorkerV2"):
        models_of(updater, syncs_draft=True)
    assert models_of(updater, syncs_draft=False) == [TARGET]


def test_every_rank_serves_its_own_invitation(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []

    def serve(*arguments: Any, **_: Any) -> Any:
        served.append(arguments)
        return SimpleNamespace(conclude=lambda failures: served.append(failures))

    monkeypatch.setattr(weight_updater_hooks, "serve_session", serve)
    nothing = dict.fromkeys(("flush", "loading", "loaded"))
    update: Any = SimpleNamespace(run=lambda load: load() or [], **nothing)
    descriptors = [
        wire.SessionDescriptor(
            version=wire.SESSION_VERSION,
            endpoint=f"ipc:///tmp/{rank}",
            token="t",
            timeout_s=1.0,
            uses_plan=True,
            manifest_check="off",
            recheck_every_n_syncs=0,
            syncs_draft=True,
        )
        for rank in range(2)
    ]
    handles = [base64.b64encode(wire.encode_descriptor(each)).decode() for each in descriptors]
    request = SimpleNamespace(load_format=SESSION_FORMAT, serialized_named_tensors=handles)
    updater = SimpleNamespace(tp_worker=Target(tp_rank=1), draft_worker=None)
    assert weight_updater_hooks._serve_session(update, updater, request) == []
    assert [(*served[0][:2], served[0][3]), served[1]] == [(descriptors[1], [TARGET], None), []]


def test_a_format_of_another_release_is_refused_by_name() -> None:
    def original(*_: Any) -> None:
        raise AssertionError("SGLang would unpickle what is none")

    request = SimpleNamespace(load_format="sglang_loader.session.load_session")
    reply = update_on_all_ranks(original, SimpleNamespace(), request)
    assert not reply.success
    assert "different releases" in reply.message
    assert "sglang_loader.session.load_session" in reply.message


@pytest.mark.parametrize("load_format", [None, "flattened_bucket", "users.own.loader"])
def test_what_is_not_ours_is_left_to_sglang(load_format: str | None) -> None:
    request = SimpleNamespace(load_format=load_format)
    assert update_on_all_ranks(lambda *_: "sglang's", SimpleNamespace(), request) == "sglang's"
