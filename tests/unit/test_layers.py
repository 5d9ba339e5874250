"""Imports go one way: each folder knows those below it, and none above."""

import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from support.our_imports import imports

STRUCTURE = Path(__file__).parents[2] / "docs" / "structure.md"


def layers_of(package):
    """Folders and modules of a package, top to bottom, from its table in `docs/structure.md`."""
    rows = STRUCTURE.read_text().split(f"## `{package}`")[1].split("\n\n")[1].splitlines()
    names = re.findall(r"`(\w+)(?:/|\.py)`", "\n".join(row.split(" | ")[0] for row in rows))
    assert len(names) > 5
    return names


LAYERS = {package: layers_of(package) for package in ("sglang_loader", "verl_sglang_sync")}

WHO_IMPORTS = {
    "sglang": {"sglang_loader", "verl_sglang_sync.verl", "verl_sglang_sync.commands.bench"},
    "verl": {"verl_sglang_sync"},
}


IMPORTS = [(ours, f"{module}.{name}".rstrip(".")) for ours, module, name in imports()]


def layer_of(name, package):
    """Position of the layer that a module, or a name in it, belongs to; None: the package."""
    rest = name.removeprefix(f"{package}.")
    found = [layer for layer in LAYERS[package] if f"{rest}.".startswith(f"{layer}.")]
    return LAYERS[package].index(max(found, key=len)) if found else None


@pytest.mark.parametrize("package", LAYERS)
def test_no_folder_imports_one_above_it(package):
    upwards = [
        f"{module} imports {name}"
        for module, name in IMPORTS
        if module.startswith(f"{package}.")
        and name.startswith(f"{package}.")
        and (here := layer_of(module, package)) is not None
        and (there := layer_of(name, package)) is not None
        and there < here
    ]
    assert not upwards


COMMANDS = "verl_sglang_sync.commands"


def test_nothing_imports_the_commands():
    others = [
        f"{module} imports {name}"
        for module, name in IMPORTS
        if f"{name}.".startswith(f"{COMMANDS}.") and not module.startswith(f"{COMMANDS}.")
    ]
    assert not others


def test_verl_calls_the_router_in_one_place():
    router = "verl_sglang_sync.router"
    callers = [
        (module, name)
        for module, name in IMPORTS
        if f"{name}.".startswith(f"{router}.") and not module.startswith(f"{router}.")
    ]
    assert callers == [("verl_sglang_sync.verl.replica", f"{router}.registration.register")]


def test_no_modules_import_each_other():
    """Also not by an import in a function, or through other modules."""
    modules = {module.removesuffix(".__init__") for module, _ in IMPORTS}
    imported_by = TopologicalSorter()
    for module, name in IMPORTS:
        targets = {name, name.rpartition(".")[0]} & modules
        imported_by.add(module, *(targets - {module}))
    imported_by.prepare()  # raises CycleError, which names the modules


def test_every_module_is_in_a_layer():
    missing = {
        module
        for module, _ in IMPORTS
        for package in LAYERS
        if module.startswith(f"{package}.") and layer_of(module, package) is None
    }
    assert missing <= {f"{package}.__init__" for package in LAYERS}


def test_the_trainers_package_imports_only_shared_modules():
    """But for the probe, with which `doctor` looks at SGLang's processes."""
    allowed = ("sglang_loader.common.", "sglang_loader.probe.")
    others = [
        f"{module} imports {name}"
        for module, name in IMPORTS
        if module.startswith("verl_sglang_sync.")
        and name.startswith("sglang_loader")
        and not name.startswith(allowed)
    ]
    assert not others


@pytest.mark.parametrize("upstream", WHO_IMPORTS)
def test_upstream_is_imported_by_its_own_side_alone(upstream):
    others = [
        f"{module} imports {name}"
        for module, name in IMPORTS
        if name.split(".")[0] == upstream and not module.startswith(tuple(WHO_IMPORTS[upstream]))
    ]
    assert not others
