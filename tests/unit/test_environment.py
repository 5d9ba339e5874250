"""What `make` installs with releases of Megatron-Bridge other than the default one."""

import sys

import pytest

from support import environment

PYTHON = (3, 12, 1, "final", 0)
SGLANG, DEFAULT = "0.5.14", "0.3.1"


@pytest.fixture(autouse=True)
def python(monkeypatch):
    monkeypatch.setattr(sys, "version_info", PYTHON)


def installed(bridge, sglang=SGLANG):
    """Requirements by name, of all steps."""
    requirements = [each for _, step in environment.steps(sglang, bridge) for each in step]
    return {each.partition("==")[0]: each for each in requirements}


@pytest.mark.parametrize("sglang", [SGLANG, "0.5.17"])
@pytest.mark.parametrize("bridge", environment.NEWER_BRIDGES)
def test_a_newer_bridge_brings_its_core(bridge, sglang):
    default, newer = installed(DEFAULT, sglang), installed(bridge, sglang)
    core = environment.NEWER_BRIDGES[bridge]
    assert newer["megatron-bridge"] == f"megatron-bridge=={bridge}"
    assert newer["megatron-core"] == core != default["megatron-core"]
    changed = {name for name, each in default.items() if newer[name] != each}
    assert changed == {"megatron-bridge", "megatron-core"}


def test_every_bridge_has_a_key_of_its_own():
    keys = {environment.key(SGLANG, each) for each in (DEFAULT, *environment.NEWER_BRIDGES)}
    assert len(keys) == 1 + len(environment.NEWER_BRIDGES)


def test_an_unknown_bridge_is_refused():
    with pytest.raises(ValueError, match=r"BRIDGE=0\.4\.0: not one of 0\.3\.1, 0\.5\.0, 0\.6\.2"):
        environment.key(SGLANG, "0.4.0")


def test_a_newer_bridge_needs_python_312(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 11, 7, "final", 0))
    environment.key(SGLANG, DEFAULT)
    with pytest.raises(ValueError, match=r"BRIDGE=0\.5\.0 needs Python 3\.12"):
        environment.key(SGLANG, "0.5.0")
