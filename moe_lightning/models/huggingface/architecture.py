"""Architectures of Hugging Face models, and the conversion of their feed-forward blocks to our MoE layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from moe_lightning.config import build_config, pretrained_options
from moe_lightning.errors import ConfigurationError
from moe_lightning.models.huggingface.families import FAMILIES, SHARED_EXPERTS, SHARED_GATE, Family
from moe_lightning.models.huggingface.weights import ExpertReader
from moe_lightning.moe.layer import MoELayer
from moe_lightning.moe.randomness import NoiseSource, SampleStream
from moe_lightning.moe.router import RouterConfig

IS_TOKEN = "is_token"
"""Keyword of the model's forward pass, bool [B, L]: False where an input is padding that no expert gets."""

_MOST_BALANCE = 0.1
"""Largest router_aux_loss_coef of a checkpoint that is taken over: GPT-OSS has 0.9, which no training uses."""


class SparseBlock(nn.Module):
    """[..., D] -> [..., D]: an MoE layer, and the shared experts of the replaced block beside it, under their names.

    Args:
        moe: the layer.
        replaced: the block in whose place it comes; None: it had no shared experts.
        after: applied to the result, such as the dropout of the dense block; None: nothing.
        returns_scores: answer (output, None), where the model expects scores of the router and drops them.

    Attributes:
        is_token: bool [B, L] of the model's running batch, or of that whose layer is recomputed in its backward pass;
            None: there is no padding.
    """

    def __init__(
        self,
        moe: MoELayer,
        *,
        replaced: nn.Module | None = None,
        after: nn.Module | None = None,
        returns_scores: bool = False,
    ) -> None:
        super().__init__()
        self.moe = moe
        kept = {name: getattr(replaced, name, None) for name in (*SHARED_EXPERTS, SHARED_GATE)}
        for name, module in kept.items():
            if module is not None:
                self.add_module(name, module)
        self._shared = next((name for name in SHARED_EXPERTS if kept[name] is not None), None)
        self._is_gated = kept[SHARED_GATE] is not None
        self.after = after
        self.is_token: Tensor | None = None
        self._returns_scores = returns_scores

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        # Of a sequence that goes on from a cache, the last tokens are computed.
        is_token = None if self.is_token is None else self.is_token[:, -hidden_states.shape[1] :]
        out: Tensor = self.moe(hidden_states, is_token)
        if self._shared is not None:
            shared = self.get_submodule(self._shared)(hidden_states)
            out = out + (
                self.get_submodule(SHARED_GATE)(hidden_states).sigmoid() * shared if self._is_gated else shared
            )
        if self.after is not None:
            out = self.after(out)
        return (out, None) if self._returns_scores else out


def keep_padding_from_experts(model: nn.Module) -> None:
    """Let the model's blocks know of each batch what is padding: by `is_token`, or by the attention_mask [B, L] of
    callers who know nothing of ours.
    """
    model.register_forward_pre_hook(_note_padding, with_kwargs=True)


