"""Installed versions against the set that this release was tested with."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.version import Version

from verl_sglang_sync.doctor.check import Check, failed, passed, warned

DISTRIBUTION = "verl-sglang-sync"
TESTED = {
    "verl": "0.9.1",
    "sglang": "0.5.14",
    "torch": "2.11.0",
    "transformers": "5.8.1",
    "torch-memory-saver": "0.0.10",
    "ray": "2.60.0",
    "hydra-core": "1.3.8",
    "TransferQueue": "0.1.11",
}
TESTED_WITH_MEGATRON = {"megatron-core": "0.16.1", "mbridge": "0.15.1"}
TESTED_PYTHONS = ("3.11", "3.12")

Installed = Callable[[str], str | None]


def installed_version(name: str) -> str | None:
    """Version of an installed distribution, None if there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def version_checks(installed: Installed = installed_version) -> list[Check]:
    """Compare every package that the weight sync depends on.

    Another version is a warning inside our declared requirements and a failure outside of them.
    """
    allowed = _requirements(requires(DISTRIBUTION) or ())
    checks = [_python_check(platform.python_version())]
    for name, tested in TESTED.items():
        checks.append(compare(name, tested, installed(name), allowed.get(name.lower())))
    for name, tested in TESTED_WITH_MEGATRON.items():
        found = installed(name)
        if found is None:
            detail = f"not installed; for Megatron trainers: pip install {DISTRIBUTION}[megatron]"
            checks.append(passed(f"version of {name}", detail))
        else:
            checks.append(compare(name, tested, found, allowed.get(name.lower())))
    return checks


def compare(name: str, tested: str, found: str | None, allowed: Requirement | None) -> Check:
    """Judge one package; a local suffix such as "+cu130" makes no difference."""
    title = f"version of {name}"
    install = f'pip install "{name}=={tested}"'
    if found is None:
        return failed(title, f"not installed; tested with {tested}", install)
    if Version(found).public == Version(tested).public:
        return passed(title, f"{found}, as tested")
    if allowed is not None and not allowed.specifier.contains(found, prereleases=True):
        return failed(title, f"{found}; allowed: {allowed.specifier}", install)
    return warned(title, f"{found}; tested with {tested}", install)


def _python_check(found: str) -> Check:
    tested = ".".join(found.split(".")[:2]) in TESTED_PYTHONS
    if tested:
        return passed("version of Python", f"{found}, as tested")
    return warned("version of Python", f"{found}; tested with {', '.join(TESTED_PYTHONS)}")


def _requirements(lines: Iterable[str]) -> dict[str, Requirement]:
    """Our own declared requirements by lower-case name; those of extras are exact pins."""
    parsed = (Requirement(line) for line in lines)
    wanted = (
        requirement
        for requirement in parsed
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    )
    return {requirement.name.lower(): requirement for requirement in wanted}
