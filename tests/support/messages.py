"""SGLang's messages, made of the fields that a test is about."""

import inspect
from typing import Any


def message(kind: type, **fields: Any) -> Any:
    """A message of this class; None for what must be given and is not."""
    parameters = inspect.signature(kind).parameters.values()
    required = [each.name for each in parameters if each.default is inspect.Parameter.empty]
    return kind(**{**dict.fromkeys(required), **fields})
