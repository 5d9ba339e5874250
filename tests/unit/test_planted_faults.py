"""A fault in any stage of a route is found by its proof, before new weights come by it.

A fault is on all ranks or on one. What the engines serve is right after every sync all the same.
"""

import re

import pytest

from unit import route_ranks
from unit.planted_faults import CASES, FAULTS, FaultyRank


def play(pool, route, *steps, **options):
    return route_ranks.play(pool, FaultyRank, {"route": route, "kind": "moe", **options}, *steps)


@pytest.mark.parametrize("on", [None, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("route", "fault"), CASES)
def test_a_planted_fault_is_refused_by_name(pool, route, fault, on):
    steps = [("plant", fault, on), *["step", "sync"] * 3, "mend"]
    answers = play(pool, route, *steps)
    assert {seen["state"] for seen in answers} == {"OFF"}
    for seen in answers:
        assert seen["errors"] == [] and seen["routes"] == ["export"] * 3
        found = r"\d+ tensors differ from what load_weights made of the full export: .*held\.\d"
        assert re.search(found, seen["off"])


def test_without_a_fault_nothing_is_refused(pool):
    for route in FAULTS:
        for seen in play(pool, route, *["step", "sync"] * 3):
            assert seen["routes"] == ["export", route, route]
            assert seen["state"] == "PROVEN"
