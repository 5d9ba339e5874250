"""Plans as an engine records them in a first sync, with and without traces of repeated layers."""

import re
from dataclasses import replace
from itertools import groupby
from unittest import mock

import sglang_loader.session.recording as recording
from sglang_loader.load_plan.plan import PlanRefused
from sglang_loader.load_plan.repeated_layers import RepeatedLayers
from support.plan_check import packed


class Recorded:
    """What was recorded of a sync.

    Args:
        buckets: each a layout and its filled buffer.
        repeats: False: every bucket is traced.

    Attributes:
        plan: without what only later processes need; None if it was refused.
        uses: of the buckets.
        reason: why there is no plan.
        traced: numbers of the buckets that were traced.
    """

    def __init__(self, model, buckets, *, repeats=True):
        self.plan, self.uses, self.reason, self.traced = None, [], None, []
        recorder, number = recording.PlanRecorder(model), 0

        def trace(*args):
            self.traced.append(number)
            return original(*args)

        original = recording.trace_bucket
        off = mock.patch.object(RepeatedLayers, "trace", lambda *_: None)
        with mock.patch.object(recording, "trace_bucket", trace):
            if not repeats:
                off.start()
            try:
                for layout, buffer in buckets:
                    number = len(self.uses)
                    uses, reason = recorder.record(layout, buffer)
                    self.uses.append(uses)
                    self.reason = self.reason or reason
                    if reason is not None:
                        return
                plan = recorder.finish()
            except PlanRefused as refused:
                self.reason = str(refused)
                return
            finally:
                if not repeats:
                    off.stop()
        self.plan = replace(plan, destinations=None)


def by_layer(weights):
    """Buckets of the named tensors: one for each layer, and for what lies between layers."""

    def layer(pair):
        found = re.match(r".*?\.\d+\.", pair[0])
        return found and found[0]

    return [packed(group) for _, group in groupby(weights, layer)]
