"""Hooks on the release and resume of SGLang's memory, by tag.

The hooks change SGLang's behaviour for servers that were launched with our loaders:

- In SGLang, a resume of a resident tag or of an unknown tag raises KeyError, a release while
  requests run fails an assertion, and a resume of more than there is room for aborts. Each ends the
  scheduler process. Here a resume of a resident tag is a no-op, and the others are refused with a
  reason.
- In SGLang, a release of a released tag unmaps the memory twice. Here it is a no-op.
- In SGLang, the reply has no fields for an error or for costs. Here the facts `refusal` and `costs`
  travel with the reply to the process that serves HTTP, see `hooks.http`.
- SGLang runs requests although their memory is released. Here `hooks.request_gate` holds them back.
- One more tag stands for no memory, but for the requests (`REQUESTS_TAG`).
- SGLang releases the tags of a request in its own order. Here the request has the order.
- SGLang copies all weights to the host before a release. In mode compiled `host_backup/` copies
  only what no sync is proven to rewrite.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from sglang_loader.common.engine_settings import (
    CUDA_GRAPH_TAG,
    REQUESTS_TAG,
    TAKEN_BY_TRAINER,
    graphs_are_released_by_tag,
    requested_host_backup,
)
from sglang_loader.common.kernels import compile_kernels
from sglang_loader.common.regions.intervals import num_bytes
from sglang_loader.common.replies import Cost, by_rank
from sglang_loader.hooks.request_gate import closing_reason, refuse_requests, set_gate
from sglang_loader.hooks.tp_ranks import TPRanks, run_step
from sglang_loader.host_backup.allocations import (
    WEIGHTS_TAG,
    enumeration_problem,
    nbytes_in_pool,
    nbytes_under,
    under_weights_tag,
)
from sglang_loader.host_backup.backup import WeightsBackup, backup_of, create_backup
from sglang_loader.upstream import (
    device_of,
    facts_of,
    io_struct,
    is_idle,
    is_ours,
    memory_tags,
    release_problem,
    stock_backup_reason,
    with_facts,
    without_cpu_backup,
)

logger = logging.getLogger(__name__)

KV_CACHE_TAG = "kv_cache"
PRELOAD = "preload"
# SGLang's orders if a request names no tags.
RELEASE_ORDER = (KV_CACHE_TAG, WEIGHTS_TAG, CUDA_GRAPH_TAG)
RESUME_ORDER = (CUDA_GRAPH_TAG, WEIGHTS_TAG, KV_CACHE_TAG)

Original = Callable[..., Any]


def load_model(original: Original, runner: Any) -> None:
    """Wrap `ModelRunner.load_model`: load without SGLang's own backup if ours takes its place.

    In mode compiled the kernels of the first sync are compiled, too.
    """
    arguments = runner.server_args
    if not is_ours(arguments):
        original(runner)
        return
    if arguments.enable_memory_saver and graphs_are_released_by_tag():
        force_preload()
    policy = requested = requested_host_backup()
    reason = None if policy == "on" else stock_backup_reason(runner, enumeration_problem())
    if reason is not None:
        logger.info("SGLang itself decides which weights the host keeps: %s", reason)
        policy = "on"
    with nullcontext() if policy == "on" else without_cpu_backup(runner):
        original(runner)
    if requested != "on":  # mode compiled: the first sync would wait for them
        compile_kernels(device_of(runner.model))
    # The target's backup saves all memory under the tag, also a draft model's, which no load plan
    # covers.
    if runner.is_draft_worker:
        return
    if policy != "on":
        size = num_bytes(under_weights_tag(runner.model).ranges)
        logger.info("%.1f MB of weights are under the tag of the weights", size / 1e6)
    create_backup(runner.model, policy, under_weights_tag)


def force_preload() -> None:
    """Force torch-memory-saver's `hook_mode=preload`, before anything is allocated.

    CUDA graphs can be released by tag in this mode alone. SGLang prepares its processes for this
    mode.

    Raises:
        RuntimeError: memory is already allocated in the other mode.
    """
    # SGLang 0.5.14 imports megatron-core if that is installed, for a debugging aid of its own. As
    # soon as megatron-core 0.16.1 is imported, it chooses the other mode for the whole process. The
    # capture of a graph under a tag would then end the server with a failed assertion.
    from torch_memory_saver import torch_memory_saver as saver

    if saver._impl is not None:  # memory is allocated, so the mode is fixed
        if saver._impl._hook_mode != PRELOAD:
            raise RuntimeError(
                f"torch-memory-saver already works with hook_mode={saver._impl._hook_mode!r}, with "
                f"which CUDA graphs cannot be released. Allowed: {PRELOAD!r}. Set "
                "release_cuda_graphs=False"
            )
        return
    chosen = saver._impl_ctor_kwargs.get("hook_mode", PRELOAD)
    saver.hook_mode = PRELOAD
    if chosen != PRELOAD:
        text = "torch-memory-saver: hook_mode=%r, not %r, which cannot release CUDA graphs"
        logger.info(text, PRELOAD, chosen)


def release_tags(original: Original, updater: Any, request: Any) -> Any:
    """Wrap `release_memory_occupation`: save the weights, then release the resident tags."""
    if not is_ours(updater.tp_worker.server_args):
        return original(updater, request)
    if request.tags == [REQUESTS_TAG]:
        refuse_requests(TAKEN_BY_TRAINER)
        return io_struct().ReleaseMemoryOccupationReqOutput()
    requested, failure = _requested_tags(request.tags or RELEASE_ORDER)
    tags = [tag for tag in requested if tag not in updater.offload_tags]
    if not tags and failure is None:  # all are released already
        return io_struct().ReleaseMemoryOccupationReqOutput()
    # Each condition that would end SGLang's process becomes a refusal before anything changes.
    is_busy = failure is None and not is_idle(updater)
    if is_busy:
        failure = f"release of {tags} refused: requests are running"
    if failure is None and WEIGHTS_TAG in tags and (reason := release_problem(updater)):
        failure = f"release of {tags} refused: {reason}"
    model = updater.tp_worker.model_runner.model
    backup = backup_of(model) if WEIGHTS_TAG in tags else None
    started = time.perf_counter()
    if failure is None and backup is not None:
        _, problem = run_step(partial(backup.save, model))
        if problem is not None:
            failure = f"release of {tags} refused: the weights could not be saved: {problem}"
    # If one rank refuses, no rank releases: the ranks' memory must stay in step.
    if failures := TPRanks(updater).failures(failure):
        if backup is not None:
            backup.release_refused()
        reply = io_struct().ReleaseMemoryOccupationReqOutput()
        return _with_refusal(with_facts(reply, is_busy=is_busy), failures)
    saving_s = time.perf_counter() - started
    return _call_by_tag(original, updater, request, tags, _sizes(updater, tags), saving_s=saving_s)


def resume_tags(original: Original, updater: Any, request: Any) -> Any:
    """Wrap `resume_memory_occupation`: resume the released tags, and restore the weights."""
    if not is_ours(updater.tp_worker.server_args):
        return original(updater, request)
    if request.tags == [REQUESTS_TAG]:
        refuse_requests(None)
        return io_struct().ResumeMemoryOccupationReqOutput()
    requested, failure = _requested_tags(request.tags or RESUME_ORDER)
    tags = [tag for tag in requested if tag in updater.offload_tags]
    if not tags and failure is None:  # all are resident already
        return io_struct().ResumeMemoryOccupationReqOutput()
    backup = backup_of(updater.tp_worker.model_runner.model)
    sizes = _sizes(updater, tags)
    failure = failure or _lack_of_memory(sizes)
    # The resumed cache is the last step before requests run, so the weights must be complete.
    is_cache_alone = KV_CACHE_TAG in tags and WEIGHTS_TAG not in tags
    if failure is None and backup is not None and backup.stale and is_cache_alone:
        failure = f"resume of {tags} refused: {backup.stale}. Sync the weights first"
    if failures := TPRanks(updater).failures(failure):
        return _with_refusal(io_struct().ResumeMemoryOccupationReqOutput(), failures)
    return _call_by_tag(original, updater, request, tags, sizes, backup=backup)


def _call_by_tag(
    original: Original,
    updater: Any,
    request: Any,
    tags: Sequence[str],
    sizes: Mapping[str, int],
    *,
    saving_s: float = 0.0,
    backup: WeightsBackup | None = None,
) -> Any:
    """Call SGLang's method for one tag after the other.

    Args:
        sizes: device memory of each tag, in bytes.
        saving_s: seconds that it took to save the weights. They are added to the cost of their tag.
        backup: restored as soon as the weights are mapped, or None if there is nothing to restore.

    Returns:
        SGLang's last reply, with the costs on all ranks.
    """
    ranks = TPRanks(updater)
    failure: str | None = None
    reply: Any = None
    costs: dict[str, Cost] = {}
    for tag in tags:
        # One call for each tag, in the order of the request, so that each has its own cost.
        started = time.perf_counter() - (saving_s if tag == WEIGHTS_TAG else 0.0)
        tag_request = copy.copy(request)
        tag_request.tags = [tag]
        reply = original(updater, tag_request)
        if tag == WEIGHTS_TAG and backup is not None:
            _, problem = run_step(backup.restore)
            if problem is not None:
                failure = ranks.named(f"the weights could not be restored: {problem}")
        seconds, host_bytes = time.perf_counter() - started, _host_bytes(updater, tag)
        costs[tag] = {"seconds": seconds, "gpu_bytes": sizes[tag], "host_bytes": host_bytes}
    # All ranks close or open their gates together, for the reason of the first that has one.
    closed = failure or closing_reason(updater)
    outcomes = ranks.gather((costs, failure, closed))
    closed = next((reason for _, _, reason in outcomes if reason), None)
    rank_costs = by_rank([costs for costs, _, _ in outcomes])
    reply = with_facts(reply, costs=rank_costs, closed=closed)
    set_gate(closed)
    failures = [text for _, text, _ in outcomes if text]
    return _with_refusal(reply, failures) if failures else reply


def _with_refusal(reply: Any, failures: Sequence[str]) -> Any:
    """Return the reply, with the failures as its `refusal`."""
    refusal = "\n".join(failures)
    if not facts_of(reply).get("is_busy"):  # a request to a busy engine is repeated in milliseconds
        logger.error("%s", refusal)
    return with_facts(reply, refusal=refusal)


def _requested_tags(tags: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the tags of a request, each once, and an error if a tag is unknown."""
    allowed = memory_tags()
    requested = list(dict.fromkeys(tags))
    if unknown := [tag for tag in requested if tag not in allowed]:
        return [], f"unknown memory tags {unknown}. Allowed: {', '.join(allowed)}"
    return requested, None


