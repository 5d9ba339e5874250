"""What the hooks on release and resume of SGLang's memory do, by tag (sglang 0.5.14).

Stock behaviour that they mend, only for servers that were launched with our loaders:

- resuming a tag that is resident raises KeyError, an unknown tag does too, a release while
  requests run fails an assertion, and resuming more than there is room for aborts: each ends the
  scheduler process. Here the first is a no-op and the others are refused, with a reason;
- releasing a released tag unmaps it twice: here it is a no-op;
- the reply cannot say that something went wrong: a `refusal` travels on it, and the process that
  serves HTTP raises it;
- all weights are copied to the host before a release: see `host_backup`.
"""

from __future__ import annotations

import dataclasses
import logging
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import torch

from sglang_loader.bucket_loader import LOADERS
from sglang_loader.host_backup import arm, backup_of
from sglang_loader.host_backup.allocations import (
    WEIGHTS_TAG,
    nbytes_under,
    under_weights_tag,
    why_not_enumerable,
)
from sglang_loader.host_backup.policy import Policy, requested_policy, why_stock
from sglang_loader.weight_updater_hooks import failures_on_any_rank

logger = logging.getLogger(__name__)

KV_CACHE_TAG = "kv_cache"

Original = Callable[..., Any]


class MemoryRequestRefused(RuntimeError):
    """The engine lives and did nothing; the message says what it was asked and why not."""


def load_model(original: Original, runner: Any) -> None:
    """AROUND `ModelRunner.load_model`: without SGLang's own backup where ours takes its place."""
    arguments = runner.server_args
    if not is_ours(arguments) or runner.is_draft_worker:
        original(runner)
        return
    policy = requested_policy()
    if policy == "on":
        original(runner)
        arm(runner.model, "on", under_weights_tag)
        return
    reason = why_stock(arguments, why_not_enumerable())
    if reason is not None:
        logger.info("host_backup=%s: SGLang's own behaviour, because %s", policy, reason)
        original(runner)
        arm(runner.model, "on", under_weights_tag)
        return
    arguments.enable_weights_cpu_backup = False  # read by the original, and nowhere else
    try:
        original(runner)
    finally:
        arguments.enable_weights_cpu_backup = True
    _tell(policy, under_weights_tag(runner.model).ranges)
    arm(runner.model, policy, under_weights_tag)


def _tell(policy: Policy, ranges: Sequence[tuple[int, int]]) -> None:
    size = sum(stop - start for start, stop in ranges) / 1e6
    if policy == "auto":
        logger.info(
            "host_backup=auto: %.1f MB of weights, saved on release except for what a sync is "
            "proven to rewrite",
            size,
        )
    else:
        logger.warning(
            "host_backup=off: %.1f MB of weights are lost on release except for named buffers; "
            "whatever a sync does not rewrite holds garbage afterwards, until a load plan has "
            "proven what that is",
            size,
        )


def release_tags(original: Original, updater: Any, request: Any) -> Any:
    """AROUND `release_memory_occupation`: saves, then releases the tags that are resident."""
    if not is_ours(updater.tp_worker.server_args):
        return original(updater, request)
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqOutput

    tags, failure = _split(request, lambda tag: tag not in updater.offload_tags)
    if not tags and failure is None:
        return ReleaseMemoryOccupationReqOutput()
    if failure is None and not updater.is_fully_idle():
        failure = f"release of {tags} refused: requests are running"
    model = updater.tp_worker.model_runner.model
    backup = backup_of(model) if WEIGHTS_TAG in tags else None
    if failure is None and backup is not None:
        try:
            backup.save(model)
        except Exception:
            failure = f"release of {tags} refused: no backup: {traceback.format_exc()}"
    if failures := _by_rank(updater, failure):
        if backup is not None:
            backup.release_refused()
        return _refused(ReleaseMemoryOccupationReqOutput(), failures)
    return original(updater, dataclasses.replace(request, tags=tags))


