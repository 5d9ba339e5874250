"""Checks of the installation: versions, entry points, and what verl and SGLang load by them."""

from __future__ import annotations

import os
import platform
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, requires, version

from packaging.requirements import Requirement
from packaging.version import Version

from sglang_loader.probe import SGLangFacts
from verl_sglang_sync.doctor.check import FAIL, OK, WARN, Check, last_line

DISTRIBUTION = "verl-sglang-sync"
TESTED = {
    "verl": "0.9.1",
    "torch-memory-saver": "0.0.10",
    "ray": "2.60.0",
    "hydra-core": "1.3.8",
    "TransferQueue": "0.1.11",
}
TESTED_SGLANG = {
    "0.5.14": {"torch": "2.11.0", "transformers": "5.8.1"},
    "0.5.17": {"torch": "2.11.0", "transformers": "5.12.1"},
    "0.5.23": {"torch": "2.14.1", "transformers": "5.19.0"},
}
"""With which releases of SGLang, and what each came with; the first is what pip resolves."""
DEFAULT_SGLANG = next(iter(TESTED_SGLANG))
TESTED_WITH_MEGATRON = {
    "megatron-core": "0.16.1",
    "megatron-bridge": "0.3.1",
    "mbridge": "0.15.1",
}
TESTED_PYTHONS = ("3.11", "3.12")

NAME = "verl_sglang_sync"
ENTRY_POINT_GROUPS = ("verl.plugins", "sglang.srt.plugins", "hydra.plugins")
REINSTALL = "reinstall, in a clone of verl-sglang-sync: pip install --no-deps -e ."
REPLACED = "another plugin replaced ours, or ours did not load"

# Kept as strings: importing these classes means importing verl and sglang.
ROLLOUT_CLASS = "verl_sglang_sync.verl.rollout.WeightSyncServerAdapter"
REPLICA_CLASS = "verl_sglang_sync.verl.replica.WeightSyncReplica"


def installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def version_checks(installed: Callable[[str], str | None] = installed_version) -> list[Check]:
    """Compare Python and every package that the weight sync depends on with the tested versions."""
    declared = map(Requirement, requires(DISTRIBUTION) or ())
    allowed = {
        requirement.name.lower(): requirement
        for requirement in declared
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }
    checks = [python_check(platform.python_version()), requirements_check(installed)]
    for name, tested in (tested_beside(installed("sglang")) | TESTED_WITH_MEGATRON).items():
        found = installed(name)
        if found is None and name in TESTED_WITH_MEGATRON:
            alone = "--no-deps " * (name == "megatron-bridge")  # it wants transformers < 5
            detail = f"not installed; for Megatron trainers: pip install {alone}{name}=={tested}"
            checks.append(Check(f"version of {name}", OK, detail))
        else:
            checks.append(version_check(name, tested, found, allowed.get(name.lower())))
    return checks


def tested_beside(sglang: str | None) -> dict[str, str]:
    """The tested set with this SGLang, or with the default one where it is none of the tested."""
    public = DEFAULT_SGLANG if sglang is None else Version(sglang).public
    release = public if public in TESTED_SGLANG else DEFAULT_SGLANG
    return TESTED | {"sglang": release} | TESTED_SGLANG[release]


def requirements_check(installed: Callable[[str], str | None] = installed_version) -> Check:
    """Is everything installed that verl, SGLang and we require? Whoever installed one of them with
    `--no-deps`, as newer SGLangs need it for verl, may have left something out.
    """
    title, missing = "requirements", {}
    for name in ("verl", "sglang", DISTRIBUTION):
        try:
            found = [Requirement(each) for each in requires(name) or ()]
        except PackageNotFoundError:
            continue  # the check of its version says so
        for each in found:
            is_needed = each.marker is None or each.marker.evaluate({"extra": ""})
            if is_needed and installed(each.name) is None:
                missing[each.name] = name
    if not missing:
        return Check(title, OK, "all of verl's, SGLang's and ours are installed")
    detail = ", ".join(f"{name} (of {owner})" for name, owner in sorted(missing.items()))
    return Check(
        title, FAIL, f"not installed: {detail}", f"pip install {' '.join(sorted(missing))}"
    )


def python_check(found: str) -> Check:
    if found.rpartition(".")[0] in TESTED_PYTHONS:
        return Check("version of Python", OK, f"{found}, as tested")
    return Check("version of Python", WARN, f"{found}; tested with {', '.join(TESTED_PYTHONS)}")


