"""Where every exported tensor lies in the trainer ranks' parameters: traced once, for all routes.

    source_map = SourceMap(group, device)
    reason = source_map.trace(export)             # collective; None: it is known
    source_map.traced.tensors["lm_head.weight"]   # which bytes of which parameter
    now = source_map.current(export, traced)      # the parameters; raises if they were replaced

FSDP2's exports are traced as they run (`export_trace`). Sources that have a method `trace` know
better how; each rank may know a part of the export then, and the parts are merged.

An optimizer changes what is in the memory, and parameters that were offloaded come back at other
addresses. What is traced holds all the same, as long as they are of the same kinds (`SourceKinds`).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping

import torch

from verl_sglang_sync.collective import (
    TrainerGroup,
    common_reason,
    holds_everywhere,
    own_rank,
    world_size,
)
from verl_sglang_sync.sources.export import NamedTensor
from verl_sglang_sync.sources.export_trace import NotTraceable, TracedExport, trace_export
from verl_sglang_sync.sources.known_sources import SourceKinds, SourcesChanged, require_sources
from verl_sglang_sync.sources.merged_traces import NamedRanks, merged_traces

MAX_TRACES = 4
"""How often the parameters may be replaced by others before it is not worth the tracing."""


class SourceMap:
    """Of one trainer rank, for all its syncs.

    Attributes:
        off: why the export cannot be traced, equal on all ranks; None if it can, as far as known.
    """

    def __init__(self, group: TrainerGroup, device: torch.device) -> None:
        self.off: str | None = None
        self._group = group
        self._device = device
        self._found: tuple[TracedExport, SourceKinds] | None = None
        self._num_traces = 0

    @property
    def traced(self) -> TracedExport:
        """The export, after a good `trace`."""
        assert self._found is not None, "nothing was traced"
        return self._found[0]

    def trace(self, export: Iterable[NamedTensor]) -> str | None:
        """Trace the export, unless what was traced before still holds; collective.

        Returns:
            Why it cannot be traced, equal on all ranks; None if it was.
        """
        if self.off is not None:
            return self.off
        if holds_everywhere(self._group, self._holds(export)):
            return None
        self._num_traces += 1
        self._found, reason = None, None
        try:
            self._found = self._trace(export)
        except NotTraceable as error:
            reason = str(error)
        except Exception:
            reason = traceback.format_exc()
        self.off = common_reason(self._group, reason) or self._merge()
        if self.off is not None:
            self._found = None
        return self.off

    def _merge(self) -> str | None:
        """Put together what the ranks have traced; collective.

        Returns:
            Why it does not fit, equal on all ranks; None: all ranks know all of the export.
        """
        assert self._found is not None
        traced, kinds = self._found
        own = NamedRanks.of(traced)
        named: list[NamedRanks] = self._group.all_gather(own)
        if len(set(named)) > 1:
            is_first = [each.rest for each in named].index(own.rest) == own_rank()
            traces = self._group.all_gather(traced if is_first else None)
            try:
                self._found = merged_traces(named, traces), kinds
            except NotTraceable as error:
                return str(error)
        return None

    def current(self, export: object, traced: TracedExport) -> Mapping[str, torch.Tensor]:
        """The parameters as they are now, by name, wherever they lie.

        Args:
            traced: what the caller has planned with.

        Raises:
            SourcesChanged: the export was traced anew since, or a parameter is not of the kind that
                it was then.
        """
        if self._found is None or self._found[0] is not traced:
            raise SourcesChanged("the export was traced anew")
        now = require_sources(export)()
        if (other := self._found[1].first_other(now)) is not None:
            raise SourcesChanged(f"{other} is not what it was when the export was traced")
        return now

    def _holds(self, export: Iterable[NamedTensor]) -> bool:
        try:
            return self._found is not None and bool(self.current(export, self._found[0]))
        except Exception:  # the other ranks wait for an answer; tracing anew tells the reason
            return False

    def _trace(self, export: Iterable[NamedTensor]) -> tuple[TracedExport, SourceKinds]:
        """No rank waits for another."""
        if self._num_traces > MAX_TRACES:
            raise NotTraceable(f"the parameters were replaced by others {MAX_TRACES} times")
        sources = require_sources(export)
        if (trace := getattr(sources, "trace", None)) is not None:
            return trace(self._device), SourceKinds(sources())
        traced = trace_export(export, sources=sources, world_size=world_size(), device=self._device)
        return traced, SourceKinds(sources())
