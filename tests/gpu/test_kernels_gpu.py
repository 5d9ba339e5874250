"""On a GPU: the kernels find and copy what torch's operators do, and what a CPU does."""

import torch

from sglang_loader.common import digest as module
from sglang_loader.common.copies.kernel import is_available
from sglang_loader.common.copies.triton_kernels import fallbacks
from sglang_loader.common.digest import digests
from unit.test_digest import check, random_bytes
from unit.test_fused_copies import check_kernel


def test_the_compiled_kernel_finds_what_torch_does():
    assert module.is_available(torch.device("cuda", torch.cuda.current_device()))
    check("cuda")


def test_places_that_need_more_than_31_bits_count():
    """A storage of 16 GiB and a few bytes has 2**31 words and more."""
    data = torch.zeros((16 << 30) + 13, dtype=torch.uint8, device="cuda")
    for place in (5, (16 << 30) - 1, (16 << 30) + 1, (16 << 30) + 12):
        before = digests([data])
        data[place] = 1
        found = digests([data])
        assert bool((found != before).all())
        assert torch.equal(found, module._by_torch([data]))


def test_a_kernel_with_another_result_is_not_used(monkeypatch, caplog):
    device = torch.device("cuda", torch.cuda.current_device())
    data = random_bytes(1000)
    module.is_available.cache_clear()
    monkeypatch.setattr(module, "_by_kernel", lambda storages: torch.zeros(1, 2, device=device))
    try:
        found = digests([data.to(device)])
        assert fallbacks == [
            f"torch computes digests on {device}, slower: the Triton kernel fails: a wrong result"
        ]
        assert fallbacks[0] in caplog.text
        assert torch.equal(found.cpu(), digests([data]))
    finally:
        module.is_available.cache_clear()
        fallbacks.clear()


def test_the_compiled_kernel_copies_as_torch_does():
    device = torch.device("cuda", torch.cuda.current_device())
    assert is_available(device)
    check_kernel(device)
