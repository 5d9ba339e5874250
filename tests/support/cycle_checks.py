"""What must hold of everything that `cycle_steps` saw, on a CPU as on a GPU."""

from __future__ import annotations

from typing import Any

from support.memory_loaders import STRAY_BYTES

SAME = ("hashes", "addresses", "nan", "allocated")


def check_all(seen: dict[str, Any], num_cycles: int) -> None:
    """All of this module."""
    _check_syncs(seen)
    _check_poisoned_cycle(seen)
    _check_cycles(seen, num_cycles)
    _check_stray(seen)


def _check_syncs(seen: dict[str, Any]) -> None:
    """The plan was made and then replayed, and left the bytes of SGLang's own load."""
    assert seen["second"]["num_replayed"] > 0
    assert seen["second"]["num_eager"] == 0
    assert seen["never slept"]["hashes"] == seen["loaded"]["hashes"]
    assert seen["never slept"]["nan"] == []
    assert _differences(seen["after each tag"], seen["never slept"]) == {}


def _check_poisoned_cycle(seen: dict[str, Any]) -> None:
    """A sync and a restore leave nothing of what was lost, in any byte under the tag."""
    poisoned = seen["poisoned"]
    before, asleep, synced = (poisoned[key] for key in ("before", "asleep", "synced"))
    assert asleep["nan"], "the poison was not real"
    changed = [name for name, value in before["hashes"].items() if asleep["hashes"][name] != value]
    assert changed
    assert 0 < poisoned["bytes"] == before["allocated"]["weights"][1] - before["residue_bytes"]
    assert poisoned["counts"]["num_eager"] == 0
    for state in (synced, poisoned["awake"]):
        assert _differences(state, seen["never slept"]) == {}
        assert state["pool"] == before["pool"]
        assert (state["stale"], state["host_bytes"]) == (None, 0)
    assert seen["same after poison"]


def _check_cycles(seen: dict[str, Any], num_cycles: int) -> None:
    """Every cycle generated the same; nothing moved, grew or was allocated under another tag."""
    cycles = seen["cycles"]
    assert len(cycles) == num_cycles
    assert [i for i, cycle in enumerate(cycles) if not cycle["same"]] == []
    assert {cycle["replayed"] for cycle in cycles} == {seen["second"]["num_replayed"]}
    for state in [*(cycle["state"] for cycle in cycles if cycle["state"]), seen["last"]]:
        assert _differences(state, seen["never slept"]) == {}
        assert (state["stale"], state["host_bytes"]) == (None, 0)


def _check_stray(seen: dict[str, Any]) -> None:
    """What is allocated under the tag by mistake is seen by the checks above."""
    before, after = (seen[key]["allocated"]["weights"][1] for key in ("last", "stray"))
    assert after - before == STRAY_BYTES
    assert "allocated" in _differences(seen["stray"], seen["last"])


def _differences(state: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """What is not the same, by kind and name: short enough to be read in a failure."""
    found: dict[str, Any] = {}
    for kind in SAME:
        ours, theirs = state[kind], reference[kind]
        if ours != theirs and isinstance(ours, dict):
            both = {
                name: (ours.get(name), theirs.get(name)) for name in ours.keys() | theirs.keys()
            }
            found[kind] = {name: pair for name, pair in both.items() if pair[0] != pair[1]}
        elif ours != theirs:
            found[kind] = ours, theirs
    return found
