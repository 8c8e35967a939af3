"""Whether a run is elastic, and how: the `elastic` keys of the configuration, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from moe_lightning.cli.instantiation import check_arguments
from moe_lightning.config import TARGET, fits, shown
from moe_lightning.elastic.launcher import ElasticLauncher
from moe_lightning.elastic.membership import ElasticSettings
from moe_lightning.errors import ConfigurationError

_LAST_PORT = 65535


def elastic_options(config: Mapping[str, Any], *, external: bool) -> dict[str, Any] | None:
    """Arguments of ElasticLauncher; None for a run that is not elastic.

    Args:
        external: torchrun, srun or the like started these ranks.

    Raises:
        ConfigurationError: a key or value that it cannot have, nothing that recovers, or ranks that end together.
    """
    options = dict(config["elastic"])
    enabled, settings = options.pop("enabled", "auto"), options.pop("settings", {})
    if not isinstance(settings, Mapping):
        raise ConfigurationError(
            f"elastic.settings={shown(settings)} must be a mapping: set elastic.settings.NAME=value"
        )
    for kind, values, key in ((ElasticSettings, settings, "elastic.settings"), (ElasticLauncher, options, "elastic")):
        check_arguments({TARGET: f"{kind.__module__}.{kind.__qualname__}", **values}, key)
    _check_address(options.get("lighthouse"))
    waits = ElasticSettings(**settings)
    recovers = bool(config["callbacks"].get("fault_recovery"))
    if not fits(enabled, bool | Literal["auto"]):
        raise ConfigurationError(f"elastic.enabled={shown(enabled)} must be true, false or auto")
    if enabled is True and external:
        raise ConfigurationError(
            "elastic.enabled=true, but torchrun or srun started these ranks and ends all of them with the first: "
            "run moe-train itself on every node, with elastic.lighthouse=HOST:PORT"
        )
    if enabled is True and not recovers:
        raise ConfigurationError("elastic.enabled=true needs a callback that recovers: use callbacks=fault_recovery")
    return None if external or not (enabled and recovers) else {**options, "settings": waits}


def _check_address(lighthouse: str | None) -> None:
    if lighthouse is None:
        return
    host, _, port = lighthouse.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) <= _LAST_PORT:
        raise ConfigurationError(
            f"elastic.lighthouse={shown(lighthouse)} must be HOST:PORT with a port from 1 to {_LAST_PORT}"
        )
