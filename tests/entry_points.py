"""Lightning asks all installed packages for callbacks whenever a Trainer is made, which takes longer than all else that
makes it: here they are asked once a process, and not by its forks.
"""

from functools import cache

from lightning.fabric.utilities import registry

registry.entry_points = cache(registry.entry_points)
registry.entry_points(group="lightning.pytorch.callbacks_factory")
