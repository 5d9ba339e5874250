"""Rehearsal of a weight update: what `load_weights` would do, found out without applying a byte."""

from sglang_loader.rehearsal.recorder import NotRehearsable, Use
from sglang_loader.rehearsal.rehearse import Refusal, Rehearsal, naming_refused, rehearse
from sglang_loader.rehearsal.sources import Spec

__all__ = ["NotRehearsable", "Refusal", "Rehearsal", "Spec", "Use", "naming_refused", "rehearse"]
