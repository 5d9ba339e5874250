"""Checks of the installation: versions, entry points, and their use by verl and SGLang."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, requires, version

from packaging.requirements import Requirement
from packaging.version import Version

from sglang_loader.probe import PluginFacts
from verl_sglang_sync.commands.doctor.check import FAIL, OK, WARN, Check, last_line, run_probe

DISTRIBUTION = "verl-sglang-sync"
TESTED = {
    "verl": "0.9.1",
    "torch-memory-saver": "0.0.10",
    "ray": "2.60.0",
    "hydra-core": "1.3.8",
    "TransferQueue": "0.1.11",
    "mbridge": "0.15.1",  # for Megatron trainers, as those below; skipped if it is not installed
}
TESTED_BRIDGES = {"0.3.1": "0.16.1", "0.5.0": "0.18.2", "0.6.2": "0.19.2"}
"""Tested releases of Megatron-Bridge, with the megatron-core that each was tested with. The first
one is the default."""
TESTED_SGLANG = {
    "0.5.14": {"torch": "2.11.0", "transformers": "5.8.1"},
    "0.5.17": {"torch": "2.11.0", "transformers": "5.12.1"},
    "0.5.20": {"torch": "2.13.0", "transformers": "5.12.1"},
    "0.5.23": {"torch": "2.14.1", "transformers": "5.19.0"},
}
"""Tested releases of SGLang, with the other packages that each was tested with. pip resolves to the
first one."""
SGLANG_RUNS = {
    "0.5.14": "all tests, and trainings on GPUs",
    "0.5.17": "the fast tests, and one GPU",
    "0.5.20": "its interfaces, and syncs of engines, on CPUs",
    "0.5.23": "the fast tests, on CPUs",
}
"""Tests that were run with each of these releases."""
DEFAULT_SGLANG = next(iter(TESTED_SGLANG))

NAME = "verl_sglang_sync"
REPLACED = "another plugin replaced ours, or ours did not load"
LOAD_ADVICE = "unset VERL_USE_EXTERNAL_PLUGINS and SGLANG_PLUGINS, or reinstall verl-sglang-sync"

Installed = Callable[[str], str | None]


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution, or None if there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def version_checks(installed: Installed = installed_version) -> list[Check]:
    """Compare the installed packages with the requirements and with the tested versions."""
    tested = tested_beside(installed("sglang"), installed("megatron-bridge"))
    checks = [requirements_check(tested, installed)]
    allowed = {requirement.name.lower(): requirement for requirement in _requirements(DISTRIBUTION)}
    if "sglang" in allowed:
        allowed["sglang"] = _with_excluded(allowed["sglang"])
    for name, wanted in tested.items():
        if actual := installed(name):
            checks.append(version_check(name, wanted, actual, allowed.get(name.lower())))
    return checks


def tested_beside(sglang: str | None, bridge: str | None = None) -> dict[str, str]:
    """Return the versions tested with these releases, or with the default releases.

    Args:
        sglang: the installed version, or None. The default serves for an untested one, too.
        bridge: the same of Megatron-Bridge.
    """
    # `public` drops a local suffix such as "+cu130".
    public = DEFAULT_SGLANG if sglang is None else Version(sglang).public
    release = public if public in TESTED_SGLANG else DEFAULT_SGLANG
    of_bridge = bridge if bridge in TESTED_BRIDGES else next(iter(TESTED_BRIDGES))
    megatron = {"megatron-core": TESTED_BRIDGES[of_bridge], "megatron-bridge": of_bridge}
    return TESTED | megatron | {"sglang": release} | TESTED_SGLANG[release]


def _with_excluded(requirement: Requirement) -> Requirement:
    """Return the requirement without its exclusions."""
    # The exclusions keep pip from SGLang 0.5.18 to 0.5.22. pip would build their `cuda-tile`, and
    # fail, before pip sees that verl excludes their transformers. Images with `cuda-tile` run them.
    kept = (specifier for specifier in requirement.specifier if specifier.operator != "!=")
    return Requirement(f"{requirement.name}{','.join(map(str, kept))}")


def _requirements(distribution: str) -> list[Requirement]:
    """Return a distribution's requirements on this machine, without extras. Empty if missing."""
    try:
        declared = map(Requirement, requires(distribution) or ())
    except PackageNotFoundError:
        return []
    return [r for r in declared if r.marker is None or r.marker.evaluate({"extra": ""})]


