"""Handles in a trainer where SGLang has patched torch's reductions, as on every GPU."""

import subprocess
import sys

SCRIPT = """
import os
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
import torch
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
from sglang_loader.ipc import serialize_handles

torch.multiprocessing.set_sharing_strategy("file_system")
named = [("empty", torch.empty(0, dtype=torch.uint8)), ("ones", torch.ones(3))]
for patched in (False, True):
    if patched:
        monkey_patch_torch_reductions()
    found = MultiprocessingSerializer.deserialize(serialize_handles(named))
    assert [name for name, _ in found] == ["empty", "ones"]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, named, strict=True))
try:
    MultiprocessingSerializer.serialize(named)
except IndexError:
    print("upstream's own breaks")
"""


def test_cpu_tensors_travel_where_sglang_has_patched_the_reductions():
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "upstream's own breaks" in run.stdout, "this is no longer needed"
