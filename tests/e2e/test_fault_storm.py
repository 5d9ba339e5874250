"""A seeded storm of random faults: no version is ever served in parts, and the next sync is right.

`FAULTS=60 SEED=1 make fault-storm`; the report goes to `outputs/fault-storm.{json,md}`.
"""

import os
import subprocess
import time
from pathlib import Path

import pytest

from support.storm import Storm, write_report
from support.storm_faults import FAULTS

NUM_FAULTS = int(os.environ.get("STORM_FAULTS") or 60)
SEED = int(os.environ.get("STORM_SEED") or 1)
TIME_S = float(os.environ.get("STORM_SECONDS") or 75)  # of each engine's storm
REPORT = Path(__file__).resolve().parents[2] / "outputs" / "fault-storm"
FIRST_ROUND = int(os.environ.get("STORM_ROUND") or 1)  # to see a round again, with one fault
ONLY = os.environ.get("STORM_ONLY", "")  # part of a fault's name, to reproduce a finding

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(TIME_S + 600)]

storms = []


@pytest.mark.parametrize("tp", [1, 2])
def test_a_storm_of_faults(tp, tmp_path):
    num_faults = -(-NUM_FAULTS // 2)
    print(f"\nfault storm: tp={tp} faults={num_faults} seed={SEED}", flush=True)
    started, injected = time.monotonic(), 0
    try:
        with Storm(tmp_path, tp=tp, seed=SEED) as storm:
            storms.append(storm)
            chosen = [fault for fault in FAULTS if ONLY in fault.name]
            injected = storm.run(num_faults, chosen, time.monotonic() + TIME_S, FIRST_ROUND)
    finally:
        print(write_report(REPORT, storms, {"seed": SEED, "commit": _commit()}))
        print(f"{injected} faults in {time.monotonic() - started:.0f} s")
    assert not storm.findings, "\n".join(str(finding)[:600] for finding in storm.findings)
    assert injected >= min(num_faults, 5), "the machine is too slow for a storm"


def _commit():
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