def version_check(
    name: str, tested: str, found: str | None, allowed: Requirement | None = None
) -> Check:
    """Judge one package: an untested version that our requirements allow is a warning; a local
    suffix such as "+cu130" makes no difference.
    """
    title, install = f"version of {name}", f'pip install "{name}=={tested}"'
    if found is None:
        return Check(title, FAIL, f"not installed; tested with {tested}", install)
    if Version(found).public == Version(tested).public:
        return Check(title, OK, f"{found}, as tested")
    if allowed is not None and not allowed.specifier.contains(found, prereleases=True):
        return Check(title, FAIL, f"{found}; allowed: {allowed.specifier}", install)
    others = ", ".join(TESTED_SGLANG) if name == "sglang" else tested
    return Check(title, WARN, f"{found}; tested with {others}", install)


def entry_point_checks() -> list[Check]:
    groups = ENTRY_POINT_GROUPS
    return [entry_point_check(group, entry_points(group=group, name=NAME)) for group in groups]


def entry_point_check(group: str, found: Iterable[EntryPoint]) -> Check:
    """Judge what one group holds under our name: one target, from one installation."""
    title = f"entry point {group}"
    values = sorted({entry_point.value for entry_point in found})
    if not values:
        return Check(title, FAIL, f"no entry {NAME!r} in the installed metadata", REINSTALL)
    if len(values) > 1:
        several = f"several targets: {', '.join(values)}"
        return Check(title, WARN, several, "remove the old installation")
    return Check(title, OK, values[0])


def look_at_verl() -> list[Check]:
    """Probe: import verl and its rollout classes, and with them our entry point and sglang."""
    import verl.utils.config
    from verl.workers.rollout import base, replica

    variable = "VERL_USE_EXTERNAL_PLUGINS"
    policy = os.environ.get(variable, "auto")
    errors, replica_class, import_error = [], None, None
    if policy.strip().lower() != "none":
        try:  # again: a module that failed to import fails in the same way
            for entry_point in entry_points(group="verl.plugins", name=NAME):
                entry_point.load()
        except Exception:
            errors.append(traceback.format_exc())  # verl hides it
    try:
        base.get_rollout_class("sglang", "async")
        found = replica.RolloutReplicaRegistry.get("sglang")
        replica_class = f"{found.__module__}.{found.__qualname__}"
    except Exception:
        import_error = traceback.format_exc()
    rollout_class = base._ROLLOUT_REGISTRY[("sglang", "async")]
    recipes = Check("recipe checks", OK, "verl's validate_config runs our checks before Ray starts")
    if verl.utils.config.validate_config.__module__ != f"{NAME}.preflight":
        detail = "verl's validate_config does not run our checks"
        recipes = Check("recipe checks", FAIL, detail, REPLACED)
    is_all = policy.strip().lower() == "auto"
    return [
        plugin_check("verl", errors, variable, policy, is_all=is_all),
        class_check("verl rollout class", rollout_class, ROLLOUT_CLASS, import_error),
        class_check("verl replica class", replica_class, REPLICA_CLASS, import_error),
        recipes,
    ]


def sglang_checks(facts: SGLangFacts) -> list[Check]:
    errors, is_all = facts.load_errors, not facts.policy
    return [
        plugin_check("SGLang", errors, "SGLANG_PLUGINS", facts.policy, is_all=is_all),
        hooks_check(facts.hooks),
    ]


def plugin_check(
    who: str, load_errors: Sequence[str], variable: str, policy: str, *, is_all: bool
) -> Check:
    """Does upstream load our entry point, by a policy that is all (`is_all`), or a list?"""
    title = f"{who} plugin"
    if load_errors:
        return Check(title, FAIL, last_line(load_errors[0]), "\n".join(load_errors))
    if not is_all and NAME not in {name.strip() for name in policy.split(",")}:
        detail = f"{variable}={policy!r} keeps {who} from loading it"
        return Check(title, FAIL, detail, f"unset it, or add {NAME} to the list")
    return Check(title, OK, f"{who} loads it")


def class_check(title: str, found: str | None, ours: str, import_error: str | None) -> Check:
    """Is the class in verl's registry ours, and can it be imported?"""
    if found is None or (import_error is not None and found == ours):
        error = import_error or "nothing registered"
        return Check(title, FAIL, last_line(error), error)
    if found != ours:
        return Check(title, FAIL, f"verl's registry holds {found}, not {ours}", REPLACED)
    return Check(title, OK, found)


def hooks_check(hooks: Mapping[str, bool]) -> Check:
    title, advice = "SGLang hooks", "see the SGLang plugin's error"
    found = sorted((path.rpartition(".")[2], applied) for path, applied in hooks.items())
    missing = [method for method, applied in found if not applied]
    if missing:
        return Check(title, FAIL, f"not applied: {', '.join(missing)}", advice)
    if not found:
        return Check(title, FAIL, "none registered", advice)
    return Check(title, OK, f"in place: {', '.join(method for method, _ in found)}")
