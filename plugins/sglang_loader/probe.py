"""Probe of our hooks: it loads SGLang's plugins as every SGLang process does."""

from __future__ import annotations

import logging
import traceback

import msgspec

HOOKS = "sglang_loader.hooks."
"""Prefix of the names of the modules that have our hooks."""


class PluginFacts(msgspec.Struct, frozen=True, kw_only=True):
    """State of a process that has loaded the plugins of SGLang, or those of verl.

    Attributes:
        load_errors: errors of our plugin or hooks, with tracebacks.
        hooks: by hooked method, True if the hook is in place.
    """

    load_errors: list[str]
    hooks: dict[str, bool]


class _Errors(logging.Handler):
    """A log handler that keeps the errors that SGLang's plugin loader logs and does not raise."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        trace = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
        self.messages.append(f"{record.getMessage()}\n{trace}".strip())


def collect() -> PluginFacts:
    """Load the plugins in this process and inspect SGLang's hook registry."""
    # The handler comes first: an import of SGLang may log an error already.
    errors = _Errors()
    logging.getLogger("sglang.srt.plugins").addHandler(errors)
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    load_plugins()
    # Registered for us, and in place only if SGLang found the target.
    hooks = {
        target: target in HookRegistry._patched
        for target, registered in HookRegistry._hooks.items()
        if any(hook.__module__.startswith(HOOKS) for _, hook, _ in registered)
    }
    return PluginFacts(
        load_errors=[
            text
            for text in errors.messages
            if "verl_sglang_sync" in text or any(target in text for target in hooks)
        ],
        hooks=hooks,
    )
