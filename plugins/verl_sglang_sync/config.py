"""Settings of one weight sync: the preset's keys plus the verl keys that the sync obeys.

The presets are `conf/weight_sync/*.yaml`; their keys are exactly the fields of `WeightSyncConfig`
that the preset's mode obeys: an unknown key, or one of another mode, is an error.

    cfg = WeightSyncConfig.from_rollout(config.actor_rollout_ref.rollout)
    if cfg is None:  # no `+weight_sync=...`: verl's own behaviour
        ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from sglang_loader.common.check_remarks import ManifestCheck
from sglang_loader.common.engine_settings import (
    GatePolicy,
    HostBackup,
    StaleRequests,
)
from sglang_loader.common.session.messages import MAX_TIMEOUT_S
from verl_sglang_sync.engine.server_client.operations import LIMITS, checked_base_url
from verl_sglang_sync.engine.server_client.router import KEY_VARIABLE
from verl_sglang_sync.stages import SLEEP_ORDER, WAKE_ORDER, StageOrder

Mode = Literal["bucketed", "flattened", "compiled"]
DraftWeights = Literal["auto", "synced", "frozen"]
MODES: tuple[str, ...] = get_args(Mode)
PRESETS = (*MODES, "disaggregated")

ROLLOUT = "actor_rollout_ref.rollout"
SECTION = f"{ROLLOUT}.custom.weight_sync"
BACKEND_KEY = f"{ROLLOUT}.checkpoint_engine.backend"
BROADCAST_BACKEND = "sglang_sync"
BUCKET_KEY = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
MAX_COUNT = (1 << 31) - 1
VERL_SWITCHES = ("multi_stage_wake_up", "free_cache_engine")


Check = Callable[[str, Any], Any]
"""Given a whole key and what the user wrote: returns the setting, or raises `ValueError`, naming
key, value and what is allowed."""


def _of(kind: Any, allowed: str) -> Check:
    """A check for the values of a type, as msgspec reads them."""

    def check(key: str, value: Any) -> Any:
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError:
            raise ValueError(f"{key}={value!r}: {allowed}") from None

    return check


def _one_of(words: Any, yaml: Mapping[bool, str] | None = None) -> Check:
    """A check for the words of a `Literal`; `yaml` are those that YAML 1.1 reads as true, false."""
    check = _of(words, f"allowed: {', '.join(get_args(words))}")

    def check_meant(key: str, value: Any) -> Any:
        return check(key, (yaml or {}).get(value, value) if isinstance(value, bool) else value)

    return check_meant


_seconds = _of(  # an engine accepts no longer limit
    Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)],
    f"expected a number greater than 0 and at most {MAX_TIMEOUT_S:g}",
)
_count = _of(
    Annotated[int, Meta(ge=0, le=MAX_COUNT)], f"expected a whole number from 0 to {MAX_COUNT}"
)
_mebibytes = _of(Annotated[int, Meta(ge=1)], "expected a whole number of MiB, at least 1")
_switch = _of(bool, "allowed: true, false")
_file = _of(Annotated[str, Meta(min_length=1)] | None, "expected a file path or null")


def _limits(key: str, section: Any) -> dict[str, float]:
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ValueError(f"{key}={section!r}: expected seconds by operation: {', '.join(LIMITS)}")
    for name, value in section.items():
        if name not in LIMITS:
            raise ValueError(
                f"{key}.{name}={value!r}: unknown operation; allowed: {', '.join(LIMITS)}"
            )
    given = {name: value for name, value in section.items() if value is not None}
    return {name: _seconds(f"{key}.{name}", value) for name, value in given.items()}


def _url(key: str, value: Any) -> str | None:
    return None if value is None else checked_base_url(key, value)


PRESET_KEYS: dict[str, Check] = {
    "mode": _one_of(Mode),
    "request_timeout_s": _seconds,
    "timeouts_s": _limits,
    "report_file": _file,
    "host_backup": _one_of(HostBackup, yaml={True: "on", False: "off"}),
    "sleep_order": lambda key, value: value,  # both together: `StageOrder.of`
    "wake_order": lambda key, value: value,
    "stale_requests": _one_of(StaleRequests),
    "stale_requests_timeout_s": _seconds,
    "router_url": _url,
    "manifest_check": _one_of(ManifestCheck, yaml={False: "off"}),
    "draft_weights": _one_of(DraftWeights),
}
COMPILED_KEYS: dict[str, Check] = {
    "recheck_every_n_syncs": _count,
    "keep_staging_buffers": _switch,
    "read_in_place": _switch,
    "exchange_shards": _switch,
}
"""Keys that only mode "compiled" obeys."""


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig:
    """Validated settings of the weight sync of one rollout.

    What a preset's key means stands where it is set, in `conf/weight_sync_defaults.yaml` and
    `conf/weight_sync/compiled.yaml`.

    Attributes:
        exports_draft: the trainer's export has the draft's weights (verl's `model.mtp.enable`).
        bucket_bytes: upper limit of one bucket, in bytes (verl's
            `checkpoint_engine.update_weights_bucket_megabytes`).
        multi_stage_wake_up: True resumes weights, syncs, lets the trainer free its memory and only
            then resumes the KV cache; False resumes everything before the sync.
        free_cache_engine: False keeps the engine's memory resident; nothing is staged.
    """

    mode: Mode
    request_timeout_s: float = 600.0
    timeouts_s: Mapping[str, float] = field(default_factory=dict)
    report_file: str | None = None
    recheck_every_n_syncs: int = 0
    keep_staging_buffers: bool = False
    read_in_place: bool = True
    exchange_shards: bool = True
    host_backup: HostBackup = "auto"
    sleep_order: tuple[str, ...] = SLEEP_ORDER
    wake_order: tuple[str, ...] = WAKE_ORDER
    stale_requests: StaleRequests = "wait"
    stale_requests_timeout_s: float = 600.0
    router_url: str | None = None
    manifest_check: ManifestCheck = "error"
    draft_weights: DraftWeights = "auto"
    exports_draft: bool = False
    bucket_bytes: int
    multi_stage_wake_up: bool
    free_cache_engine: bool

    @property
    def uses_plan(self) -> bool:
        """True in the mode whose engines replay a load plan; else they run `load_weights`."""
        return self.mode == "compiled"

    @property
    def num_staging_buffers(self) -> int:
        """1: each bucket is loaded before the next one is packed; 2: meanwhile."""
        return 1 if self.mode == "bucketed" else 2

    @property
    def effective_host_backup(self) -> HostBackup:
        """The host backup of this mode: only load plans prove anything that "auto" could use."""
        return "on" if self.host_backup == "auto" and not self.uses_plan else self.host_backup

    @property
    def syncs_draft(self) -> bool:
        """True if a sync loads the draft model of speculative decoding as well."""
        return self.draft_weights == "synced" or (
            self.draft_weights == "auto" and self.exports_draft
        )

    def for_session(self) -> WeightSyncConfig:
        """These settings without what needs a load plan, in the modes that have none."""
        if self.uses_plan:
            return self
        return replace(self, read_in_place=False, exchange_shards=False)

    @property
    def gate_policy(self) -> GatePolicy:
        """What the engine does with requests that it must not serve now."""
        return GatePolicy(self.stale_requests, self.stale_requests_timeout_s)

    @property
    def stages(self) -> StageOrder:
        """The order in which memory is released and resumed."""
        return StageOrder.of(SECTION, self.sleep_order, self.wake_order)

    @classmethod
    def from_rollout(cls, rollout: Any) -> WeightSyncConfig | None:
        """Read the settings out of verl's rollout config.

        Args:
            rollout: `actor_rollout_ref.rollout`, as an OmegaConf node or verl's `RolloutConfig`.

        Returns:
            None where no `+weight_sync=<preset>` was chosen.

        Raises:
            ValueError: an unknown key, a wrong type or an impossible value; the message names the
                key, the value and what is allowed.
        """
        custom = _get(rollout, "custom")
        section = _get(custom, "weight_sync") if custom is not None else None
        if section is None:
            return None
        keys: dict[str, Any] = {"mode": None, "sleep_order": SLEEP_ORDER, "wake_order": WAKE_ORDER}
        known = _known_keys(section)
        keys |= {key: known.get(key) for key in known}  # None for what Hydra wants and nobody gave
        checks = PRESET_KEYS | COMPILED_KEYS
        found = {key: checks[key](f"{SECTION}.{key}", value) for key, value in keys.items()}
        megabytes = _get(_get(rollout, "checkpoint_engine"), "update_weights_bucket_megabytes")
        stages = StageOrder.of(SECTION, found["sleep_order"], found["wake_order"])
        found |= {"sleep_order": stages.sleep, "wake_order": stages.wake}
        return cls(
            **found,
            exports_draft=bool(_get(_get(rollout, "mtp"), "enable", False)),
            bucket_bytes=_mebibytes(BUCKET_KEY, megabytes) << 20,
            **{key: _switch(f"{ROLLOUT}.{key}", _get(rollout, key)) for key in VERL_SWITCHES},
        )


def _get(node: Any, key: str, default: Any = None) -> Any:
    """Read `key` of a mapping, an OmegaConf node or a dataclass alike."""
    if isinstance(node, Mapping):
        return node.get(key, default)
    return getattr(node, key, default)


def _known_keys(section: Any) -> Mapping[str, Any]:
    """A preset's section, if its mode obeys all of its keys."""
    if not isinstance(section, Mapping):
        raise ValueError(
            f"{SECTION}={section!r}: expected a preset's mapping; choose one with "
            f"+weight_sync=<{'|'.join(MODES)}>"
        )
    is_compiled = section.get("mode") == "compiled"
    allowed = (*PRESET_KEYS, *(COMPILED_KEYS if is_compiled else ()))
    for key in section:
        if key == "router_api_key":  # verl prints its config, and sends it to trackers
            raise ValueError(f"{SECTION}.{key}: set the environment variable {KEY_VARIABLE}")
        if key not in allowed:
            problem = "only for mode 'compiled'" if key in COMPILED_KEYS else "unknown key"
            raise ValueError(
                f"{SECTION}.{key}={section[key]!r}: {problem}; allowed: {', '.join(allowed)}"
            )
    return section
