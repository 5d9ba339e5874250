"""Are our entry points found, do they load, and is what they install really in place?"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

from sglang_loader.probe import SGLangFacts
from verl_sglang_sync.doctor.check import Check, failed, last_line, passed, warned
from verl_sglang_sync.doctor.hydra_probe import HydraFacts
from verl_sglang_sync.doctor.verl_probe import VerlFacts

NAME = "verl_sglang_sync"
GROUPS = ("verl.plugins", "sglang.srt.plugins", "hydra.plugins")
REINSTALL = "reinstall: pip install --force-reinstall --no-deps verl-sglang-sync"

# Kept as strings: importing these classes means importing verl and sglang.
ROLLOUT_CLASS = "verl_sglang_sync.rollout_adapter.WeightSyncServerAdapter"
REPLICA_CLASS = "verl_sglang_sync.replica.WeightSyncReplica"


def entry_point_checks() -> list[Check]:
    """Look for our entry points in the installed metadata."""
    return [metadata_check(group, entry_points(group=group, name=NAME)) for group in GROUPS]


def metadata_check(group: str, found: Iterable[EntryPoint]) -> Check:
    """Judge what one group holds under our name: one target, from one installation."""
    title = f"entry point {group}"
    values = sorted({entry_point.value for entry_point in found})
    if not values:
        return failed(title, f"no entry {NAME!r} in the installed metadata", REINSTALL)
    if len(values) > 1:
        return warned(title, f"several targets: {', '.join(values)}", "remove the old installation")
    return passed(title, values[0])


def verl_checks(facts: VerlFacts) -> list[Check]:
    """Judge a process that has imported verl."""
    return [
        _verl_plugin(facts),
        _verl_class("verl rollout class", facts.rollout_class, ROLLOUT_CLASS, facts),
        _verl_class("verl replica class", facts.replica_class, REPLICA_CLASS, facts),
        _recipe_checks(facts),
    ]


def _verl_plugin(facts: VerlFacts) -> Check:
    title = "verl plugin"
    if facts.load_error is not None:
        return failed(title, last_line(facts.load_error), facts.load_error)
    names = {name.strip() for name in facts.policy.split(",")}
    if facts.policy.strip().lower() != "auto" and NAME not in names:
        return failed(
            title,
            f"VERL_USE_EXTERNAL_PLUGINS={facts.policy!r} keeps verl from loading it",
            f"unset it, or add {NAME} to the list",
        )
    return passed(title, "verl loads it")


def _verl_class(title: str, found: str | None, ours: str, facts: VerlFacts) -> Check:
    if found is None or (facts.import_error is not None and found == ours):
        error = facts.import_error or "nothing registered"
        return failed(title, last_line(error), error)
    if found != ours:
        return failed(
            title,
            f"verl's registry holds {found}, not {ours}",
            "another plugin replaced ours, or ours did not load",
        )
    return passed(title, found)


def _recipe_checks(facts: VerlFacts) -> Check:
    title = "recipe checks"
    if facts.checks_recipes:
        return passed(title, "verl's validate_config runs our checks before Ray starts")
    return failed(
        title,
        "verl's validate_config does not run our checks",
        "another plugin replaced it, or ours did not load",
    )


def sglang_checks(facts: SGLangFacts) -> list[Check]:
    """Judge a process that has loaded SGLang's plugins."""
    return [_sglang_plugin(facts), _sglang_hooks(facts)]


def _sglang_plugin(facts: SGLangFacts) -> Check:
    title = "SGLang plugin"
    if facts.load_errors:
        return failed(title, last_line(facts.load_errors[0]), "\n".join(facts.load_errors))
    if facts.policy and NAME not in {name.strip() for name in facts.policy.split(",")}:
        return failed(
            title,
            f"SGLANG_PLUGINS={facts.policy!r} keeps SGLang from loading it",
            f"unset it, or add {NAME} to the list",
        )
    return passed(title, "SGLang loads it")


def _sglang_hooks(facts: SGLangFacts) -> Check:
    title = "SGLang hooks"
    missing = sorted(_method(target) for target, applied in facts.hooks.items() if not applied)
    if missing:
        return failed(title, f"not applied: {', '.join(missing)}", "see the SGLang plugin's error")
    if not facts.hooks:
        return failed(title, "none registered", "see the SGLang plugin's error")
    return passed(title, f"in place: {', '.join(sorted(map(_method, facts.hooks)))}")


def _method(target: str) -> str:
    return target.rpartition(".")[2]


def hydra_checks(facts: HydraFacts) -> list[Check]:
    """Judge what Hydra found by itself."""
    title = "Hydra config group"
    if not facts.discovered:
        return [failed(title, "Hydra did not find the search-path plugin", REINSTALL)]
    if facts.errors:
        errors = "\n".join(f"+weight_sync={mode}: {text}" for mode, text in facts.errors.items())
        return [failed(title, last_line(errors), errors)]
    presets = ", ".join(f"+weight_sync={mode}" for mode in facts.sections)
    return [passed(title, f"composes {presets}")]
