"""Checks of the installation: versions, entry points, and their use by verl and SGLang."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, requires, version
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from sglang_loader.probe import SGLangFacts
from verl_sglang_sync.commands.doctor.check import FAIL, OK, WARN, Check, last_line

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
REINSTALL = "reinstall, in a clone of verl-sglang-sync: pip install --no-deps -e ."
REPLACED = "another plugin replaced ours, or ours did not load"

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


def probe_verl() -> list[Check]:
    """Import verl and its rollout classes, and check our entry point and hooks. A probe."""
    import verl.utils.config
    from verl.workers.rollout import base, replica

    variable = "VERL_USE_EXTERNAL_PLUGINS"
    policy = os.environ.get(variable, "auto").strip().lower()
    entries = entry_points(group="verl.plugins", name=NAME)
    errors = []
    if policy != "none":
        # verl has hidden the error of an import that failed. The same import fails once more.
        try:
            for entry_point in entries:
                entry_point.load()
        except Exception:
            errors.append(traceback.format_exc())
    hooks: dict[str, Callable[[], Any]] = {
        "verl.rollout.WeightSyncRollout": partial(base.get_rollout_class, "sglang", "async"),
        "verl.replica.WeightSyncReplica": partial(replica.RolloutReplicaRegistry.get, "sglang"),
        "preflight.with_recipe_check.<locals>.validate": partial(
            getattr, verl.utils.config, "validate_config"
        ),
    }
    return [
        plugin_check("verl", entries, errors, variable, policy, everything="auto"),
        hooks_check(hooks),
    ]


def hooks_check(hooks: Mapping[str, Callable[[], Any]]) -> Check:
    """Check that verl uses our classes and functions.

    Args:
        hooks: functions that return what verl uses, by the name in our package.
    """
    wrong = []
    for ours, look_up in hooks.items():
        try:
            used = look_up()
            name = f"{used.__module__}.{used.__qualname__}"
        except Exception as error:
            name = repr(error)
        if name != f"{NAME}.{ours}":
            wrong.append(f"verl has {name}, not {NAME}.{ours}")
    if wrong:
        return Check("verl hooks", FAIL, "\n".join(wrong), REPLACED)
    return Check("verl hooks", OK, f"all {len(hooks)} are in place")


def sglang_checks(facts: SGLangFacts) -> list[Check]:
    """Check that SGLang loads our entry point and applies our hooks."""
    entries = entry_points(group="sglang.srt.plugins", name=NAME)
    missing = sorted(path for path, applied in facts.hooks.items() if not applied)
    hooks = Check("SGLang hooks", OK, f"all {len(facts.hooks)} are in place")
    if missing or not facts.hooks:
        detail = f"not applied: {', '.join(missing) or 'none is registered'}"
        hooks = Check("SGLang hooks", FAIL, detail, "see the SGLang plugin's error")
    loaded = entries, facts.load_errors, "SGLANG_PLUGINS", facts.policy
    return [plugin_check("SGLang", *loaded, everything=""), hooks]


def plugin_check(
    who: str,
    entries: Iterable[EntryPoint],
    load_errors: Sequence[str],
    variable: str,
    policy: str,
    *,
    everything: str,
) -> Check:
    """Check that verl or SGLang loads our entry point.

    Args:
        who: "verl" or "SGLang".
        entries: our entry points in the installed metadata.
        load_errors: tracebacks of entry points that failed.
        variable: the environment variable that selects plugins.
        policy: the variable's value, a list of plugins or `everything`.
        everything: the value that selects all plugins.
    """
    title, targets = f"{who} plugin", sorted({entry_point.value for entry_point in entries})
    if not targets:
        return Check(title, FAIL, f"no entry {NAME!r} in the installed metadata", REINSTALL)
    if load_errors:
        return Check(title, FAIL, last_line(load_errors[0]), "\n".join(load_errors))
    if policy != everything and NAME not in map(str.strip, policy.split(",")):
        detail = f"{variable}={policy!r} keeps {who} from loading it"
        return Check(title, FAIL, detail, f"unset it, or add {NAME} to the list")
    return Check(title, OK, f"{who} loads {', '.join(targets)}")
