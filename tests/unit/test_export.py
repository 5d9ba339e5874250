"""What the sync takes of the trainer's generator: a tied embedding once, all else as it comes."""

import pytest
import torch

from verl_sglang_sync.weight_sync import Export

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"


def names(weights):
    return [name for name, _ in Export(weights)]


def test_the_copy_of_a_tied_embedding_is_left_out():
    weight, copy = torch.zeros(4, 2), torch.zeros(4, 2)
    weights = [(EMBEDDING, weight), (NORM, torch.ones(2)), (EMBEDDING, copy)]
    exported = list(Export(weights))
    assert [name for name, _ in exported] == [EMBEDDING, NORM]
    assert exported[0][1] is weight


def test_a_copy_between_others_does_not_end_the_export():
    weight = torch.zeros(4, 2)
    assert names([(EMBEDDING, weight), (EMBEDDING, weight), (NORM, torch.ones(2))]) == [
        EMBEDDING,
        NORM,
    ]


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
    assert names(weights) == [name for name, _ in weights]


def test_a_generator_that_dies_is_told_apart():
    def dying():
        yield EMBEDDING, torch.zeros(4, 2)
        raise RuntimeError("no peer")

    export = Export(dying())
    next(export)
    with pytest.raises(RuntimeError, match="no peer"):
        next(export)
    assert export.failed


def test_the_end_is_no_failure():
    weight = torch.zeros(4, 2)
    export = Export([(EMBEDDING, weight), (EMBEDDING, weight)])
    assert len(list(export)) == 1
    assert not export.failed
