"""The check of one rank, as the tests of tiny architectures call it."""

from unittest.mock import patch

import torch

from sglang_loader.common.bucket_source import BucketSource
from sglang_loader.common.layout import BucketLayout, BucketTensor
from sglang_loader.session import weight_check
from sglang_loader.session.findings import Verdict
from sglang_loader.session.model_loader import loader_of
from sglang_loader.session.weight_check import judge_together, view_of_sync
from sglang_loader.upstream import engine_context

FAILED_AT = "load_weights failed at "


def specs_of(weights):
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights]


def _alone(item):
    return [item]


def check(
    model,
    specs,
    *,
    published,
    gather=_alone,
    uses_plan=False,
    starts_random=False,
    values=None,
    is_distinct=False,
):
    """The verdict on a sync; what `load_weights` itself refuses counts as mismatched. By default
    for an engine of one rank, launched with weights of its own, that loads zeros.

    Args:
        values: by name, what is loaded instead.
        is_distinct: no two tensors are the same, else all hold zeros.
    """
    by_name = None
    if published is not None:
        by_name = {name: BucketTensor(name, shape, dtype, 0) for name, dtype, shape in published}
    layout = layout_of(specs)
    refused = gather(_load(model, layout, uses_plan, values or {}, is_distinct))
    if named := list(dict.fromkeys(name for names in refused for name in names)):
        return Verdict(mismatched=tuple(named))
    with patch.object(weight_check, "starts_random", lambda: starts_random):
        view = view_of_sync([layout], [model], lambda: by_name)
    return judge_together(view, gather)


def _load(model, layout, uses_plan, values, is_distinct):
    """What `load_weights` refuses, as its error names it."""
    loader = loader_of(model)
    loader.start(engine_context(model), uses_plan=uses_plan)
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for number, (name, tensor) in enumerate(layout.views(buffer)):
        if name in values:
            tensor.copy_(values[name])
        elif is_distinct and tensor.numel():
            flat = tensor.view(-1)
            flat[0], flat[-1] = number % 50 + 1, number // 50 + 1
    source = BucketSource.flat(buffer)
    try:
        loader.load(0, layout, source)
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        assert notes, f"the error names no tensor: {error!r}"
        return notes[0].removeprefix(FAILED_AT).partition(": ")[0].split(" or ")
    loader.finish()
    return []


def layout_of(specs):
    """All tensors in one bucket."""
    return BucketLayout.pack((name, shape, dtype) for name, dtype, shape in specs)


def three_faults(specs):
    """(at fault, tensors) three times: a tensor of a layer is left out, one is doubled, one comes
    under a strange name.
    """
    layers = [spec for spec in specs if ".layers." in spec[0] and len(spec[2]) == 2]
    lost, (name, dtype, shape) = layers[0], layers[-1]
    strange = f"{name}_of_another_model"
    others = [spec for spec in specs if spec[0] != name]
    return [
        (lost[0], [spec for spec in specs if spec != lost]),
        (name, [*others, (name, dtype, (2 * shape[0], *shape[1:]))]),
        (strange, [*specs, (strange, dtype, shape)]),
    ]


def check_on_ranks(model, weights, gather):
    """What the ranks say of a complete sync, and of three with one fault each."""
    specs = specs_of(weights)
    found = {
        at_fault: check(model, faulty, published=specs, gather=gather, is_distinct=True)
        for at_fault, faulty in three_faults(specs)
    }
    return {
        "complete": check(model, specs, published=specs, gather=gather).text(),
        "blind": check(model, specs, published=None, gather=gather).text(),
        "unnamed": [name for name, verdict in found.items() if names_in(verdict) != {name}],
    }


def names_in(verdict):
    texts = (*verdict.mismatched, *verdict.missing, *verdict.unexpected)
    return {text.split(" ")[0] for text in texts}
