"""The same plans on a GPU: copies of every kind, a tensor that is left to the loader, the
self-check, replay without waiting.
"""

import pytest
import torch
from torch import nn

from sglang_loader.common.bucket_source import BucketSource
from sglang_loader.load_plan.executor import PlanExecutor
from support.plan_check import differing, planned, random_bucket, self_check, snapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
EXPERTS, HIDDEN, WIDTH = 16, 256, 128


class Experts(nn.Module):
    """Fused gate and up, transposed down, a cast, a scalar, and a derived tensor."""

    def __init__(self):
        super().__init__()
        bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
        self.w13 = nn.Parameter(torch.zeros(EXPERTS, 2 * WIDTH, HIDDEN, **bf16))
        self.w2t = nn.Parameter(torch.zeros(EXPERTS, WIDTH, HIDDEN, **bf16))
        self.bias = nn.Parameter(torch.zeros(EXPERTS, device="cuda"))
        self.scale = nn.Parameter(torch.zeros(1, device="cuda"))
        self.derived = torch.zeros(HIDDEN, **bf16)

    @torch.no_grad()
    def load_weights(self, weights):
        for name, tensor in weights:
            kind, _, expert = name.partition(".")
            if kind in ("gate", "up"):
                start = WIDTH * (kind == "up")
                self.w13[int(expert)].narrow(0, start, WIDTH).copy_(tensor)
            elif kind == "down":
                self.w2t[int(expert)].copy_(tensor.t())
            elif kind == "bias":
                self.bias.copy_(tensor)
            elif kind == "scale":
                self.scale.data.fill_(tensor.item())
            else:
                self.derived.copy_(tensor + 1)


def pack(seed):
    sources = [("bias", (EXPERTS,)), ("scale", ()), ("norm", (HIDDEN,))]
    for e in range(EXPERTS):
        sources += [(f"gate.{e}", (WIDTH, HIDDEN)), (f"up.{e}", (WIDTH, HIDDEN))]
        sources += [(f"down.{e}", (HIDDEN, WIDTH))]
    typed = [(name, shape, torch.bfloat16) for name, shape in sources]
    return random_bucket(typed, seed, "cuda")


@pytest.mark.parametrize("inference", [False, True])
def test_replay_is_byte_identical_on_a_gpu(inference):
    with torch.inference_mode(inference):
        model = Experts()
        layout, buffer = pack(0)
        plan = planned(model, (layout, buffer))
        assert plan.num_rest == 1
        reason = self_check(model, plan, [buffer])
        assert reason is None, reason
        _, other = pack(1)
        model.load_weights(layout.views(other))
        expected = snapshot(plan.destinations)
        model.load_weights(layout.views(buffer))
        assert differing(plan.destinations, expected)
        executor = PlanExecutor(plan, model.load_weights)
        executor.replay(0, BucketSource.flat(other))
        torch.cuda.synchronize()
        assert differing(plan.destinations, expected) == ()


def test_replay_never_waits():
    model = Experts()
    layout, buffer = pack(0)
    executor = PlanExecutor(planned(model, (layout, buffer)), model.load_weights)
    source = BucketSource.flat(buffer)
    executor.replay(0, source)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        executor.replay(0, source)
    finally:
        torch.cuda.set_sync_debug_mode("default")
