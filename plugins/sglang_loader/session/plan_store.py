"""Load plans that outlive the process: a later one proves what this one has traced and proven.

    store = PlanStore(model, context)
    store.prepare()                        # while the engine waits
    saved = store.find(first_layout)       # None: the load must be traced
    store.save(plan, uses)                 # after the plan was proven, in a thread
    store.discard()                        # a proof of the plan has failed

A saved plan is never trusted. The sync that finds it goes through `load_weights`, and the proof of
the route must show that the plan leaves the same bytes. If anything is in doubt, there is no saved
plan: the load is traced, as without this module. The engine ranks of all engines of a user share
one folder on each host.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from sglang_loader.common.engine_settings import load_plans_folder
from sglang_loader.common.layout import BucketLayout, digest_of, encode_layout
from sglang_loader.common.private_files import keep_newest, read_private, write_private
from sglang_loader.common.threads import in_thread
from sglang_loader.load_plan.plan import LoadPlan
from sglang_loader.load_plan.saved_plan import SavedPlan, decode_plan, encode_plan
from sglang_loader.load_plan.uses import BucketUses
from sglang_loader.session.plan_key import plan_key

logger = logging.getLogger(__name__)

MAX_FILES = 64
"""The number of saved plans that are kept, of all models and ranks. 30 B has a file of 5 MB."""


class PlanStore:
    """The saved load plans of one model on this engine rank.

    Attributes:
        remarks: messages for the user, of files that were refused.
    """

    def __init__(self, model: Any, context: Mapping[str, object]) -> None:
        self.remarks: list[str] = []
        self._model = model
        self._context = context
        self._folder = load_plans_folder()
        self._key: dict[str, str] | None = None
        self._path: Path | None = None  # of this model's plan, once its first bucket is known

    def prepare(self) -> None:
        """Compute the part of the key that is known before the first bucket."""
        if self._folder is None or self._key is not None:
            return
        try:
            self._key = plan_key(self._model, self._context)
        except Exception as error:  # of a model or configuration of any kind: the load is traced
            self._refuse(repr(error))
            self._folder = None

    def find(self, first: BucketLayout) -> SavedPlan | None:
        """Return the saved plan for a sync that begins with this bucket, or None."""
        self.prepare()
        if self._folder is None or self._key is None:
            return None
        self._key["first_bucket"] = digest_of(encode_layout(first))
        self._path = self._folder / hashlib.sha256(repr(self._key).encode()).hexdigest()
        try:
            data = read_private(self._path)
            return decode_plan(data, self._key) if data is not None else None
        except Exception as error:  # whatever is in the file, the load is traced
            self._refuse(repr(error))
            return None

    def save(self, plan: LoadPlan, uses: Sequence[BucketUses]) -> Future[None] | None:
        """Save a plan that was proven, in a thread. Errors are logged."""
        if self._path is None or self._key is None:
            return None
        write = partial(self._write, self._path, dict(self._key), plan, tuple(uses))
        return in_thread(write, "save-load-plan")

    def _write(
        self,
        path: Path,
        key: Mapping[str, str],
        plan: LoadPlan,
        uses: Sequence[BucketUses],
        _: Future[None],
    ) -> None:
        try:
            write_private(path, encode_plan(key, plan, uses))
            keep_newest(path.parent, MAX_FILES)
        except Exception as error:  # nobody waits for this thread
            self._refuse(repr(error))

    def discard(self) -> None:
        """Remove the saved plan. Call this after a failed proof."""
        if self._path is not None:
            try:
                self._path.unlink(missing_ok=True)
            except OSError as error:
                self._refuse(str(error))

    def _refuse(self, reason: str) -> None:
        remark = (
            f"the saved load plans are not used: {reason}. The first sync after a start takes some "
            f"seconds longer. Remove {self._folder} to begin anew"
        )
        logger.warning("%s", remark)
        self.remarks.append(remark)
