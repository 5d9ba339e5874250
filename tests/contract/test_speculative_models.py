"""Which models a session loads is what SGLang's own update would load, for each of its workers.

The workers are SGLang's classes, without the models and GPUs that their constructors want.
"""

import importlib
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from contract.tiny_architectures import prepare_process
from sglang_loader.hooks.weights import update_on_all_ranks
from sglang_loader.upstream import SpeculationUnknown, runners_of

prepare_process()

MANAGERS = "sglang.srt.managers"
IO = importlib.import_module(f"{MANAGERS}.io_struct")
Updater = importlib.import_module(
    f"{MANAGERS}.scheduler_components.weight_updater"
).SchedulerWeightUpdaterManager
SPECULATIVE = "sglang.srt.speculative"
TARGET, DRAFT = object(), object()
DRAFT_RUNNER = SimpleNamespace(model=DRAFT)
TELLS_ITS_RUNNERS = hasattr(Updater, "_select_runners")
"""From 0.5.21 on."""


class Target:
    """Stands for SGLang's `TpModelWorker`."""

    def __init__(self):
        self.model_runner = SimpleNamespace(model=TARGET)

    def update_weights_from_tensor(self, request):
        raise AssertionError("a session does not go this way")

    def weight_update_runners(self):
        return [("target", self.model_runner)]


def updater_with(module, name, draft=None):
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
        if TELLS_ITS_RUNNERS and name == "DFlashWorkerV2":
            worker.draft_model_runner = DRAFT_RUNNER
    updater = object.__new__(Updater)
    updater.tp_worker, updater.draft_worker = target, worker
    return updater


def models_of(updater, *, syncs_draft):
    return [runner.model for runner in runners_of(updater, syncs_draft=syncs_draft)]


EAGLE = SimpleNamespace(draft_runner=DRAFT_RUNNER, draft_runners=[DRAFT_RUNNER])
MULTI = SimpleNamespace(draft_runner=DRAFT_RUNNER, draft_runners=[DRAFT_RUNNER] * 3)


@pytest.mark.parametrize(
    ("module", "name", "draft", "expected"),
    [
        (None, "", None, [TARGET]),
        ("eagle_worker_v2", "EAGLEWorkerV2", EAGLE, [DRAFT, TARGET]),
        ("standalone_worker_v2", "StandaloneWorkerV2", EAGLE, [DRAFT, TARGET]),
        ("ngram_worker", "NGRAMWorker", None, [TARGET]),
        ("dflash_worker_v2", "DFlashWorkerV2", EAGLE, [DRAFT] * TELLS_ITS_RUNNERS + [TARGET]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_models_are_those_of_sglangs_own_update(module, name, draft, expected):
    updater = updater_with(module, name, draft)
    assert models_of(updater, syncs_draft=True) == expected
    assert models_of(updater, syncs_draft=False) == [TARGET]


def test_a_worker_with_unknown_models_is_refused():
    """SGLang's own update of this one raises, where it does not tell them; loading the first of its
    drafts alone would not.
    """
    updater = updater_with("multi_layer_eagle_worker_v2", "MultiLayerEagleWorkerV2", MULTI)
    if TELLS_ITS_RUNNERS:
        assert models_of(updater, syncs_draft=True) == [DRAFT] * 3 + [TARGET]
    else:
        with pytest.raises(SpeculationUnknown, match="MultiLayerEagleWorkerV2"):
            models_of(updater, syncs_draft=True)
    assert models_of(updater, syncs_draft=False) == [TARGET]


def test_another_releases_format_is_refused_by_name():
    original = Mock(side_effect=AssertionError("SGLang would unpickle what is none"))
    request = SimpleNamespace(load_format="sglang_loader.session.load_session")
    reply = update_on_all_ranks(original, SimpleNamespace(), request)
    assert not reply.success
    assert "different releases" in reply.message
    assert "sglang_loader.session.load_session" in reply.message


@pytest.mark.parametrize("load_format", [None, "flattened_bucket", "users.own.loader"])
def test_what_is_not_ours_is_left_to_sglang(load_format):
    fields = {"serialized_named_tensors": [], "load_format": load_format}
    request = IO.UpdateWeightsFromTensorReqInput(**fields)
    worker = SimpleNamespace(server_args=SimpleNamespace(custom_weight_loader=None))
    updater = SimpleNamespace(tp_worker=worker)
    assert update_on_all_ranks(lambda *_: "sglang's", updater, request) == "sglang's"
