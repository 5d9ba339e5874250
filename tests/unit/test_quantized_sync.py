"""Syncs in fp8: the engines quantise what they read of real FSDP2 ranks, as verl's quantiser does.

Blocks are small, so that the shards of trainer ranks and the parts of engine ranks cut them.
"""

import dataclasses
from functools import partial
from unittest import mock

import pytest
import torch

from sglang_loader.load_plan import executor
from sglang_loader.load_plan.copy_table import CopyTable
from unit import route_ranks
from unit.route_ranks import Rank

BLOCK = 8


class Fp8Rank(Rank):
    """A rank whose export is quantised by verl's own quantiser, in torch."""

    def __init__(self, *, route="pull", **options):
        super().__init__(route, **options)

    def sync_with(self, fault):
        """A sync in which the engines' tables have a fault."""
        with mock.patch.object(CopyTable, "of", FAULTS[fault](CopyTable.of)):
            self.sync()

    def exports(self, export):
        from verl.utils.kernel import fp8_kernel
        from verl.utils.sglang.sglang_fp8_utils import SGLangFP8QuantizerHelper

        from verl_sglang_sync.verl.engine_format import quantized_by

        fp8_kernel._DISABLE_TRITON_FP8 = True  # it needs a GPU
        quantizer = SGLangFP8QuantizerHelper({"weight_block_size": [BLOCK, BLOCK]})
        return quantized_by(export, quantizer, torch.bfloat16)


def faulty(change, join):
    """The first matrix of a table is changed."""

    def planted(*args):
        steps = list(join(*args).steps)
        at = next(i for i, step in enumerate(steps) if step.quantized is not None)
        part = steps[at].quantized
        [first, *others] = part.matrices
        part = dataclasses.replace(part, matrices=(*change(first), *others))
        steps[at] = dataclasses.replace(steps[at], quantized=part)
        return CopyTable(tuple(steps))

    return planted


def left_out(matrix):
    return []


def elsewhere(matrix):
    return [dataclasses.replace(matrix, source=matrix.source + 4)]


FAULTS = {
    "a matrix is left out": partial(faulty, left_out),
    "a matrix is read from elsewhere": partial(faulty, elsewhere),
}


def play(pool, *steps, kind="dense", **options):
    return route_ranks.play(pool, Fp8Rank, {"kind": kind, **options}, *steps)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_after_the_first_sync_nothing_is_exported(pool, kind, dtype):
    for seen in play(pool, "sync", *["step", "sync"] * 3, kind=kind, dtype=dtype):
        assert seen["routes"] == ["export", *["pull"] * 3]
        assert seen["num_exports"] == [1], "what the engines get is what is compared"
        assert seen["off"] is None and seen["state"] == "PROVEN"
        assert seen["report"]["num_replayed"] == seen["report"]["num_buckets"]
        assert seen["report"]["staging_bytes"] == 0


def test_fsdp1_is_quantised_by_the_engines_too(pool):
    for seen in play(pool, "sync", *["step", "sync"] * 2, kind="moe", strategy="fsdp1"):
        assert seen["routes"] == ["export", "pull", "pull"]
        assert seen["num_exports"] == [1]


def test_what_is_sent_is_quantised_by_the_engine(pool):
    steps = "sync", *["step", "sync"] * 2
    for seen in play(pool, *steps, kind="moe", route="exchange", dtype="bfloat16"):
        assert seen["routes"] == ["export", "exchange", "exchange"]
        assert seen["num_exports"] == [1]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_quantisation_is_not_served(pool, fault):
    for seen in play(pool, "step", ("sync_with", fault), "step", "sync", kind="moe"):
        assert seen["routes"] == ["export", "export"]
        assert "its proof failed" in seen["off"] and seen["state"] == "OFF"


def test_a_device_that_cannot_quantise_gets_the_export(pool):
    error = RuntimeError("no kernel")
    target = f"{executor.__name__}.MatrixQuantizer.on"
    for seen in play(pool, ("sync_failing", None, target, error), "step", "sync"):
        assert seen["routes"] == ["export", "export"]


def test_proofs_compare_with_the_quantised_export(pool):
    for seen in play(pool, *["step", "sync"] * 4, kind="moe", prove=2):
        assert seen["routes"] == ["export", "pull", "pull", "pull"]
        assert seen["proven"] == [True, True, None, True]
