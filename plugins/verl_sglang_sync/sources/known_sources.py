"""The tensors that a traced export reads: are they still what and where they were?

    known = KnownSources(sources(), sources) # when the export is traced
    now = sources()                          # in a later sync
    known.check(now)                         # raises: trace it again
    for _ in known.checks(sources): ...      # or so, in small steps

An optimizer changes what is in the memory, and a trace stays true. Whoever moves a tensor, or puts
another in its place, may have changed what the export makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from verl_sglang_sync.sources.module_tree import ModuleState, ModuleTree
from verl_sglang_sync.sources.tensor_marks import STEP, TensorMarks, describe_tensors, locals_of

Sources = Callable[[], Mapping[str, torch.Tensor]]
"""The tensors that an export reads, by name, as they are now: parameters, sharded or not."""


def sources_of(export: object) -> Sources | None:
    """What an export reads; None where it does not say."""
    sources: Sources | None = getattr(export, "sources", None)
    return sources


def empties_storages(export: object) -> bool:
    """True if what an export reads may be offloaded and come back into the same storages: that one
    lives, at the same address even, does not say that it is the memory that it was.
    """
    return bool(getattr(sources_of(export), "empties_storages", False))


class SourcesChanged(ValueError):
    """A source is not what or where it was; names it."""


def require_sources(export: object) -> Sources:
    """What an export reads.

    Raises:
        SourcesChanged: it does not say.
    """
    sources = sources_of(export)
    if sources is None:
        raise SourcesChanged("the export does not say which tensors it reads")
    return sources


class KnownSources:
    """Tensors that are recognised; keeps no memory.

    Args:
        now: by name.
        sources: what gave them.
    """

    def __init__(self, now: Mapping[str, torch.Tensor], sources: Sources | None = None) -> None:
        self._names = list(now)
        tensors = list(now.values())
        self._marks = [TensorMarks(tensors[i : i + STEP]) for i in range(0, len(tensors), STEP)]
        self._tree: ModuleTree | None = None
        if isinstance(sources, ModuleState) and ModuleTree.is_all_of(now, sources.module):
            self._tree = ModuleTree(sources.module)

    def check(self, now: Mapping[str, torch.Tensor]) -> None:
        """Compare with the tensors as they are now.

        Raises:
            SourcesChanged: they are other tensors, or elsewhere.
        """
        for _ in self._compare(now):
            pass

    def checks(self, sources: Sources) -> Iterator[None]:
        """As `check`, in small steps, as far as that is possible; all must be taken."""
        if self._tree is not None and isinstance(sources, ModuleState):
            is_same = yield from self._tree.compare(sources.module)
            if is_same:
                return
        yield from self._compare(sources())

    def _compare(self, now: Mapping[str, torch.Tensor]) -> Iterator[None]:
        names = self._names
        if now.keys() != set(names):
            raise SourcesChanged(f"the trainer's tensors changed: {len(now)}, {len(names)} before")
        for start, marks in zip(range(0, len(names), STEP), self._marks, strict=True):
            changed = marks.first_changed([now[name] for name in names[start : start + STEP]])
            if changed is not None:
                raise SourcesChanged(
                    f"{names[start + changed]} is not where or what it was when the export was "
                    "traced"
                )
            yield


class SourceKinds:
    """What tensors are, wherever they lie: a trace holds for others of the same kinds.

    Args:
        now: by name.
    """

    def __init__(self, now: Mapping[str, torch.Tensor]) -> None:
        self._names = list(now)
        self._kinds = list(describe_tensors(list(now.values())))

    def first_other(self, now: Mapping[str, torch.Tensor]) -> str | None:
        """The first tensor that is of another kind now: dtype, shape, strides, placement, or which
        of the others share its memory. None: all are as then, though perhaps elsewhere.
        """
        if list(now) != self._names:
            return "the set of the trainer's tensors"
        kinds = describe_tensors(list(now.values()))
        for number, (some, then) in enumerate(zip(kinds, self._kinds, strict=True)):
            if some != then:
                names = self._names[number * STEP :]
                rows = zip(zip(*some, strict=True), zip(*then, strict=True), strict=True)
                return next(n for n, (kind, was) in zip(names, rows, strict=False) if kind != was)
        return None


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of what this rank has of a tensor, which is contiguous. Flat uint8."""
    [local] = locals_of([tensor])
    whole = torch.empty(0, dtype=torch.uint8, device=local.device).set_(local.untyped_storage())
    start, size = int(local.storage_offset()), local.element_size()
    return whole[start * size : (start + local.numel()) * size]
