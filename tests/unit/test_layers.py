"""Imports go one way: each folder knows those below it, and none above."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"
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
        "cli",
        "bench",
        "doctor",
        "report_files",
        "verl",
        "sync",
        "routes",
        "engine",
        "sources",
        "preflight",
        "collective",
        "config",
        "report",
        "stages",
        "engine.server_client",
    ),
}
"""Folders and modules of each package, top to bottom."""

WHO_IMPORTS = {
    "sglang": {"sglang_loader", "verl_sglang_sync.verl", "verl_sglang_sync.bench"},
    "verl": {"verl_sglang_sync"},
}


def imports(package: str) -> Iterator[tuple[str, str]]:
    """(module, what it imports at the top of the file or in a function)."""
    for path in sorted((PLUGINS / package).rglob("*.py")):
        module = ".".join(path.relative_to(PLUGINS).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                yield from ((module, f"{node.module}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((module, alias.name) for alias in node.names)


def layer_of(name: str, package: str) -> int | None:
    """Position of the layer that a module, or a name in it, belongs to; None: the package."""
    rest = name.removeprefix(f"{package}.")
    found = [layer for layer in LAYERS[package] if f"{rest}.".startswith(f"{layer}.")]
    return LAYERS[package].index(max(found, key=len)) if found else None


@pytest.mark.parametrize("package", LAYERS)
def test_no_folder_imports_one_above_it(package: str) -> None:
    upwards = [
        f"{module} imports {name}"
        for module, name in imports(package)
        if name.startswith(f"{package}.")
        and (here := layer_of(module, package)) is not None
        and (there := layer_of(name, package)) is not None
        and there < here
    ]
    assert not upwards


def test_the_trainers_package_imports_what_both_sides_share_alone() -> None:
    """But for the probe, with which `doctor` looks at SGLang's processes."""
    allowed = ("sglang_loader.common.", "sglang_loader.probe.")
    others = [
        f"{module} imports {name}"
        for module, name in imports("verl_sglang_sync")
        if name.startswith("sglang_loader") and not name.startswith(allowed)
    ]
    assert not others


@pytest.mark.parametrize("upstream", WHO_IMPORTS)
def test_upstream_is_imported_by_its_own_side_alone(upstream: str) -> None:
    others = [
        f"{module} imports {name}"
        for package in LAYERS
        for module, name in imports(package)
        if name.split(".")[0] == upstream and not module.startswith(tuple(WHO_IMPORTS[upstream]))
    ]
    assert not others
