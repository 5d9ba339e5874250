"""What the sync takes of the trainer's generator: a tied embedding once, all else as it comes."""

from unittest import mock

import pytest
import torch

from verl_sglang_sync.sources.export import Export, Reexport, TensorsDiffer

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"


def test_the_copy_of_a_tied_embedding_is_left_out():
    weight, copy = torch.zeros(4, 2), torch.zeros(4, 2)
    norm = NORM, torch.ones(2)
    for others in ([norm, (EMBEDDING, copy)], [(EMBEDDING, copy), norm], [norm]):
        export = Export([(EMBEDDING, weight), *others])
        exported = list(export)
        assert [name for name, _ in exported] == [EMBEDDING, NORM]
        assert exported[0][1] is weight
        assert not export.failed


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param([(NORM, torch.ones(2)), (NORM, torch.ones(2))], id="no-embedding"),
        pytest.param([(EMBEDDING, torch.ones(4, 2)), (EMBEDDING, torch.ones(2, 2))], id="no-copy"),
        pytest.param(
            [(EMBEDDING, torch.ones(4, 2)), ("lm_head.weight", torch.ones(4, 2))], id="two-names"
        ),
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


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.add_(1e-3),
        lambda weight: weight[[1, 0]],
        lambda weight: weight.neg_().nan_to_num_(0.0),  # negative zeros
        lambda weight: weight.double(),
    ],
    ids=["values", "order", "bits", "dtype"],
)
@pytest.mark.parametrize("between", [[], [(NORM, torch.ones(2))]], ids=["at once", "later"])
def test_an_embedding_that_comes_again_with_other_values_is_refused(change, between):
    weight = torch.zeros(2, 4)
    weight[0, 0] = 0.5
    export = Export([(EMBEDDING, weight), *between, (EMBEDDING, change(weight.clone()))])
    with pytest.raises(TensorsDiffer, match="exported twice, with different values"):
        list(export)
    assert not export.failed, "the rest can still be drained"


def test_a_generator_that_dies_is_told_apart():
    def dying():
        yield EMBEDDING, torch.zeros(4, 2)
        raise RuntimeError("no peer")

    export = Export(dying())
    with pytest.raises(RuntimeError, match="no peer"):
        list(export)
    assert export.failed
