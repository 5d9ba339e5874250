"""Checks of the installation: versions, and the use of our entry points by verl and SGLang."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from sglang_loader.probe import PluginFacts
from verl_sglang_sync.commands.doctor.check import FAIL, OK, WARN, Check, run_probe

DISTRIBUTION, NAME = "verl-sglang-sync", "verl_sglang_sync"
TESTED = {
    "verl": "0.9.1",
    "torch-memory-saver": "0.0.10",
    "ray": "2.60.0",
    "hydra-core": "1.3.8",
    "TransferQueue": "0.1.11",
    "mbridge": "0.15.1",  # for Megatron trainers, as those below. It may be missing.
}
TESTED_BRIDGES = {"0.3.1": "0.16.1", "0.5.0": "0.18.2", "0.6.2": "0.19.2"}
"""Tested releases of Megatron-Bridge, each with its megatron-core. The first is the default."""
TESTED_SGLANG = {
    "0.5.14": {"torch": "2.11.0", "transformers": "5.8.1"},
    "0.5.17": {"torch": "2.11.0", "transformers": "5.12.1"},
    "0.5.20": {"torch": "2.13.0", "transformers": "5.12.1"},
    "0.5.23": {"torch": "2.14.1", "transformers": "5.19.0"},
}
"""Tested releases of SGLang, each with its other packages. pip resolves to the first one."""
SGLANG_RUNS = {
    "0.5.14": "all tests, and trainings on GPUs",
    "0.5.17": "the fast tests, and one GPU",
    "0.5.20": "its interfaces, and syncs of engines, on CPUs",
    "0.5.23": "the fast tests, and one GPU",
}
REPLACED = "another plugin replaced ours, or ours did not load"
LOAD_ADVICE = "unset VERL_USE_EXTERNAL_PLUGINS and SGLANG_PLUGINS, or reinstall verl-sglang-sync"


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution, or None if there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def tested_beside(sglang: str | None, bridge: str | None = None) -> dict[str, str]:
    """Return the versions tested with these releases, or with the default of an untested one."""
    # `public` drops a local suffix such as "+cu130".
    public = sglang and Version(sglang).public
    release = public if public in TESTED_SGLANG else next(iter(TESTED_SGLANG))
    bridge = bridge if bridge in TESTED_BRIDGES else next(iter(TESTED_BRIDGES))
    megatron = {"megatron-core": TESTED_BRIDGES[bridge], "megatron-bridge": bridge}
    return TESTED | megatron | {"sglang": release} | TESTED_SGLANG[release]


def _requirements(owner: str) -> dict[str, SpecifierSet]:
    lines = requires(owner) if installed_version(owner) is not None else None
    needed = map(Requirement, lines or ())
    return {r.name: r.specifier for r in needed if not r.marker or r.marker.evaluate({"extra": ""})}


def version_checks() -> Iterator[Check]:
    """Compare the installed packages with all requirements, and with the tested versions."""
    # Beside newer releases of SGLang, verl is installed by `pip --no-deps`, without requirements.
    ours = _requirements(DISTRIBUTION)
    needed = ours | _requirements("verl") | _requirements("sglang")
    tested = tested_beside(installed_version("sglang"), installed_version("megatron-bridge"))
    if missing := sorted(name for name in needed if installed_version(name) is None):
        pinned = [f'"{name}=={tested[name]}"' if name in tested else name for name in missing]
        advice = f"pip install {' '.join(pinned)}"
        yield Check("requirements", FAIL, f"not installed: {', '.join(missing)}", advice)
    else:
        yield Check("requirements", OK, "all of verl's, SGLang's and ours are installed")
    for name, wanted in tested.items():
        if (actual := installed_version(name)) is not None:
            yield _version_check(name, wanted, actual, ours.get(name, SpecifierSet()))


def _version_check(name: str, tested: str, actual: str, required: SpecifierSet) -> Check:
    # SGLang's exclusions keep pip from building a `cuda-tile`, which fails. Images that have a
    # `cuda-tile` run these releases.
    allowed = SpecifierSet(",".join(str(part) for part in required if part.operator != "!="))
    title, install = f"version of {name}", f'pip install "{name}=={tested}"'
    runs = SGLANG_RUNS if name == "sglang" else {}
    if Version(actual).public == tested:
        run = f": {runs[tested]}" if runs else ""
        return Check(title, OK, f"{actual}, as tested{run}")
    if not allowed.contains(actual, prereleases=True):
        return Check(title, FAIL, f"{actual}, allowed: {allowed}", install)
    versions = ", ".join(f"{release} ({run})" for release, run in runs.items()) or tested
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
        error = facts.load_errors[0].splitlines()[-1]
        yield Check(title, FAIL, error, "\n".join(facts.load_errors))
    elif not any(facts.hooks.values()):
        yield Check(title, FAIL, f"{engine} does not load it", LOAD_ADVICE)
    else:
        yield Check(title, OK, f"{engine} loads it")
    title, lost = f"{engine} hooks", [name for name, ours in facts.hooks.items() if not ours]
    if facts.hooks and not lost:
        yield Check(title, OK, f"all {len(facts.hooks)} are in place")
    else:
        yield Check(title, FAIL, f"not ours: {', '.join(lost) or 'all'}", REPLACED)
