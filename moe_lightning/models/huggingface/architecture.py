"""How the feed-forward blocks of a Hugging Face model become MoE layers, and what their tensors are called on disk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from moe_lightning.config import build_config
from moe_lightning.errors import ConfigurationError
from moe_lightning.models.huggingface.blocks import SparseBlock
from moe_lightning.models.huggingface.families import FAMILIES, MODEL_BLOCK, Family
from moe_lightning.models.huggingface.weights import WeightsFolder
from moe_lightning.moe.layer import MoELayer
from moe_lightning.moe.options import pretrained_options
from moe_lightning.moe.router import RouterConfig


class ExpertReader(Protocol):
    """How first weights of experts are read; `prefix` is the block's name on disk with a dot at its end."""

    def read(self, weights: WeightsFolder, prefix: str, expert: int) -> dict[str, Tensor]:
        """The rows of one expert by the names of our parameters."""
        ...

    def names(self, prefix: str, num_experts: int) -> set[str]:
        """The tensors that are read for all experts."""
        ...


class Architecture(ABC):
    """One model's configuration with the MoE layers that it gets.

    Args:
        config: a transformers configuration.

    Attributes:
        config: as given.
        auto_class: the transformers class that makes the model of the configuration.
        layers: the MoE layers by the names of their blocks, in the model's order; empty before `install`.
        reader: of the experts' first weights.
    """

    auto_class = "AutoModelForCausalLM"
    reader: ExpertReader

    def __init__(self, config: Any) -> None:
        self.config = config
        self.layers: dict[str, MoELayer] = {}

    @abstractmethod
    def install(self, model: nn.Module) -> None:
        """Put MoE layers in the places of the model's blocks; they are built as the caller's context says."""

    @abstractmethod
    def disk_name(self, name: str) -> str | None:
        """What a parameter or buffer other than an expert's is called on disk; None for one that is new."""

    @abstractmethod
    def disk_prefix(self, block: str) -> str:
        """Where a block's experts are read from."""

    @abstractmethod
    def exported(self) -> tuple[Any, Family]:
        """The configuration and the family that a checkpoint of the trained model has.

        Raises:
            ConfigurationError: transformers has no class for such a model.
        """


class SparseArchitecture(Architecture):
    """A model that has experts already.

    Args:
        config: a transformers configuration of one of the `FAMILIES`.
        router: training options of the routers; None values leave them as they are.

    Raises:
        ConfigurationError: an option that would change what the pretrained router computes, or that its checkpoints
            have no room for.
    """

    def __init__(self, config: Any, router: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self.family = FAMILIES[config.model_type]
        self.reader = self.family.layout
        self._arguments = self.family.describe(config)
        options = {name: value for name, value in (router or {}).items() if value is not None}
        free = pretrained_options(RouterConfig)
        for name in options:
            if name not in free:
                raise ConfigurationError(
                    f"router.{name} is fixed by the pretrained model: only {', '.join(free)} can be set"
                )
        if options.get("bias_update_rate") and not self._arguments.get("selection_bias"):
            raise ConfigurationError(
                f"router.bias_update_rate={options['bias_update_rate']} needs a selection bias, which "
                f"{config.model_type} has no room for: use aux_loss_coef"
            )
        self._arguments["router"] = build_config(RouterConfig, self._arguments["router"] | options)

    def install(self, model: nn.Module) -> None:
        for name, block in list(model.named_modules()):
            if not name.endswith(f".{MODEL_BLOCK}") or not hasattr(block, "experts"):
                continue
            moe = MoELayer(**self._arguments)
            shared = getattr(block, "shared_experts", None)
            returns = self.family.returns_scores
            model.set_submodule(name, SparseBlock(moe, shared_experts=shared, returns_scores=returns))
            self.layers[name] = moe

    def disk_name(self, name: str) -> str | None:
        return self.family.disk_name(name)

    def disk_prefix(self, block: str) -> str:
        return self.family.disk_prefix(block)

    def exported(self) -> tuple[Any, Family]:
        return self.config, self.family
