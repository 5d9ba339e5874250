"""All that the installed verl uses of its device module and platform is there on a CPU, too."""

import ast
import sys
from functools import cache
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cpu_platform import CpuPlatform

from support.forks import python_path
from support.processes import run_process


class Uses(ast.NodeVisitor):
    """Dotted names that a file reads of what `function()` returns, also by way of a variable."""

    def __init__(self, function):
        self._function = function
        self._variables = [set()]
        self.names = set()

    def _is_it(self, node):
        if isinstance(node, ast.Name):
            return any(node.id in known for known in self._variables)
        called = node.func if isinstance(node, ast.Call) else None
        return getattr(called, "id", getattr(called, "attr", None)) == self._function

    def visit_FunctionDef(self, node):
        self._variables.append(set())
        self.generic_visit(node)
        self._variables.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node):
        if self._is_it(node.value):
            self._variables[-1] |= {each.id for each in node.targets if isinstance(each, ast.Name)}
        self.generic_visit(node)

    def visit_Attribute(self, node):
        names, inner = [node.attr], node.value
        while isinstance(inner, ast.Attribute):
            names.append(inner.attr)
            inner = inner.value
        if self._is_it(inner):
            self.names.add(".".join(reversed(names)))
            return  # its shorter part is no other name
        self.generic_visit(node)


def uses_in(source, function):
    found = Uses(function)
    found.visit(ast.parse(source))
    return found.names


@cache
def uses_of_verl(function):
    """For each name a file that uses it."""
    (verl,) = find_spec("verl").submodule_search_locations
    files = {str(path.relative_to(verl)): path for path in sorted(Path(verl).rglob("*.py"))}
    found = {}
    for file, path in files.items():
        source = path.read_text()
        if function in source:
            found |= dict.fromkeys(uses_in(source, function), file)
    return found


def missing(thing, names):
    """Those of the names that the thing does not have."""
    lacks = set()
    for name in names:
        try:
            attrgetter(name)(thing)
        except AttributeError:
            lacks.add(name)
    return lacks


def test_every_call_of_the_device_module_exists():
    uses = uses_of_verl("get_torch_device")
    assert {"set_rng_state", "memory_allocated", "memory._dump_snapshot", "Stream"} <= set(uses)
    assert len(uses) > 20
    lacks = missing(CpuPlatform.device_module, uses)
    assert not lacks, {name: uses[name] for name in lacks}


def test_every_call_of_the_platform_exists():
    uses = uses_of_verl("get_platform")
    assert len(uses) > 15
    assert not missing(CpuPlatform(), uses)


def test_search_finds_calls_and_check_finds_gaps():
    source = """
def one():
    get_torch_device().empty_cache()
    device = get_torch_device()
    return lambda: device.memory._snapshot()

def another(device):
    verl.get_torch_device().current_stream().wait_stream(device.elsewhere)
"""
    uses = uses_in(source, "get_torch_device")
    assert uses == {"empty_cache", "memory._snapshot", "current_stream"}
    assert missing(SimpleNamespace(empty_cache=0, memory=0), uses) == uses - {"empty_cache"}


def test_the_random_state_is_restored():
    device = CpuPlatform.device_module
    state = device.get_rng_state()
    drawn = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)


def test_the_memory_is_the_machines():
    device = CpuPlatform.device_module
    free, total = device.mem_get_info()
    assert 0 < free <= total == device.get_device_properties("cpu").total_memory
    with pytest.raises(RuntimeError, match="only a GPU's allocator has a memory history"):
        device.memory._dump_snapshot("x.pickle")


PRINT_PLATFORM = "import verl.plugin.platform as p; print(p.PlatformRegistry.registered_names())"


@pytest.mark.parametrize(
    ("platform", "module", "registered"),
    [
        pytest.param("", "", False, marks=pytest.mark.slow),
        pytest.param("", "cpu_platform", False, marks=pytest.mark.slow),
        ("cpu", "cpu_platform", True),
    ],
)
def test_verl_gets_the_platform_if_variables_name_it(platform, module, registered, tmp_path):
    environment = {"PYTHONPATH": python_path(), "VERL_PLATFORM": platform}
    environment["VERL_USE_EXTERNAL_MODULES"] = module
    command = (sys.executable, "-c", PRINT_PLATFORM)
    ended = run_process(*command, cwd=tmp_path, environment=environment)
    assert ended.returncode == 0, ended.stderr
    assert ("'cpu'" in ended.stdout.splitlines()[-1]) == registered
