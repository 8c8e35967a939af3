"""Where a module can be cut into the stages of a pipeline."""

from __future__ import annotations

from torch import nn

from moe_lightning.errors import ConfigurationError


def blocks_of(module: nn.Module, num_stages: int) -> nn.ModuleList:
    """The longest of the outermost ModuleLists.

    Raises:
        ConfigurationError: there is none, or it cannot be cut into so many stages.
    """
    found = [
        (len(part), name, part)
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList) and not any(type(e).forward is nn.Module.forward for e in part)
    ]
    outer = [(n, name, part) for n, name, part in found if not any(name.startswith(f"{o}.") for _, o, _ in found)]
    if not outer:
        raise ConfigurationError(
            f"{type(module).__name__} has no ModuleList of blocks at which mesh.pp could cut it: keep the blocks of "
            "the model in one, or drop mesh.pp"
        )
    number, name, chosen = max(outer, key=lambda entry: entry[0])
    if len(set(chosen)) < number:
        raise ConfigurationError(f"some blocks of {name} are the same module, which mesh.pp cannot cut: drop mesh.pp")
    if number < num_stages:
        raise ConfigurationError(
            f"{num_stages} stages of mesh.pp are more than the {number} blocks of {name}: use at most {number}"
        )
    return chosen
