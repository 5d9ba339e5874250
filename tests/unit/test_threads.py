"""Threads that are kept for the next step."""

import gc
import os
import threading
import time
import weakref

import pytest

from sglang_loader.common import threads
from sglang_loader.common.threads import MAX_IDLE, in_kept_thread

LIMIT_S = 10.0


@pytest.fixture(autouse=True)
def no_idle_threads():
    """Other tests have left theirs."""
    threads._idle.clear()


def own_thread(_):
    return threading.get_ident()


def wait_until(holds):
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def wait_idle():
    wait_until(lambda: threads._idle)


def test_next_step_runs_in_the_same_thread():
    first = in_kept_thread(own_thread, "kept").result(LIMIT_S)
    wait_idle()
    assert in_kept_thread(own_thread, "kept").result(LIMIT_S) == first != threading.get_ident()


def test_step_that_hangs_delays_no_other():
    hangs = threading.Event()
    slow = in_kept_thread(lambda _: hangs.wait(LIMIT_S), "kept")
    try:
        assert in_kept_thread(own_thread, "kept").result(LIMIT_S)
        assert not slow.done()
    finally:
        hangs.set()
    assert slow.result(LIMIT_S)


def test_few_idle_threads_are_kept():
    meet = threading.Barrier(MAX_IDLE + 2)
    before = threading.active_count()
    steps = [in_kept_thread(lambda _: meet.wait(LIMIT_S), "kept") for _ in range(MAX_IDLE + 1)]
    meet.wait(LIMIT_S)
    for step in steps:
        step.result(LIMIT_S)
    wait_until(lambda: threading.active_count() <= before + MAX_IDLE)


def test_error_leaves_the_thread_usable():
    def fails(_):
        raise OSError("planted")

    with pytest.raises(OSError, match="planted"):
        in_kept_thread(fails, "kept").result(LIMIT_S)
    wait_idle()
    assert in_kept_thread(own_thread, "kept").result(LIMIT_S)


def test_idle_thread_holds_nothing_of_its_step():
    class Payload:
        pass

    payload = Payload()
    held = weakref.ref(payload)
    step = in_kept_thread(lambda _, own=payload: None, "kept")
    step.result(LIMIT_S)
    del payload, step
    wait_idle()
    gc.collect()
    assert held() is None


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_forked_child_starts_its_own_thread():
    in_kept_thread(own_thread, "kept").result(LIMIT_S)
    wait_idle()
    if (child := os.fork()) == 0:
        is_good = False
        try:
            is_good = bool(in_kept_thread(own_thread, "kept").result(LIMIT_S))
        finally:
            os._exit(0 if is_good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
