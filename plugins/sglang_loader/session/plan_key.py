"""The key of a saved load plan: all that a plan depends on, as a digest for each part.

    key = plan_key(model, engine_context(model))

A plan is used only if each part is the same as when the plan was saved. A part that differs without
need costs the time of a trace. A part that is lacking may cost a proof that fails, or a weight that
no later sync writes. So the key has more parts than any loader known depends on.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import psutil
import torch
from torch import nn

from sglang_loader.load_plan.guard import loading_functions
from sglang_loader.upstream import is_plain, launch_facts, rank_facts, sglang_version

VARIABLES = ("SGLANG_", "SGL_")
"""Prefixes of environment variables that may change how SGLang loads weights."""

# Ports of one launch, and what SGLang's own processes set while they start.
_OF_ONE_LAUNCH = ("_PORT", "_ADDR", "_RUN_ID", "_BLOCK_NONZERO_RANK_CHILDREN")


def plan_key(model: nn.Module, context: Mapping[str, object]) -> dict[str, str]:
    """Return the digest of each part of the key, by the name of the part.

    Args:
        context: see `upstream.engine_context`.

    Raises:
        CodeChanged: the code on disk is not the code of this process.
    """
    config = getattr(model, "config", None)
    parts: dict[str, object] = {
        "model": (_name(type(model)), _config_text(config)),
        "sglang": sglang_version(),
        "torch": (torch.__version__, platform.python_version()),
        "ranks": sorted(rank_facts().items()),
        "context": sorted(context.items()),
        "launch": sorted(launch_facts().items()),
        "environment": [
            (name, value)
            for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLES) and not name.endswith(_OF_ONE_LAUNCH)
        ],
        "modules": list(_plain_attributes(model)),
        "loaders": [*map(_function_text, loading_functions(model))],
        "sources": [_sources_digest(package) for package in sorted(_packages(model))],
    }
    return {name: _digest(repr(part)) for name, part in parts.items()}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _config_text(config: Any) -> str:
    """Return a model's configuration as text."""
    if not hasattr(config, "to_dict"):
        return repr(config) if is_plain(config) else ""
    return json.dumps(_without_paths(config.to_dict()), sort_keys=True, default=_type_name)


def _without_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the folders that it and its parts were read from."""
    return {
        name: _without_paths(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name != "_name_or_path"
    }


def _type_name(value: object) -> str:
    # The text of any other object might have an address.
    return str(value) if is_plain(value) else _name(type(value))


def _plain_attributes(model: nn.Module) -> Iterator[tuple[object, ...]]:
    """Yield the plain attributes of all modules and parameters. Loaders decide by such flags."""
    for path, module in model.named_modules():
        yield path, _name(type(module)), *_plain(vars(module))
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{path}.{name}", _name(type(parameter)), *_plain(vars(parameter))


def _plain(attributes: Mapping[str, object]) -> list[tuple[str, object]]:
    return [(name, value) for name, value in sorted(attributes.items()) if is_plain(value)]


def _name(kind: type | FunctionType) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _function_text(function: object) -> object:
    """Return a function's name and code, the same in all processes."""
    if isinstance(function, partial):
        return "partial", _function_text(function.func)
    if isinstance(function, MethodType):
        return _function_text(function.__func__)
    if isinstance(function, FunctionType):
        wrapped = getattr(function, "__wrapped__", None)
        inner = _function_text(wrapped) if wrapped is not None else None
        return _name(function), _code_text(function.__code__), inner
    return "" if function is None else _name(type(function))


@cache
def _code_text(code: CodeType) -> str:
    constants = [
        _code_text(constant) if isinstance(constant, CodeType) else _constant_text(constant)
        for constant in code.co_consts
    ]
    return _digest(repr((code.co_code, code.co_names, constants)))


def _constant_text(constant: object) -> str:
    # The order of a set differs between processes.
    return repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)


def _packages(model: nn.Module) -> set[str]:
    """Return the packages whose code loads the model: SGLang's, ours, and the user's own."""
    modules = {owner.__module__ for module in model.modules() for owner in type(module).__mro__}
    modules |= {str(getattr(function, "__module__", "")) for function in loading_functions(model)}
    names = {module.partition(".")[0] for module in modules}
    return (names | {"sglang", "sglang_loader"}) - {"torch", "builtins", ""}


class CodeChanged(Exception):
    """A Python file that was written after this process had started, so that it may run another."""


@cache
def _sources_digest(package: str) -> str:
    """Return the digest of all Python files of a package or module.

    Raises:
        CodeChanged: a file is newer than this process.
    """
    started = psutil.Process().create_time()
    module = sys.modules.get(package)
    digest = hashlib.sha256(package.encode())
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    if not folders and (file := getattr(module, "__file__", None)):
        files = [Path(file)]
    for file in files:
        if file.stat().st_ctime > started:
            raise CodeChanged(f"{file} is newer than this process")
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}".encode() + content)
    return digest.hexdigest()
