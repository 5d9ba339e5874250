"""What all ranks decide alike before an export is left out; each function is collective."""

from __future__ import annotations

from verl_sglang_sync.collective import RoundState, TrainerGroup


def holds_everywhere(group: TrainerGroup, holds: bool) -> bool:
    """True if `holds` on every rank."""
    state = RoundState.END if holds else RoundState.BUCKET
    return RoundState.BUCKET not in group.agree(state, None).states


def common_reason(group: TrainerGroup, reason: str | None, signature: int = 0) -> str | None:
    """Why the export cannot be left out: the reasons of all ranks; None if no rank has one.

    Args:
        group: the trainer's ranks.
        reason: this rank's.
        signature: of what this rank traced; equal on all ranks, or that is a reason.
    """
    state = RoundState.END if reason is None else RoundState.FAILED
    result = group.agree(state, reason, signature)
    if result.failures:
        return "; ".join(result.failures)
    if len(set(result.signatures)) > 1:
        return "the ranks traced different exports"
    return None
