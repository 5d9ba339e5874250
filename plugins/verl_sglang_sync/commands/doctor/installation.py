"""Checks of the installation: versions, entry points, and whether verl and SGLang load them."""

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
    # For Megatron trainers; skipped if they are not installed.
    "megatron-core": "0.16.1",
    "megatron-bridge": "0.3.1",
    "mbridge": "0.15.1",
}
TESTED_SGLANG = {
    "0.5.14": {"torch": "2.11.0", "transformers": "5.8.1"},
    "0.5.17": {"torch": "2.11.0", "transformers": "5.12.1"},
    "0.5.23": {"torch": "2.14.1", "transformers": "5.19.0"},
}
"""Tested releases of SGLang, with packages of their own; pip resolves to the first."""
DEFAULT_SGLANG = next(iter(TESTED_SGLANG))

NAME = "verl_sglang_sync"
REINSTALL = "reinstall, in a clone of verl-sglang-sync: pip install --no-deps -e ."
REPLACED = "another plugin replaced ours, or ours did not load"

Installed = Callable[[str], str | None]


def installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def version_checks(installed: Installed = installed_version) -> list[Check]:
    """Compare the packages that the weight sync depends on with the tested versions;
    `requirements_check` reports those that are missing.
    """
    tested = tested_beside(installed("sglang"))
    checks = [requirements_check(tested, installed)]
    allowed = {each.name.lower(): each for each in _requirements(DISTRIBUTION)}
    for name, wanted in tested.items():
        if found := installed(name):
            checks.append(version_check(name, wanted, found, allowed.get(name.lower())))
    return checks


def tested_beside(sglang: str | None) -> dict[str, str]:
    """The tested versions beside this release of SGLang, or beside the default if untested."""
    public = DEFAULT_SGLANG if sglang is None else Version(sglang).public
    release = public if public in TESTED_SGLANG else DEFAULT_SGLANG
    return TESTED | {"sglang": release} | TESTED_SGLANG[release]


def _requirements(distribution: str) -> list[Requirement]:
    """A distribution's requirements here, without its extras; none if it is not installed."""
    try:
        declared = map(Requirement, requires(distribution) or ())
    except PackageNotFoundError:
        return []
    return [r for r in declared if r.marker is None or r.marker.evaluate({"extra": ""})]


def requirements_check(tested: dict[str, str], installed: Installed = installed_version) -> Check:
    """Check that all requirements of verl, SGLang and ours are installed: `pip --no-deps`, which
    newer SGLangs need for verl, may leave some out.
    """
    missing = {
        each.name: owner
        for owner in ("verl", "sglang", DISTRIBUTION)
        for each in _requirements(owner)
        if installed(each.name) is None
    }
    if not missing:
        return Check("requirements", OK, "all of verl's, SGLang's and ours are installed")
    detail = ", ".join(f"{name} (of {owner})" for name, owner in sorted(missing.items()))
    wanted = [f'"{name}=={tested[name]}"' if name in tested else name for name in sorted(missing)]
    advice = f"pip install {' '.join(wanted)}"
    return Check("requirements", FAIL, f"not installed: {detail}", advice)


def version_check(name: str, tested: str, found: str, allowed: Requirement | None) -> Check:
    """Check one package: an untested version that our requirements allow is a warning. Local
    suffixes such as "+cu130" are ignored.
    """
    title, install = f"version of {name}", f'pip install "{name}=={tested}"'
    if Version(found).public == Version(tested).public:
        return Check(title, OK, f"{found}, as tested")
    if allowed is not None and not allowed.specifier.contains(found, prereleases=True):
        return Check(title, FAIL, f"{found}; allowed: {allowed.specifier}", install)
    others = ", ".join(TESTED_SGLANG) if name == "sglang" else tested
    return Check(title, WARN, f"{found}; tested with {others}", install)


def probe_verl() -> list[Check]:
    """Probe: import verl and its rollout classes, and with them our entry point and sglang."""
    import verl.utils.config
    from verl.workers.rollout import base, replica

    variable = "VERL_USE_EXTERNAL_PLUGINS"
    policy = os.environ.get(variable, "auto").strip().lower()
    entries = entry_points(group="verl.plugins", name=NAME)
    errors = []
    if policy != "none":
        try:  # again: a module that failed to import fails in the same way
            for entry_point in entries:
                entry_point.load()
        except Exception:
            errors.append(traceback.format_exc())  # verl hides it
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
    """Check that verl uses our classes and functions, given by their names in our package."""
    wrong = []
    for ours, look in hooks.items():
        try:
            found = look()
            name = f"{found.__module__}.{found.__qualname__}"
        except Exception as error:
            name = repr(error)
        if name != f"{NAME}.{ours}":
            wrong.append(f"{name}, not {NAME}.{ours}")
    if wrong:
        return Check("verl hooks", FAIL, f"verl has {'; '.join(wrong)}", REPLACED)
    return Check("verl hooks", OK, f"all {len(hooks)} are in place")


def sglang_checks(facts: SGLangFacts) -> list[Check]:
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
    """Check that verl or SGLang (`who`) loads our entry point. `policy` is the value of `variable`:
    `everything`, or a list of plugins.
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
