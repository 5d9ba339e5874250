"""What the plugins' modules import, at the top of a file or in a function."""

import ast
from collections.abc import Iterator
from pathlib import Path

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"


def imports() -> Iterator[tuple[str, str, str]]:
    """(module of ours, module, name in it) of each `from module import name`; "" for `import`."""
    for path in sorted(PLUGINS.rglob("*.py")):
        ours = ".".join(path.relative_to(PLUGINS).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                yield from ((ours, node.module, alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((ours, alias.name, "") for alias in node.names)
