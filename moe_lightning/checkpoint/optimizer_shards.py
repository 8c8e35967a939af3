"""Optimizer shards of other ranks (ZeRO-1): their exchange, and their replay on the host.

Under ZeRO-1 one rank has the moments of a parameter, but every rank has its weight and its summed gradient. A peer that
steps copies of weight and moments with the same gradients and hyperparameters has the same state, bit by bit, without
any traffic (AOR). The steps are those of torch's own AdamW; its `foreach` and plain forms round alike, its fused form
does not. Devices may round differently than the host, therefore `verify` compares checksums with the owner and corrects
differences.

Sources: REFT 4.2, eq. 3. Ours: Adam instead of the paper's eq. 4 (plain SGD), the check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from moe_lightning.checkpoint.arena import digest_of
from moe_lightning.errors import ConfigurationError
from moe_lightning.kernels import pack
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World
from moe_lightning.state.pieces import Block
from moe_lightning.state.transfer import reshard, without_memory

States = Mapping[str, Tensor]
"""Scope ("exp_avg", "step", ...) -> tensor of one parameter."""


def pack_states(states: States) -> Tensor:
    """uint8 bytes of all tensors on the host, in the order of their scopes."""
    tensors = [tensor.detach().to("cpu") for _, tensor in sorted(states.items())]
    return pack(tensors) if tensors else torch.empty(0, dtype=torch.uint8)


_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")


class AdamWReplay:
    """Weights and moments of some parameters of a peer.

    Args:
        optimizer: the live one, whose hyperparameters are followed; a rank's shard has the groups of the whole.
        groups: for each of its parameter groups the kept parameters by name.
        version: updates that the weights contain.

    Attributes:
        version: updates contained in weights and moments.

    Raises:
        ConfigurationError: the optimizer is no AdamW, is fused, has its learning rate in a tensor, or other groups.
    """

    def __init__(self, optimizer: Optimizer, groups: Sequence[Mapping[str, Tensor]], *, version: int = 0) -> None:
        if type(optimizer) is not AdamW:
            raise ConfigurationError(
                f"only torch.optim.AdamW can be replayed, not {type(optimizer).__name__}: choose another protection"
            )
        if any(group.get("fused") for group in optimizer.param_groups):
            raise ConfigurationError(
                "fused AdamW rounds differently on the host: use fused=False or another protection"
            )
        if any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
            raise ConfigurationError("a learning rate in a tensor rounds differently: give it as a float")
        self.version = version
        self._weights = {name: _on_host(p) for group in groups for name, p in group.items()}
        self._optimizer = AdamW([{"params": [self._weights[name] for name in group]} for group in groups], foreach=True)
        self._follow(optimizer)

    @property
    def names(self) -> tuple[str, ...]:
        """The kept parameters."""
        return tuple(self._weights)

    @torch.no_grad()
    def replay(self, gradients: Mapping[str, Tensor], optimizer: Optimizer) -> None:
        """Repeat one update, with the gradients that the owner's optimizer sees (summed, unscaled, clipped).

        Args:
            gradients: by name; a parameter without one is left alone, as by the optimizer.
            optimizer: the live one, before or after the same update.
        """
        self._follow(optimizer)
        for name, weight in self._weights.items():
            weight.grad = gradients[name].detach().to("cpu") if name in gradients else None
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.version += 1

    def states(self, name: str) -> dict[str, Tensor]:
        """The weight and the optimizer's tensors of a parameter, by scope; "step" is among them after the first
        update."""
        weight = self._weights[name]
        return {"weight": weight.detach(), **dict(sorted(self._optimizer.state[weight].items()))}

    def load(self, name: str, states: Mapping[str, Tensor]) -> None:
        """Take over a parameter's weight and optimizer state."""
        weight = self._weights[name]
        with torch.no_grad():
            weight.copy_(states["weight"])
        self._optimizer.state[weight] = {
            scope: tensor.detach().to("cpu").clone() for scope, tensor in states.items() if scope != "weight"
        }

    def digests(self) -> dict[str, str]:
        """Name -> checksum over weight and optimizer state."""
        return {name: digest_of(pack_states(self.states(name))) for name in self.names}

    def _follow(self, optimizer: Optimizer) -> None:
        for own, live in zip(self._optimizer.param_groups, optimizer.param_groups, strict=True):
            own.update({key: live[key] for key in _HYPERPARAMETERS})


def verify_replays(
    replay: AdamWReplay, owned: Mapping[str, Mapping[str, Tensor]], version: int, world: World
) -> dict[int, list[str]]:
    """Compare every rank's replay with what the owners have, and overwrite what differs; collective.

    Args:
        replay: of this rank.
        owned: weight and optimizer state, by scope, of the parameters whose optimizer state this rank keeps.
        version: updates contained in them, the same on all ranks.

    Returns:
        Rank -> the parameters that were corrected there, with everything that is of another version.
    """
    own = {name: digest_of(pack_states(states)) for name, states in owned.items()}
    gathered = all_gather_json([own, replay.digests(), replay.version], world)
    digests = {name: digest for entries, _, _ in gathered for name, digest in entries.items()}
    wrong = {
        rank: sorted(name for name, digest in kept.items() if at != version or digest != digests[name])
        for rank, (_, kept, at) in enumerate(gathered)
    }
    if lacking := {name for names in wrong.values() for name in names}:
        have = {(name, Block.of(owned[name]["weight"].shape)): owned[name] for name in lacking & owned.keys()}
        blocks = (Block.of(replay.states(name)["weight"].shape) for name in wrong[world.rank])
        want = without_memory(zip(wrong[world.rank], blocks, strict=True))
        for (name, _), states in reshard(have, want, world).items():
            replay.load(name, states)
    replay.version = version
    return {rank: names for rank, names in wrong.items() if names}


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).requires_grad_()
