"""Graphs can be released wherever megatron-core is installed, too."""

from types import SimpleNamespace

import pytest
import torch_memory_saver

from sglang_loader.hooks.memory import force_preload
from support.forks import CPU_ENVIRONMENT, Fork

STOCK = """
import sglang.srt.model_executor.model_runner
from torch_memory_saver import torch_memory_saver as saver
print("before", saver._impl_ctor_kwargs.get("hook_mode"))
from sglang_loader.hooks.memory import force_preload
force_preload()
print("after", saver._impl_ctor_kwargs.get("hook_mode"), flush=True)
"""


def test_sglang_beside_megatron_can_release_graphs(tmp_path):
    log = tmp_path / "log"
    code = Fork(exec, STOCK, environment=CPU_ENVIRONMENT, log=log).wait(200)
    assert code == 0, log.read_text()[-2000:]
    assert "before torch\nafter preload" in log.read_text(), "upstream no longer needs this"


@pytest.mark.parametrize("mode", ("preload", "torch"))
def test_memory_in_another_hook_mode_is_an_error(mode, monkeypatch):
    saver = SimpleNamespace(_impl=SimpleNamespace(_hook_mode=mode))
    monkeypatch.setattr(torch_memory_saver, "torch_memory_saver", saver)
    if mode == "preload":
        force_preload()
        return
    with pytest.raises(RuntimeError, match="hook_mode='torch', with which CUDA graphs cannot"):
        force_preload()
