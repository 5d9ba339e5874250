"""What holds for all tests, and training runs, which tests of several files wait for."""

import gc
import os

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # SGLang reads it while it is imported

# torch looks up the name of every host that it connects: what a busy DNS server drops is asked for
# again after 1 s, not 5.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")

# Torch's flight recorder adds each gloo group to a map that no lock guards, when the group is first
# used. Where the ranks of a test are threads of one process, that ended the process at times.
os.environ["TORCH_FR_BUFFER_SIZE"] = "0"

# Tests leave no load plans to each other. A test of saved plans names a folder of its own.
os.environ["VERL_SGLANG_SYNC_LOAD_PLANS"] = ""

# A busy machine makes any example slow; a test that hangs is ended by its job's limit.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


def pytest_addoption(parser):
    parser.addoption("--two-lanes", action="store_true", help="run two files of tests at a time")


def pytest_configure(config):
    """Start the fork server of two lanes early: its imports take as long as the collection."""
    are_all = config.args_source is config.ArgsSource.TESTPATHS and not config.option.keyword
    if _has_two_lanes(config) and are_all and not config.option.collectonly:
        from support.forks import start_fork_server

        start_fork_server()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Import torch, verl and SGLang without collecting garbage, which takes an eighth of the time,
    and leave alone from then on what they have made.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def _has_two_lanes(config):
    """CUDA, which a GPU machine's tests begin to use as they are collected, cannot be forked."""
    return config.getoption("two_lanes") and not torch.cuda.is_available()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    if _has_two_lanes(session.config):
        from support.lanes import run_in_two_lanes

        return run_in_two_lanes(session)
    return None


def runs_of(session):
    """The training runs of all selected tests, in their order."""
    params = (getattr(item, "callspec", None) for item in session.items)
    runs = (spec.params["trained"] for spec in params if spec and "trained" in spec.params)
    return list(dict.fromkeys(runs))


@pytest.fixture(scope="session")
def preloaded(tmp_path_factory):
    """Variables of processes that are forked with the libraries of verl and SGLang imported."""
    from support.preloaded import preloaded_python

    with preloaded_python(tmp_path_factory.mktemp("preloaded")) as variables:
        yield variables


@pytest.fixture(scope="session")
def trainings(request, tmp_path_factory, preloaded):
    """Starts the runs. The tests that wait for them follow each other, in files that are named
    `test_training_*`: a test with limits of its own does not run beside them.
    """
    from support.training import started

    folder = tmp_path_factory.mktemp("training")
    with started(runs_of(request.session), folder, preloaded) as futures:
        yield futures


@pytest.fixture(scope="session")
def training_ahead(request):
    """For tests without limits that take minutes on one core: the run begins beside them, if there
    is only one, which ends before they do.
    """
    if len(runs_of(request.session)) == 1:
        request.getfixturevalue("trainings")


@pytest.fixture
def trained(request, trainings):
    """The folder of the run that a test names by indirect parametrization, when it has ended."""
    folder = trainings[request.param].result()
    return folder
