"""Settings of one weight sync: the preset's keys, and verl's keys that apply to a sync.

    cfg = WeightSyncConfig.from_rollout(config.actor_rollout_ref.rollout)
    if cfg is None:  # no `+weight_sync=...`: verl's own behaviour
        ...

The presets are `conf/weight_sync/*.yaml`. A preset's keys are the fields of `WeightSyncConfig` that
apply to the preset's mode. An unknown key is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from sglang_loader.common.engine_settings import STALE_REQUESTS_TIMEOUT_S, HostBackup
from sglang_loader.common.session.messages import MAX_TIMEOUT_S, ManifestCheck
from verl_sglang_sync.http_settings import KEY_VARIABLE, LIMITS, checked_base_url
from verl_sglang_sync.stages import ORDER_WITH_GRAPHS, VERLS_ORDER, StageOrder

Mode = Literal["flattened", "compiled"]
OnFallback = Literal["warn", "error"]
DraftWeights = Literal["auto", "synced", "frozen"]
MODES: tuple[str, ...] = get_args(Mode)
PRESETS = (*MODES, "disaggregated")
FLATTENED_ALIAS = "bucketed"
"""Another name of the mode and the preset "flattened", from earlier releases."""

ROLLOUT = "actor_rollout_ref.rollout"
SECTION = f"{ROLLOUT}.custom.weight_sync"
BACKEND_KEY = f"{ROLLOUT}.checkpoint_engine.backend"
DISAGGREGATED_BACKEND = "sglang_sync"
BUCKET_KEY = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
MAX_COUNT = (1 << 31) - 1

Seconds = Annotated[
    float,
    Meta(
        gt=0,
        # An engine accepts no longer limit.
        le=MAX_TIMEOUT_S,
        description=f"expected a number greater than 0 and at most {MAX_TIMEOUT_S:g}",
    ),
]
SecondsOrZero = Annotated[
    float,
    Meta(
        ge=0,
        le=MAX_TIMEOUT_S,
        description=f"expected a number of at least 0 and at most {MAX_TIMEOUT_S:g}",
    ),
]
Count = Annotated[
    int, Meta(ge=0, le=MAX_COUNT, description=f"expected a whole number from 0 to {MAX_COUNT}")
]
Mebibytes = Annotated[
    int,
    Meta(ge=1, le=MAX_COUNT, description=f"expected a whole number of MiB from 1 to {MAX_COUNT}"),
]
Routes = Annotated[
    list[Literal["pull", "exchange"]],
    Meta(description="expected a list, allowed in it: pull, exchange"),
]
FilePath = Annotated[
    Annotated[str, Meta(min_length=1)] | None, Meta(description="expected a file path or null")
]


def _all_routes() -> Routes:
    return ["pull", "exchange"]


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig:
    """Validated settings of the weight sync of one rollout.

    The presets' keys are explained in `conf/weight_sync_defaults.yaml` and
    `conf/weight_sync/compiled.yaml`.

    Attributes:
        exports_draft: True if the trainer's export has the weights of the draft model (verl's
            `model.mtp.enable`).
        bucket_bytes: size limit of a bucket, in bytes (verl's
            `checkpoint_engine.update_weights_bucket_megabytes`).
        multi_stage_wake_up: True to resume the KV cache after the sync, when the trainer has freed
            its memory. False to resume everything before the sync.
        free_cache_engine: False to keep the engine's memory resident, so that nothing sleeps.
    """

    num_staging_buffers: ClassVar[int] = 2
    """Number of staging buffers. A bucket is packed while the engine loads the other buffer's."""

    mode: Mode
    request_timeout_s: Seconds = 600.0
    timeouts_s: Mapping[str, float] = field(default_factory=dict)
    report_file: FilePath = None
    release_cuda_graphs: bool = False
    stale_requests_timeout_s: SecondsOrZero = STALE_REQUESTS_TIMEOUT_S
    router_url: str | None = None
    manifest_check: ManifestCheck = "error"
    draft_weights: DraftWeights = "auto"
    prove_every_n_syncs: Count = 0
    on_fallback: OnFallback = "warn"
    routes: Routes = field(default_factory=_all_routes)
    exports_draft: bool = False
    bucket_bytes: int
    multi_stage_wake_up: bool
    free_cache_engine: bool

    @property
    def uses_plan(self) -> bool:
        """True if engines replay a load plan, False if they run `load_weights`."""
        return self.mode == "compiled"

    @property
    def host_backup(self) -> HostBackup:
        """The part of the weights that the host keeps while the weights are released."""
        # "auto" needs a load plan: only a plan shows what a sync rewrites.
        return "auto" if self.uses_plan else "on"

    @property
    def syncs_draft(self) -> bool:
        """True if a sync loads the draft model of speculative decoding as well."""
        return self.draft_weights == "synced" or (
            self.draft_weights == "auto" and self.exports_draft
        )

    def for_session(self) -> WeightSyncConfig:
        """Return these settings, without the routes that need a load plan if the mode has none."""
        if self.uses_plan:
            return self
        # Engines copy from parameters and shards by their load plans, and a proof compares a plan.
        return replace(self, routes=[], prove_every_n_syncs=0)

    @property
    def stages(self) -> StageOrder:
        """The order in which memory is released and resumed."""
        return ORDER_WITH_GRAPHS if self.release_cuda_graphs else VERLS_ORDER

    @classmethod
    def from_rollout(cls, rollout: Any) -> WeightSyncConfig | None:
        """Read the settings from verl's rollout config.

        Args:
            rollout: `actor_rollout_ref.rollout`, as an OmegaConf node or verl's `RolloutConfig`.

        Returns:
            The settings, or None if no `+weight_sync=<preset>` was chosen.

        Raises:
            ValueError: an unknown key, a wrong type or an impossible value. The message names the
                key, the value and what is allowed.
        """
        custom = _get(rollout, "custom")
        section = _get(custom, "weight_sync") if custom is not None else None
        if section is None:
            return None
        section = _checked_section(section)
        # `get` returns None for a key whose value Hydra still lacks, and an index raises.
        keys: dict[str, Any] = {"mode": None} | {key: section.get(key) for key in section}
        megabytes = _get(_get(rollout, "checkpoint_engine"), "update_weights_bucket_megabytes")
        switches = {key: _get(rollout, key) for key in ("multi_stage_wake_up", "free_cache_engine")}
        return cls(
            **{key: _setting(SECTION, key, value) for key, value in keys.items()},
            exports_draft=bool(_get(_get(rollout, "mtp"), "enable", False)),
            bucket_bytes=_converted(BUCKET_KEY, megabytes, Mebibytes) << 20,
            **{key: _setting(ROLLOUT, key, value) for key, value in switches.items()},
        )


