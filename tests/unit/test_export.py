"""What the sync takes of the trainer's generator: a tied embedding once, all else as it comes."""

from unittest import mock

import pytest
import torch

from verl_sglang_sync.sources.export import Export, Reexport, TensorsDiffer

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"


def test_a_tied_embeddings_copy_is_left_out():
    weight, copy = torch.zeros(4, 2), torch.zeros(4, 2)
    norm = NORM, torch.ones(2)
    for others in ([norm, (EMBEDDING, copy)], [(EMBEDDING, copy), norm], [norm]):
        export = Export([(EMBEDDING, weight), *others])
        exported = list(export)
        assert [name for name, _ in exported] == [EMBEDDING, NORM]
        assert exported[0][1] is weight


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param([(NORM, torch.ones(2)), (NORM, torch.ones(2))], id="no-embedding"),
        pytest.param([(EMBEDDING, torch.ones(4, 2)), (EMBEDDING, torch.ones(2, 2))], id="no-copy"),
        pytest.param(
            [(EMBEDDING, torch.ones(4, 2)), (f"visual.{EMBEDDING}", torch.ones(4, 2))],
            id="two-embeddings",
        ),
    ],
)
def test_anything_else_is_passed_on(weights):
    assert [name for name, _ in Export(weights)] == [name for name, _ in weights]


def test_no_digest_is_taken_where_nothing_comes_twice():
    weights = [(EMBEDDING, torch.zeros(4, 2))]
    export = Reexport(lambda: weights, sources=dict)
    with mock.patch("verl_sglang_sync.sources.export.tensor_digest") as digest:
        assert list(Export(export)) == weights and not digest.called
        assert list(Export(weights)) == weights and digest.called


def test_an_embedding_repeated_with_changes_is_refused():
    weight = torch.zeros(2, 4)
    weights = iter([(EMBEDDING, weight), (EMBEDDING, weight.neg()), (NORM, torch.ones(2))])
    export = Export(weights)
    with pytest.raises(TensorsDiffer, match="exported twice, with different values"):
        list(export)
    export.drain()
    assert next(weights, None) is None, "the other ranks need this one's part"


def test_an_export_that_has_failed_is_not_drained():
    """Its next collective would not be the one that the other ranks are in."""
    made = []

    def make(number):
        made.append(number)
        if number == 1:
            raise RuntimeError("no peer")
        return f"t{number}", torch.zeros(2)

    export = Export(map(make, range(4)))
    with pytest.raises(RuntimeError, match="no peer"):
        list(export)
    export.drain()
    assert made == [0, 1]
