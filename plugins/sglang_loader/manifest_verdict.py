"""What an engine says about a manifest, on the wire; shared by both sides, and free of torch."""

from __future__ import annotations

import json

import msgspec

from sglang_loader.manifest import ManifestError

MANIFEST_CHECK = "sglang_loader.manifest_check"
"""`load_format` of the request that carries one: it is answered, and loads nothing."""


class ManifestVerdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine's answer: what of a manifest does not fit its model.

    Attributes:
        not_checked: why the check means nothing; None if it does.
        unexpected: tensors that the model would drop, or does not know.
        mismatched: tensors whose shape or dtype it cannot take, each with the reason.
        missing: weights that nothing in the manifest would write.
        doubtful: not errors: what cannot be told without the names of a published checkpoint.
    """

    not_checked: str | None = None
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    doubtful: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Nothing speaks against sending these tensors."""
        return not (self.unexpected or self.mismatched or self.missing)

    def text(self) -> str:
        """All findings in words, long lists cut short."""
        parts = [
            f"{len(found)} {kind}: {_listed(found)}"
            for kind, found in (
                ("mismatched", self.mismatched),
                ("missing", self.missing),
                ("unexpected", self.unexpected),
            )
            if found
        ]
        return "\n".join(parts)


MAX_NAMED = 20


def _listed(found: tuple[str, ...]) -> str:
    more = f", and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return ", ".join(found[:MAX_NAMED]) + more


def encode_verdict(verdict: ManifestVerdict) -> str:
    """As JSON, for the reply's message."""
    return msgspec.json.encode(verdict).decode()


def decode_verdicts(text: str) -> list[ManifestVerdict]:
    """Parse a reply's message; SGLang joins those of its data-parallel ranks with " | ".

    Raises:
        ManifestError: it is not made of verdicts.
    """
    decoder, verdicts, at = json.JSONDecoder(), [], 0
    try:
        while at < len(text):
            content, at = decoder.raw_decode(text, at)
            verdicts.append(msgspec.convert(content, ManifestVerdict))
            at += len(text[at:]) - len(text[at:].lstrip(" |"))
    except (ValueError, msgspec.MsgspecError) as error:
        raise ManifestError(f"not a verdict on a manifest: {error}; got {text[:120]!r}") from None
    if not verdicts:
        raise ManifestError("the engine said nothing about the manifest")
    return verdicts