def resume_tags(original: Original, updater: Any, request: Any) -> Any:
    """AROUND `resume_memory_occupation`: resumes the tags that are released, then restores."""
    if not is_ours(updater.tp_worker.server_args):
        return original(updater, request)
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqOutput

    tags, failure = _split(request, lambda tag: tag in updater.offload_tags)
    if not tags and failure is None:
        return ResumeMemoryOccupationReqOutput()
    backup = backup_of(updater.tp_worker.model_runner.model)
    failure = failure or _lack_of_memory(tags)
    if failure is None and backup is not None and backup.stale and tags == [KV_CACHE_TAG]:
        failure = f"resume of {tags} refused: {backup.stale}; sync the weights first"
    if failures := _by_rank(updater, failure):
        return _refused(ResumeMemoryOccupationReqOutput(), failures)
    reply = original(updater, dataclasses.replace(request, tags=tags))
    if WEIGHTS_TAG not in tags or backup is None:
        return reply
    try:
        backup.restore()
    except Exception:
        failure = f"the weights could not be restored: {traceback.format_exc()}"
    failures = _by_rank(updater, failure)
    return _refused(reply, failures) if failures else reply


async def release_or_raise(original: Original, manager: Any, obj: Any, request: Any = None) -> None:
    """AROUND `TokenizerControlMixin.release_memory_occupation`: raises what the engine refused."""
    await _ask(original, manager, manager.release_memory_occupation_communicator, obj, request)


async def resume_or_raise(original: Original, manager: Any, obj: Any, request: Any = None) -> None:
    """AROUND `TokenizerControlMixin.resume_memory_occupation`: raises what the engine refused."""
    await _ask(original, manager, manager.resume_memory_occupation_communicator, obj, request)


async def _ask(
    original: Original,
    manager: Any,
    communicator: Callable[[Any], Awaitable[Iterable[Any]]],
    obj: Any,
    request: Any,
) -> None:
    """As the original, which drops the replies."""
    if not is_ours(manager.server_args):
        await original(manager, obj, request)
        return
    manager.auto_create_handle_loop()
    replies = await communicator(obj)
    if refusals := [text for text in (getattr(r, "refusal", None) for r in replies) if text]:
        raise MemoryRequestRefused("\n".join(refusals))


def _refused(reply: Any, failures: Sequence[str]) -> Any:
    """Upstream's reply has no field for a failure; it is pickled with its attributes."""
    reply.refusal = "\n".join(failures)
    logger.error("%s", reply.refusal)
    return reply


def _by_rank(updater: Any, failure: str | None) -> list[str]:
    """The failures of all TP ranks, each with its rank, on all of them."""
    text = f"TP rank {updater.tp_worker.tp_rank}: {failure}" if failure else None
    return failures_on_any_rank(updater, text)


def _split(request: Any, wanted: Callable[[str], bool]) -> tuple[list[str], str | None]:
    """The tags of a request that need something done, and what is wrong with the request."""
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    asked = list(dict.fromkeys(request.tags or GPU_MEMORY_ALL_TYPES))
    unknown = [tag for tag in asked if tag not in GPU_MEMORY_ALL_TYPES]
    if unknown:
        allowed = ", ".join(GPU_MEMORY_ALL_TYPES)
        return [], f"unknown memory tags {unknown}; allowed: {allowed}"
    return [tag for tag in asked if wanted(tag)], None


def _lack_of_memory(tags: Sequence[str]) -> str | None:
    """Why `tags` cannot be mapped now, or None; the memory saver would end the process."""
    if not torch.cuda.is_available():
        return None
    needed = nbytes_under(tags, torch.cuda.current_device())
    free = torch.cuda.mem_get_info()[0]
    if needed > free:
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
    if needed <= free:
        return None
    return (
        f"resume of {list(tags)} refused: it needs {needed / 1e6:.0f} MB of GPU memory, "
        f"{(needed - free) / 1e6:.0f} MB more than are free"
    )


def is_ours(server_args: Any) -> bool:
    """True where the server was launched with our loaders."""
    return any(path in LOADERS for path in server_args.custom_weight_loader or ())
