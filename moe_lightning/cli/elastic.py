"""Whether a run is elastic, and how: the `elastic` keys of the configuration, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_lightning.errors import ConfigurationError


def elastic_options(config: Mapping[str, Any], *, external: bool) -> dict[str, Any] | None:
    """Arguments of ElasticLauncher; None for a run that is not elastic.

    Args:
        external: torchrun, srun or the like started these ranks.

    Raises:
        ConfigurationError: a key or value that it cannot have, nothing that recovers, or ranks that end together.
    """
    options = dict(config["elastic"])
    enabled, settings = options.pop("enabled"), options.pop("settings")
    recovers = bool(config["callbacks"].get("fault_recovery"))
    if enabled not in (True, False, "auto"):
        raise ConfigurationError(f"elastic.enabled={enabled} must be true, false or auto")
    if enabled is True and external:
        raise ConfigurationError(
            "elastic.enabled=true, but torchrun or srun started these ranks and ends all of them with the first: "
            "run moe-train itself on every node, with elastic.lighthouse=HOST:PORT"
        )
    if enabled is True and not recovers:
        raise ConfigurationError("elastic.enabled=true needs a callback that recovers: use callbacks=fault_recovery")
    if external or not (enabled and recovers):
        return None
    from moe_lightning.cli.instantiation import TARGET, check_arguments
    from moe_lightning.elastic.elastic_launcher import ElasticLauncher
    from moe_lightning.elastic.settings import ElasticSettings

    for kind, values, key in ((ElasticSettings, settings, "elastic.settings"), (ElasticLauncher, options, "elastic")):
        check_arguments({TARGET: f"{kind.__module__}.{kind.__qualname__}", **values}, key)
    return {**options, "settings": ElasticSettings(**settings)}
