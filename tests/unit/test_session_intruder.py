"""Another user of the host swaps links above a trainer's socket while engines connect to it.

The intruder is a process of another user id, which only root can start.
"""

import os
import random
import signal
import socket
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from sglang_loader.common.session.channel import Channel, engine_end
from sglang_loader.common.session.folder import PREFIX, checked_address
from sglang_loader.common.session.messages import SessionError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="another user id: only root may take it")

INTRUDER = 65534
NUM_CONNECTIONS = 2000
CONTROL_LIMIT_S = 60.0
LONGEST_S = 0.0005
"""Time in which a link stays; from the check to the connection it is about as long."""
NAME = f"{PREFIX}x/1"


def listen(path):
    path.parent.mkdir(parents=True)
    path.parent.chmod(0o700)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(1000)
    return listener


def intrude(folder, reached):
    """Swap `folder/link`, and write a byte to `reached` for each connection that comes."""
    os.setgroups([])
    os.setgid(INTRUDER)
    os.setuid(INTRUDER)
    listener = listen(folder / "own" / NAME)
    listener.setblocking(False)
    places = [folder / name for name in ("to-trainer", "to-own")]
    while True:
        for place, target in zip(places, ("../trainer", "own"), strict=True):
            place.symlink_to(target)
            place.rename(folder / "link")
            time.sleep(random.uniform(0, LONGEST_S))
            try:
                listener.accept()[0].close()
                os.write(reached, b".")
            except BlockingIOError:
                pass


@contextmanager
def intruder(folder):
    """Its process runs in the body, which gets a function: how many connections came since?"""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    pid = os.fork()
    if pid == 0:
        try:
            intrude(folder, writing)
        finally:
            os._exit(1)

    def num_reached():
        try:
            return len(os.read(reading, 1 << 16))
        except BlockingIOError:
            return 0

    try:
        deadline = time.monotonic() + 20
        while not (folder / "link").is_symlink():
            assert time.monotonic() < deadline
        yield num_reached
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)


@pytest.fixture
def trainer():
    """Counts the connections that come to a trainer's socket; and the path to it that others can
    change.
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        listener = listen(folder / "trainer" / NAME)
        (folder / "trainer").chmod(0o755)
        (folder / "intruder").mkdir()
        os.chown(folder / "intruder", INTRUDER, INTRUDER)
        came = []

        def accept():
            while True:
                try:
                    came.append(listener.accept()[0].close())
                except OSError:
                    return

        thread = threading.Thread(target=accept)
        thread.start()
        yield folder / "intruder", came
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def checked_then_connected(endpoint):
    """As if what was checked were still there: the control."""
    with checked_address(endpoint):
        pass
    channel = Channel(endpoint, bind=False)
    channel.wait_connected()
    return channel


def outcome(connect, endpoint):
    """`connect`, and close; False if it was refused."""
    try:
        connect(endpoint).close()
    except SessionError as error:
        assert "another user owns the folder" in str(error)
        return False
    return True


def test_no_connection_reaches_another_user_who_swaps_links(trainer):
    folder, came = trainer
    endpoint = f"ipc://{folder}/link/{NAME}"
    with intruder(folder) as num_reached:
        num_tried, deadline = 0, time.monotonic() + CONTROL_LIMIT_S
        while not num_reached():
            outcome(checked_then_connected, endpoint)
            num_tried += 1
            assert time.monotonic() < deadline, "the control: links are not swapped fast enough"
        time.sleep(0.2)
        while num_reached():  # connections of the control
            time.sleep(0.2)
        came.clear()
        outcomes, num_wanted = [], max(NUM_CONNECTIONS, 5 * num_tried)
        while len(outcomes) < num_wanted or len(set(outcomes)) == 1:
            outcomes.append(outcome(engine_end, endpoint))
        time.sleep(0.2)
        assert num_reached() == 0
    assert set(outcomes) == {True, False}, "the link was swapped meanwhile"
    assert len(came) == sum(outcomes)