def _note_padding(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    mask = kwargs.get("attention_mask")
    is_token = kwargs.pop(IS_TOKEN, None)
    if is_token is None and isinstance(mask, Tensor) and mask.ndim == 2:
        is_token = mask.bool()
    for module in model.modules():
        if isinstance(module, SparseBlock):
            module.is_token = is_token
    return args, kwargs


class DroppingLayerNorm(nn.LayerNorm):
    """[B, ..., D] -> [B, ..., D]: the LayerNorm at the end of a residual branch, with stochastic depth: while training,
    the branch is zero for some samples (Huang et al. 2016). Which ones follows the sample, not the rank.

    Args:
        norm: the layer in whose place it comes, of the same parameters.
        p: probability of dropping the branch, in [0, 1).

    Raises:
        ConfigurationError: p is outside its range.
    """

    def __init__(self, norm: nn.LayerNorm, p: float) -> None:
        super().__init__(norm.normalized_shape, norm.eps)
        if not 0.0 <= p < 1.0:
            raise ConfigurationError(f"drop_path_rate={p} must be at least 0 and below 1")
        self.p = p
        self.tag = 0
        self.stream = SampleStream()

    def forward(self, input: Tensor) -> Tensor:
        branch = super().forward(input)
        if not self.training or self.p == 0.0:
            return branch
        uniform_B1 = self.stream.uniform(NoiseSource.DROP_PATH.key(self.tag), branch.shape[0], 1, branch.device)
        kept_B = (uniform_B1[:, 0] >= self.p).to(branch.dtype) / (1.0 - self.p)
        return branch * kept_B.view(-1, *[1] * (branch.ndim - 1))


class Architecture(ABC):
    """One model's configuration with the MoE layers that it gets.

    Args:
        config: a transformers configuration.

    Attributes:
        config: as given.
        auto_class: the transformers class that makes the model of the configuration.
        on_disk: pairs (part of a tensor's name in the model, its replacement on disk), applied in order.
        layers: the MoE layers by the names of their blocks, in the model's order; empty before `install`.
        reader: of the experts' first weights.
        unused_balance: router_aux_loss_coef of the checkpoint where it is so large that 0 is taken instead; else None.
    """

    auto_class = "AutoModelForCausalLM"
    on_disk: tuple[tuple[str, str], ...] = ()
    reader: ExpertReader
    unused_balance: float | None = None

    def __init__(self, config: Any) -> None:
        self.config = config
        self.layers: dict[str, MoELayer] = {}

    @abstractmethod
    def install(self, model: nn.Module) -> None:
        """Put MoE layers in the places of the model's blocks; they are built as the caller's context says."""

    @abstractmethod
    def source_name(self, name: str) -> str | None:
        """Return the name in transformers' model of a tensor other than an expert's; None for one that is new."""

    @abstractmethod
    def source_prefix(self, block: str) -> str:
        """Prefix of the tensors from which a block's experts are read, by their names in transformers' model."""

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
        is_balance_chosen: router_aux_loss_coef was set for this training, so it is taken over however large it is.

    Raises:
        ConfigurationError: an option that would change what the pretrained router computes, or that its checkpoints
            have no room for.
    """

    def __init__(
        self, config: Any, router: Mapping[str, Any] | None = None, *, is_balance_chosen: bool = False
    ) -> None:
        super().__init__(config)
        self.family = FAMILIES[config.model_type]
        self.reader = self.family.layout
        self.on_disk = self.family.on_disk
        self._arguments = self.family.layer(config)
        options = {name: value for name, value in (router or {}).items() if value is not None}
        free = pretrained_options(RouterConfig)
        for name in options:
            if name not in free:
                raise ConfigurationError(
                    f"router.{name} is fixed by the pretrained model: only {', '.join(free)} can be set"
                )
        if options.get("bias_update_rate") and self.family.selection_bias is None:
            raise ConfigurationError(
                f"router.bias_update_rate={options['bias_update_rate']} needs a selection bias, which "
                f"{config.model_type} has no room for: use aux_loss_coef"
            )
        self._router = build_config(RouterConfig, self._arguments["router"] | options)
        self._balance: float | None = None
        if "aux_loss_coef" not in options:
            theirs = getattr(config, "router_aux_loss_coef", None) or 0.0
            if theirs > _MOST_BALANCE and not is_balance_chosen:
                self.unused_balance, theirs = theirs, 0.0
            self._balance = theirs

    def install(self, model: nn.Module) -> None:
        blocks = [
            (name, block)
            for name, block in model.named_modules()
            if name.endswith(f".{self.family.block}") and hasattr(block, "experts")
        ]
        router = self._router
        if self._balance is not None:
            # Theirs takes sums over choices and means over layers with experts; ours takes shares, and layers add up.
            coefficient = self._balance * router.top_k / max(1, len(blocks))
            router = replace(router, aux_loss_coef=coefficient)
        for name, block in blocks:
            moe = MoELayer(**self._arguments | {"router": router})
            model.set_submodule(name, SparseBlock(moe, replaced=block, returns_scores=self.family.returns_scores))
            self.layers[name] = moe

    def source_name(self, name: str) -> str | None:
        return self.family.model_name(name)

    def source_prefix(self, block: str) -> str:
        return f"{block}."

    def exported(self) -> tuple[Any, Family]:
        return self.config, self.family
