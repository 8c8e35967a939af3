"""Process of one rank: `python -m moe_lightning.cli.worker CONFIG`, started by the launcher.

What takes seconds to import is imported inside, where a signal or an error ends the rank with a report.
"""

from __future__ import annotations

import sys

from moe_lightning.elastic.worker import leave, work


def main() -> int:
    """Run one rank under the launcher; the exit code."""
    return work("moe-train", _train)


def _train() -> None:
    from omegaconf import OmegaConf

    from moe_lightning.cli.training import train

    config = OmegaConf.to_container(OmegaConf.load(sys.argv[1]))  # as moe-train composed it
    assert isinstance(config, dict)
    train({str(name): value for name, value in config.items()})


if __name__ == "__main__":
    leave(main())
