"""The trainer's part of the manifest check: what will be sent, before the first byte is.

The first sync of a process goes through the export once for its names, dtypes and shapes, and each
replica's leader asks its engine whether they fit. Later syncs are compared with that manifest while
they are exported, a tensor or a bucket at a time; a difference is an error before its bucket is
applied, and the next sync makes the manifest anew.

    gate = ManifestGate(settings.manifest_check, group.agree)
    if gate.must_ask(weights):                      # the same on all ranks
        manifest = gate.announce(weights)           # all ranks
        verdicts = ask(manifest.encoded)            # leaders
        gate.settle(manifest, verdicts)             # all ranks; raises on all
    sync(gate.export(weights))
    gate.confirm()                                  # or gate.forget(), if it failed
"""

from __future__ import annotations

import logging
import traceback
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sglang_loader.manifest_verdict import ManifestVerdict
from sglang_loader.weight_manifest import WeightManifest, encode_manifest
from verl_sglang_sync.collective import RoundResult, RoundState
from verl_sglang_sync.config import ManifestCheck
from verl_sglang_sync.reexport import NamedTensor, is_repeatable
from verl_sglang_sync.weight_sync import Export, Spec, WeightSyncError

logger = logging.getLogger(__name__)


BEFORE_FIRST_BYTE = (
    "weight sync failed before its first byte; the engine's weights are as they were"
)
AFTER_LAST_BYTE = "weight sync failed: the engine's weights are not what was sent"


class Agree(Protocol):
    """See `TrainerGroup.agree`."""

    def __call__(
        self, state: RoundState, failure: str | None, signature: int = 0, /
    ) -> RoundResult: ...


@dataclass(frozen=True)
class Announcement:
    """What this rank will send, or why that could not be found out.

    Attributes:
        specs: the export, in order.
        encoded: on the wire.
        failure: the traceback of an export that died.
    """

    specs: list[Spec]
    encoded: bytes
    failure: str | None = None

    @classmethod
    def of(cls, specs: list[Spec], *, is_complete: bool = True) -> Announcement:
        """Announce what was exported."""
        manifest = WeightManifest.of(
            ((name, dtype, tuple(shape)) for name, dtype, shape in specs), is_complete=is_complete
        )
        return cls(specs, encode_manifest(manifest))


class ManifestGate:
    """Knows, in every trainer process, which manifest its engines have accepted.

    Args:
        level: "error" ends a sync that does not fit, "warn" logs it, "off" does nothing.
        agree: collective over the trainer's ranks.
    """

    def __init__(self, level: ManifestCheck, agree: Agree) -> None:
        self._level = level
        self._agree = agree
        self._accepted: Announcement | None = None
        self._is_confirmed = False
        self._has_said_one_shot = False
        self._logged: set[str] = set()
        self._export: Export | None = None

    @property
    def accepted(self) -> Announcement | None:
        """The manifest that the next sync must equal; None if there is none."""
        return self._accepted

    @property
    def is_confirmed(self) -> bool:
        """True after a good sync of exactly the accepted manifest, where a difference is an error:
        whoever remembers that sync may compare with it instead.
        """
        return self._is_confirmed and self._level == "error"

    def must_ask(self, weights: Iterable[NamedTensor]) -> bool:
        """True if the manifest is not known and can be made before the sync."""
        if self._level == "off" or self._accepted is not None:
            return False
        return is_repeatable(weights)

    def must_check_in_parts(self, weights: Iterable[NamedTensor], how: str) -> bool:
        """True if the manifest is not known and the export cannot be repeated; said once.

        Args:
            weights: the export.
            how: the check is done instead.
        """
        if self._level == "off" or self._accepted is not None or is_repeatable(weights):
            return False
        if not self._has_said_one_shot:
            self._has_said_one_shot = True
            logger.warning(
                "the export cannot be started again, so that its first sync is checked %s instead "
                "of before the first byte",
                how,
            )
        return True

    def announce(self, weights: Iterable[NamedTensor]) -> Announcement:
        """Go through the export for its manifest; collective, every rank must call this."""
        specs: list[Spec] = []
        try:
            for name, tensor in Export(weights):
                specs.append((name, tensor.dtype, tensor.shape))
                del tensor  # before the next is made
            return Announcement.of(specs)
        except Exception:
            return Announcement([], b"", traceback.format_exc())

    def settle(
        self,
        announcement: Announcement,
        verdicts: Sequence[ManifestVerdict],
        failure: str | None = None,
        *,
        is_sent: bool = False,
    ) -> None:
        """Agree with all ranks on the engines' verdicts; every rank must call this.

        Args:
            announcement: this rank's.
            verdicts: of this rank's engines; empty on ranks that lead none.
            failure: a traceback of asking them.
            is_sent: the weights have been applied already.

        Raises:
            WeightSyncError: on every rank, if anything on any of them does not fit.
        """
        failure = announcement.failure or failure or self.problem_of(verdicts)
        names = "".join(f"{name}\0" for name, _, _ in announcement.specs).encode()
        result = self._agree(
            RoundState.FAILED if failure else RoundState.END,
            failure,
            len(announcement.specs) << 32 | zlib.crc32(names),
        )
        reasons = list(result.failures)
        if not reasons and len(set(result.signatures)) > 1:
            counts = [signature >> 32 for signature in result.signatures]
            reasons = [f"the ranks export different tensors; their number, by rank: {counts}"]
        if reasons:
            self.forget()
            when = AFTER_LAST_BYTE if is_sent else BEFORE_FIRST_BYTE
            raise WeightSyncError("\n".join([when, *reasons]))
        self._accepted, self._is_confirmed = announcement, False

    def problem_of(self, verdicts: Sequence[ManifestVerdict]) -> str | None:
        """What must end the sync; everything else that is worth a word is logged, once."""
        problem = None
        for verdict in verdicts:
            if verdict.not_checked is not None:
                self._say(f"the manifest was not checked: {verdict.not_checked}")
            elif not verdict.fits:
                text = f"the weights do not fit the engine's model\n{verdict.text()}"
                if self._level == "error":
                    problem = text
                else:
                    self._say(text)
            if verdict.doubtful:
                self._say(f"not in the manifest, or not used: {', '.join(verdict.doubtful[:20])}")
        return problem

    def export(self, weights: Iterable[NamedTensor], *, compared: bool = True) -> Export:
        """The export of one sync, compared with the accepted manifest.

        Args:
            weights: the trainer's.
            compared: False: the caller compares it, see `is_confirmed`.
        """
        known = self._accepted.specs if self._accepted is not None and compared else None
        must_equal = self._level == "error"
        self._export = Export(
            weights,
            known,
            must_equal=must_equal,
            remember=self._accepted is None and self._level != "off",
        )
        return self._export

    def confirm(self) -> None:
        """The sync was good: the next one is compared with it."""
        export, self._export = self._export, None
        if export is not None and export.has_changed:
            self._say("the export differs from its manifest, which is made anew")
            self.forget()
        elif self._accepted is not None:
            self._is_confirmed = True

    def accept(self, announcement: Announcement) -> None:
        """What was checked part by part has proved to fit."""
        self._accepted = announcement

    def forget(self) -> None:
        """The sync failed: the next one is checked as the first one was."""
        self._accepted, self._is_confirmed, self._export = None, False, None

    def _say(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            logger.warning("manifest check: %s", text)
