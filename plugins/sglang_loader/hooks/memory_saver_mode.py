"""Which of its two ways torch-memory-saver takes in an engine's process (0.0.10).

CUDA graphs can be released by tag only in the way that SGLang prepares its processes for, by
`LD_PRELOAD`. But SGLang 0.5.14 imports megatron-core wherever that is installed (for a debugging
aid of its own), and megatron-core 0.16.1 chooses the other way for the whole process as soon as it
is imported: then the capture of a graph under a tag ends the server with a failed assertion.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

PRELOAD = "preload"


def choose_preload() -> None:
    """Take the way of `LD_PRELOAD`, whoever has chosen another; before anything is allocated.

    Raises:
        RuntimeError: memory is allocated the other way already.
    """
    from torch_memory_saver import torch_memory_saver as saver

    if saver._impl is not None:
        if saver._impl._hook_mode != PRELOAD:
            raise RuntimeError(
                f"torch-memory-saver already works with hook_mode={saver._impl._hook_mode!r}, with "
                f"which CUDA graphs cannot be released; allowed: {PRELOAD!r}. Take cuda_graph out "
                "of sleep_order and wake_order"
            )
        return
    chosen = saver._impl_ctor_kwargs.get("hook_mode", PRELOAD)
    saver.hook_mode = PRELOAD
    if chosen != PRELOAD:
        text = "torch-memory-saver: hook_mode=%r, not %r: graphs are released"
        logger.info(text, PRELOAD, chosen)