COMPILED_KEYS = (
    "prove_every_n_syncs",
    "on_fallback",
    "routes",
)
"""Keys that have an effect only with mode "compiled"."""
REMOVED_KEYS = {
    "read_in_place": "use routes=[exchange] to read no parameters in place",
    "exchange_shards": "use routes=[pull] to exchange no shards, or routes=[] to export every sync",
    "recheck_every_n_syncs": "use prove_every_n_syncs, which compares engines with the full export",
    "sleep_order": "use release_cuda_graphs=true, with which CUDA graphs sleep too",
    "wake_order": "use release_cuda_graphs=true, with which CUDA graphs sleep too",
    "keep_staging_buffers": "staging buffers are freed after each sync",
    "host_backup": "mode=flattened keeps all weights on the host, and mode=compiled those that no "
    "sync is proven to rewrite",
    "stale_requests": "use stale_requests_timeout_s, where 0 refuses a request at once",
}
"""Keys of earlier releases, and advice for each."""
REMOVED_VALUES = {
    ("manifest_check", "warn"): "use error, or off to publish without a check",
}
"""Values of earlier releases, and advice for each."""
VERL_KEYS = ("exports_draft", "bucket_bytes", "multi_stage_wake_up", "free_cache_engine")
"""Settings that come from verl's own keys."""
PRESET_KEYS = [
    setting.name
    for setting in fields(WeightSyncConfig)
    if setting.name not in (*COMPILED_KEYS, *VERL_KEYS)
]
_TYPES = get_type_hints(WeightSyncConfig, include_extras=True)
_YAML_WORDS = {"manifest_check": {False: "off"}}
"""Words of settings that YAML 1.1 reads as true or false."""


