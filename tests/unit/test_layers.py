"""Imports go one way: each folder knows those below it, and none above."""

import pytest

from support.our_imports import imports

LAYERS = {
    "sglang_loader": (
        "sglang_plugin",
        "hooks",
        "session",
        "host_backup",
        "load_plan",
        "upstream",
        "common",
    ),
    "verl_sglang_sync": (
        "verl_plugin",
        "commands",
        "verl",
        "router",
        "sync",
        "routes",
        "engine",
        "sources",
        "preflight",
        "collective",
        "config",
        "report",
        "stages",
        "http_settings",
    ),
}
"""Folders and modules of each package, top to bottom."""

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


def test_the_trainers_package_imports_what_both_sides_share_alone():
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
