"""On a real GPU: what dies, or is freed, in the middle of a sync that maps memory by CUDA IPC.

    pytest -m gpu -rP tests/gpu/test_deaths_gpu.py     # prints the memory after each death

The memory of other tests' processes is not counted, so that tests may run beside each other. Each
test starts servers for a minute or two. `QUICK_START` keeps their starts short.
"""

import pytest

from support.deaths import check_engine_dies, check_reuse, check_trainer_dies


@pytest.mark.parametrize("moment", ["first read", "paused"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_trainer_dies_while_engines_read_its_memory(tp, moment, tmp_path):
    check_trainer_dies(tmp_path, device="cuda", tp=tp, moment=moment)


@pytest.mark.parametrize(("in_place", "num"), [(False, 10), (True, 2)])
def test_engines_die_while_they_map_trainer_memory(in_place, num, tmp_path):
    check_engine_dies(tmp_path, device="cuda", in_place=in_place, num=num, ahead=10)


@pytest.mark.parametrize("how", ["elsewhere", "same address", "not confirmed"])
def test_memory_reused_while_read_is_never_published(how, tmp_path):
    check_reuse(tmp_path, device="cuda", how=how)