def _converted(key: str, value: Any, kind: Any) -> Any:
    """Convert a value to its type.

    Raises:
        ValueError: names the whole key, the value and what is allowed.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        if get_origin(kind) is Annotated:
            # The description of such a type names what is allowed.
            allowed = kind.__metadata__[0].description
        else:
            words = ("true", "false") if kind is bool else get_args(kind)
            allowed = f"allowed: {', '.join(words)}"
        raise ValueError(f"{key}={value!r}: {allowed}") from None


def _setting(section: str, key: str, value: Any) -> Any:
    name = f"{section}.{key}"
    if key == "timeouts_s":
        return _limits(name, value)
    if key == "router_url":
        return None if value is None else checked_base_url(name, value)
    if key == "report_file" and isinstance(value, str):
        try:
            Path(value).expanduser()
        except RuntimeError:
            raise ValueError(f"{name}={value!r}: there is no such user on this host") from None
    if key == "mode" and value == FLATTENED_ALIAS:
        value = "flattened"
    if key == "routes" and isinstance(value, Sequence) and not isinstance(value, str):
        value = list(value)  # OmegaConf's lists are no lists
    if isinstance(value, bool):
        value = _YAML_WORDS.get(key, {}).get(value, value)
    if isinstance(value, str) and (key, value) in REMOVED_VALUES:
        raise ValueError(f"{name}={value!r}: this value was removed ({REMOVED_VALUES[key, value]})")
    return _converted(name, value, _TYPES[key])


def _limits(key: str, section: Any) -> dict[str, float]:
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ValueError(f"{key}={section!r}: expected seconds by operation: {', '.join(LIMITS)}")
    for name, value in section.items():
        if name not in LIMITS:
            raise ValueError(
                f"{key}.{name}={value!r}: unknown operation, allowed: {', '.join(LIMITS)}"
            )
    set_limits = {name: value for name, value in section.items() if value is not None}
    return {name: _converted(f"{key}.{name}", value, Seconds) for name, value in set_limits.items()}


def _get(node: Any, key: str, default: Any = None) -> Any:
    """Read `key` of a mapping, an OmegaConf node or a dataclass alike."""
    if isinstance(node, Mapping):
        return node.get(key, default)
    return getattr(node, key, default)


def _checked_section(section: Any) -> Mapping[str, Any]:
    """Return the section of a preset.

    Raises:
        ValueError: the section is no mapping, or a key is unknown or was removed.
    """
    if not isinstance(section, Mapping):
        raise ValueError(
            f"{SECTION}={section!r}: expected a preset's mapping. Choose a preset with "
            f"+weight_sync=<{'|'.join(PRESETS)}>"
        )
    allowed = (*PRESET_KEYS, *COMPILED_KEYS)
    for key in section:
        # verl prints its config, and sends it to trackers. A key must not be in there.
        if key == "router_api_key":
            raise ValueError(f"{SECTION}.{key}: set the environment variable {KEY_VARIABLE}")
        if key in REMOVED_KEYS:
            raise ValueError(
                f"{SECTION}.{key}={section[key]!r}: this key was removed ({REMOVED_KEYS[key]})"
            )
        if key not in allowed:
            raise ValueError(
                f"{SECTION}.{key}={section[key]!r}: unknown key, allowed: {', '.join(allowed)}"
            )
    return section