def _lack_of_memory(sizes: Mapping[str, int]) -> str | None:
    """Return the reason why these tags cannot be mapped, or None."""
    # A resume without enough memory would end the process.
    if not torch.cuda.is_available():
        return None
    needed = sum(sizes.values())
    free = torch.cuda.mem_get_info()[0]
    if needed > free:
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
    if needed <= free:
        return None
    return (
        f"resume of {list(sizes)} refused: it needs {needed / 1e6:.0f} MB of GPU memory, "
        f"{(needed - free) / 1e6:.0f} MB more than are free"
    )


def _sizes(updater: Any, tags: Sequence[str]) -> dict[str, int]:
    """Return the device memory under each tag on this rank, in bytes, mapped or not."""
    return {tag: _gpu_bytes(updater, tag) for tag in tags}


def _gpu_bytes(updater: Any, tag: str) -> int:
    if not torch.cuda.is_available():
        return 0
    device = torch.cuda.current_device()
    if tag != CUDA_GRAPH_TAG:
        return nbytes_under(tag, device)
    if not graphs_are_released_by_tag():
        return 0
    # The graphs' pool is torch's own; the memory saver marks what is allocated during a capture.
    runner = getattr(updater.tp_worker.model_runner, "decode_cuda_graph_runner", None)
    pool_id = getattr(getattr(runner, "backend", None), "_pool", None)
    return 0 if pool_id is None else nbytes_in_pool(pool_id, device)


def _host_bytes(updater: Any, tag: str) -> int:
    """Return the host memory that holds a copy of the memory under `tag`, in bytes."""
    if tag != WEIGHTS_TAG:
        return 0
    backup = backup_of(updater.tp_worker.model_runner.model)
    ours = 0 if backup is None else backup.host_bytes
    if not torch.cuda.is_available() or tag not in updater.offload_tags:
        return ours
    return ours + nbytes_under(tag, torch.cuda.current_device(), on_host=True)