def requirements_check(tested: dict[str, str], installed: Installed = installed_version) -> Check:
    """Check that all requirements of verl, of SGLang and of this project are installed."""
    # verl is installed with `pip --no-deps` beside newer releases of SGLang, which may leave out
    # some requirements.
    missing = {
        requirement.name: owner
        for owner in ("verl", "sglang", DISTRIBUTION)
        for requirement in _requirements(owner)
        if installed(requirement.name) is None
    }
    if not missing:
        return Check("requirements", OK, "all of verl's, SGLang's and ours are installed")
    detail = ", ".join(f"{name} (of {owner})" for name, owner in sorted(missing.items()))
    wanted = [f'"{name}=={tested[name]}"' if name in tested else name for name in sorted(missing)]
    advice = f"pip install {' '.join(wanted)}"
    return Check("requirements", FAIL, f"not installed: {detail}", advice)


def version_check(name: str, tested: str, actual: str, allowed: Requirement | None) -> Check:
    """Check the version of one package. An untested version that is allowed is a warning.

    Args:
        tested: the tested version.
        actual: the installed version. Local suffixes such as "+cu130" are ignored.
        allowed: this project's requirement of the package, if there is one.
    """
    title, install = f"version of {name}", f'pip install "{name}=={tested}"'
    if Version(actual).public == Version(tested).public:
        run = f": {SGLANG_RUNS[tested]}" if name == "sglang" else ""
        return Check(title, OK, f"{actual}, as tested{run}")
    if allowed is not None and not allowed.specifier.contains(actual, prereleases=True):
        return Check(title, FAIL, f"{actual}, allowed: {allowed.specifier}", install)
    runs = ", ".join(f"{release} ({run})" for release, run in SGLANG_RUNS.items())
    versions = runs if name == "sglang" else tested
    return Check(title, WARN, f"{actual}, tested with {versions}", install)


def probe_verl() -> PluginFacts:
    """Import verl, and report what it uses, and the error of our entry point. A probe."""
    import verl.utils.config
    from verl.workers.rollout import base, replica

    hooks = {}
    for used in (
        base.get_rollout_class("sglang", "async"),
        replica.RolloutReplicaRegistry.get("sglang"),
        verl.utils.config.validate_config,
    ):
        is_ours = used.__module__.startswith(f"{NAME}.")
        hooks[f"{used.__module__}.{used.__qualname__}"] = is_ours
    load_errors = []
    # verl has hidden the error of an import that failed. The same import fails once more.
    try:
        for entry_point in entry_points(group="verl.plugins", name=NAME):
            entry_point.load()
    except Exception:
        load_errors.append(traceback.format_exc())
    return PluginFacts(load_errors=load_errors, hooks=hooks)


def plugin_checks(
    engine: str, probe: Callable[[], PluginFacts], environment: Mapping[str, str]
) -> Iterator[Check]:
    """Check in a new process that verl or SGLang loads our entry point, and uses our hooks."""
    facts, title = run_probe(probe, environment), f"{engine} plugin"
    if facts.load_errors:
        yield Check(title, FAIL, last_line(facts.load_errors[0]), "\n".join(facts.load_errors))
    elif not any(facts.hooks.values()):
        yield Check(title, FAIL, f"{engine} does not load it", LOAD_ADVICE)
    else:
        yield Check(title, OK, f"{engine} loads it")
    title, lost = f"{engine} hooks", [name for name, ours in facts.hooks.items() if not ours]
    if facts.hooks and not lost:
        yield Check(title, OK, f"all {len(facts.hooks)} are in place")
    else:
        yield Check(title, FAIL, f"not ours: {', '.join(lost) or 'all'}", REPLACED)
