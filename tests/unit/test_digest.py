"""Digests: what changes them, and that the kernel and torch's operators find the same."""

from functools import partial

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_loader.common import digest as module
from sglang_loader.common.digest import PART_WORDS, digests, tensor_digest
from support.remote import run_interpreted

PART = 8 * PART_WORDS
SIZES = [
    *range(34),
    8191,
    8192,
    8195,
    PART - 8,
    PART - 3,
    PART,
    PART + 3,
    PART + 8,
    3 * PART + 8205,
]
WORDS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=40)


def random_bytes(size, device="cpu"):
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)


def lanes(data):
    (found,) = digests([data.reshape(-1).view(torch.uint8)]).tolist()
    return tuple(found)


def assert_all_differ(storages):
    """In each of the two lanes."""
    for lane in zip(*map(lanes, storages), strict=True):
        assert len(set(lane)) == len(storages)


def as_described(data):
    """The digest, one word after another."""
    place, *factors = module._FACTORS.values()
    whole = len(data) // 8 * 8
    words = [data[i : i + 8] for i in range(0, whole, 8)]
    words.append(data[whole:].ljust(7, b"\0") + bytes([len(data) - whole]))
    totals = [0, 0]
    for i, word in enumerate(int.from_bytes(word, "little") for word in words):
        key = i * place % 2**64
        for lane, mixed in enumerate((word ^ key, (word + key) % 2**64)):
            for factor in factors[2 * lane : 2 * lane + 2]:
                mixed = (mixed ^ mixed >> 32) * factor % 2**64
            totals[lane] += mixed ^ mixed >> 32
    return tuple((total + 2**63) % 2**64 - 2**63 for total in totals)


@given(WORDS, st.data())
def test_two_words_exchanged_change_it(words, data):
    places = st.integers(0, len(words) - 1)
    first, second = data.draw(places), data.draw(places)
    other = list(words)
    other[first], other[second] = words[second], words[first]
    assume(other != words)
    assert_all_differ([torch.tensor(words), torch.tensor(other)])


@pytest.mark.parametrize(("chunk_words", "together_words"), [(4, 1), (4, 9), (8, 1000)])
def test_a_chunked_digest_equals_its_description(chunk_words, together_words, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_WORDS", chunk_words)
    monkeypatch.setattr(module, "TOGETHER_WORDS", together_words)
    storages = [random_bytes(size) for size in range(100)]
    expected = [as_described(bytes(data.tolist())) for data in storages]
    assert [tuple(found) for found in digests(storages).tolist()] == expected


def test_a_tensor_has_the_digest_of_its_elements():
    tensor = torch.randn(7, 5).to(torch.bfloat16).t()
    found = tensor_digest(tensor)
    assert tuple(found.tolist()) == lanes(tensor)
    assert not torch.equal(found, tensor_digest(tensor.t()))
    assert tensor_digest(torch.tensor(1.5)).shape == tensor_digest(torch.zeros(0)).shape == (2,)


def check(device):
    """The kernel, for storages of all sizes in one launch; only their own bytes count."""
    storages = [random_bytes(size, device) for size in SIZES]
    views = [random_bytes(size + i % 17, device)[i % 17 :] for i, size in enumerate(SIZES)]
    aligned = [view.clone() for view in views]
    expected = module._by_torch([*storages, *aligned])
    assert torch.equal(module._by_kernel([*storages, *aligned]), expected)
    assert torch.equal(digests([*storages, *views]), expected)


def test_the_kernel_finds_what_torch_does(tmp_path):
    pytest.importorskip("triton")
    run_interpreted(partial(check, "cpu"), tmp_path / "log")
