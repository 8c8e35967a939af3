"""SwinV2-MoE: image classification with experts in some feed-forward layers of a SwinV2.

Source: PEC appendix A table 2, MoC-System table 1; the layout is that of Swin-MoE, Hwang et al. 2023. The network is
Swinv2ForImageClassification of transformers, from random weights or from a dense checkpoint whose layers the experts
copy. Unlike transformers, stochastic depth and dropout follow the sample and not the rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import torch
from annotated_types import Interval
from torch import Tensor, nn
from typing_extensions import override

from moe_lightning.config import NonNegativeInt, PositiveInt, Probability, build_config, option, validated
from moe_lightning.errors import ConfigurationError
from moe_lightning.hub import model_folder, weights_folder
from moe_lightning.models.gpt_module import Batch, OptimizerConfig, SupervisedModule
from moe_lightning.models.huggingface.architecture import DroppingLayerNorm
from moe_lightning.models.huggingface.loading import (
    config_from,
    load_model,
    new_model,
    read_config,
    recompute_activations,
)
from moe_lightning.models.huggingface.weights import WeightsFolder
from moe_lightning.models.upcycling import SparseLayers, UpcycledArchitecture, UpcyclingConfig
from moe_lightning.moe.losses import mean_over_targets
from moe_lightning.moe.router import RouterConfig

_MODEL_TYPE = "swinv2"
_HEAD = "classifier."
_SIZES = ("patch_size", "window_size", "embed_dim", "depths", "num_heads", "mlp_ratio")


@validated
@dataclass(frozen=True, kw_only=True)
class SwinConfig:
    """A SwinV2 with experts.

    Attributes:
        num_classes: of the images.
        pretrained: folder of a dense SwinV2 checkpoint: its sizes hold, and every expert starts as a copy of its layer.
            A head for another number of classes starts at random. None: all weights are random.
        image_size: pixels of a side; a checkpoint's own.
        patch_size: pixels of a token's side at the first stage; it doubles at every further one.
        window_size: tokens of a side that attend to each other.
        embed_dim: width of a token at the first stage; it doubles at every further one.
        depths, num_heads: blocks and attention heads of each stage.
        mlp_ratio: hidden width of a feed-forward layer or expert, over its own.
        drop_path_rate: stochastic depth of the last block; it rises from 0 at the first.
        num_experts: of each MoE layer.
        moe_every, num_dense_layers: which of all blocks have experts, see SparseLayers.
        router: how tokens choose.
        gradient_checkpointing: recompute stages in the backward pass instead of keeping their activations.

    Sizes of None are those of the checkpoint, or the defaults of transformers.

    Raises:
        ConfigurationError: values that do not fit each other or the checkpoint.
    """

    num_classes: Annotated[int, Interval(ge=2, le=1e6)]
    pretrained: str | None = None
    image_size: PositiveInt = 192
    patch_size: PositiveInt | None = None
    window_size: PositiveInt | None = None
    embed_dim: PositiveInt | None = None
    depths: tuple[PositiveInt, ...] | None = None
    num_heads: tuple[PositiveInt, ...] | None = None
    mlp_ratio: Annotated[float, Interval(gt=0, le=1e6)] | None = None
    drop_path_rate: Probability | None = option(None, changes_function=False, draws_noise="in training")
    num_experts: PositiveInt = 8
    moe_every: PositiveInt = 2
    num_dense_layers: NonNegativeInt = 0
    router: RouterConfig = field(default_factory=RouterConfig)
    gradient_checkpointing: bool = option(False, changes_function=False)

    def __post_init__(self) -> None:
        for name in ("depths", "num_heads"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else tuple(value))
        object.__setattr__(self, "router", self.sparse_layers().router)
        if self.pretrained is not None:
            for name in _SIZES:
                if getattr(self, name) is not None:
                    raise ConfigurationError(
                        f"{name}={getattr(self, name)} comes from the checkpoint: leave it null with pretrained"
                    )

    def sparse_layers(self) -> SparseLayers:
        """Layers that have experts; those of a checkpoint must keep its function, which not every router does."""
        kind = SparseLayers if self.pretrained is None else UpcyclingConfig
        return kind(
            num_experts=self.num_experts,
            moe_every=self.moe_every,
            num_dense_layers=self.num_dense_layers,
            router=self.router,
        )

    def architecture(self) -> UpcycledArchitecture:
        """The model that transformers makes of these sizes, with experts.

        Raises:
            ConfigurationError: no such checkpoint, or sizes that no SwinV2 can have.
        """
        given = {name: getattr(self, name) for name in ("drop_path_rate", *_SIZES)}
        values = {name: value for name, value in given.items() if value is not None}
        names = {index: str(index) for index in range(self.num_classes)}
        labels = {"id2label": names, "label2id": {name: index for index, name in names.items()}}
        if self.pretrained is None:
            config = config_from({"model_type": _MODEL_TYPE, "image_size": self.image_size, **values, **labels})
            new_modules: tuple[str, ...] = ()
        else:
            config = read_config(model_folder(self.pretrained), (_MODEL_TYPE,), values)
            new_modules = () if config.num_labels == self.num_classes else (_HEAD,)
            if new_modules:
                config = config_from({**config.to_dict(), **labels})
        self._check(config)
        return UpcycledArchitecture(config, self.sparse_layers(), new_modules)

    def _check(self, config: Any) -> None:
        if config.image_size != self.image_size:
            raise ConfigurationError(
                f"image_size={self.image_size} is not the {config.image_size} of {self.pretrained}: set it to that"
            )
        if self.image_size % config.patch_size:
            raise ConfigurationError(
                f"image_size={self.image_size} is not a multiple of patch_size={config.patch_size}: change one of them"
            )
        if len(config.depths) != len(config.num_heads) or not config.depths:
            raise ConfigurationError(
                f"depths={list(config.depths)} and num_heads={list(config.num_heads)} need one number for each stage"
            )
        for stage, heads in enumerate(config.num_heads):
            width = config.embed_dim * 2**stage
            if heads < 1 or width % heads:
                raise ConfigurationError(
                    f"num_heads={list(config.num_heads)} cannot share the width {width} of stage {stage + 1}: "
                    "give divisors of embed_dim, doubled at each stage"
                )
        stages_px = config.patch_size * 2 ** (len(config.depths) - 1)
        if self.image_size < stages_px:
            raise ConfigurationError(
                f"image_size={self.image_size} leaves the last of {len(config.depths)} stages no token: use at least "
                f"{stages_px} pixels, a smaller patch_size or fewer depths"
            )


class SwinModule(SupervisedModule):
    """Trains a SwinV2-MoE on batches (images [B, 3, H, W], classes [B]).

    Logs `train/loss`, `val/loss` and `test/loss`, the mean cross-entropy in nats an image, auxiliary losses not
    included; and for each the shares of images whose class is the likeliest, `val/accuracy`, or among the five
    likeliest, `val/top_5_accuracy`. With gradient accumulation, those of training are of the step's last micro-batch.

    Args:
        config: the model, as a SwinConfig or its keyword arguments.
        optimizer: the optimizer, as an OptimizerConfig or its keyword arguments.

    Attributes:
        architecture: the model's configuration and its MoE layers by block.

    Raises:
        ConfigurationError: as SwinConfig.
    """

    def __init__(
        self, config: SwinConfig | Mapping[str, Any], optimizer: OptimizerConfig | Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.config = build_config(SwinConfig, config)
        self.optimizer_config = build_config(OptimizerConfig, optimizer)
        self.architecture = self.config.architecture()
        # Plain values only: a checkpoint must load without unpickling classes.
        plain = json.loads(json.dumps(asdict(self.config)))
        self.save_hyperparameters({"config": plain, "optimizer": asdict(self.optimizer_config)})

    @override
    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        if self.config.pretrained is None:
            self.model = new_model(self.architecture)
            _silence_branches(self.model)
        else:
            self.model = load_model(self.architecture, WeightsFolder(weights_folder(self.config.pretrained)))
        self.model.train()
        if self.config.gradient_checkpointing:
            recompute_activations(self.model)

    @override
    def setup(self, stage: str) -> None:
        """Refuse data with more classes than the model has."""
        needed = getattr(getattr(self.trainer, "datamodule", None), "num_classes", 0)
        if needed > self.config.num_classes:
            raise ConfigurationError(
                f"the data have {needed} classes, the model has {self.config.num_classes}: set num_classes={needed}"
            )

    @override
    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Logits [B, classes].

        Raises:
            ConfigurationError: images of another size than the model's.
        """
        height, width = images_BCHW.shape[-2:]
        if {height, width} != {self.config.image_size}:
            raise ConfigurationError(
                f"images of {height} x {width} pixels came to a model of image_size={self.config.image_size}: "
                "give both the same size"
            )
        logits_BV: Tensor = self.model(pixel_values=images_BCHW).logits
        return logits_BV

    @override
    def _logged_loss(self, batch: Batch, name: str) -> Tensor:
        images_BCHW, classes_B = batch[:2]
        logits_BV = self.logits(batch)
        loss = mean_over_targets(logits_BV, classes_B)
        stage = name.removesuffix("loss")
        options: dict[str, Any] = {"sync_dist": True, "batch_size": len(images_BCHW)}
        self.log(name, loss.detach(), prog_bar=True, **options)
        self.log(f"{stage}accuracy", top_k_accuracy(logits_BV, classes_B, 1), prog_bar=True, **options)
        self.log(f"{stage}top_5_accuracy", top_k_accuracy(logits_BV, classes_B, 5), **options)
        return loss


def least_swin_parameters(architecture: UpcycledArchitecture, num_experts: int) -> int:
    """Elements of the matrices of the attention, of the experts of one layer, and of the head, or a little fewer."""
    config = architecture.config
    widths: list[int] = [config.embed_dim << stage for stage in range(len(config.depths))]
    attention: int = sum(depth * 4 * width**2 for depth, width in zip(config.depths, widths, strict=True))
    expert: int = 2 * widths[0] * int(min(1, config.mlp_ratio) * widths[0])
    classes: int = config.num_labels
    return attention + num_experts * expert + classes * widths[-1]


@torch.no_grad()
def _silence_branches(model: nn.Module) -> None:
    """Start every residual branch at zero, as SwinV2 (Liu et al. 2022) does and transformers does not."""
    for module in model.modules():
        if isinstance(module, DroppingLayerNorm):
            module.weight.zero_()


@torch.no_grad()
def top_k_accuracy(logits_BV: Tensor, classes_B: Tensor, k: int) -> Tensor:
    """Share of samples whose class is among the k likeliest, or all of them where there are fewer classes; a scalar."""
    likeliest_BK = logits_BV.topk(min(k, logits_BV.shape[-1]), dim=-1).indices
    return (likeliest_BK == classes_B[:, None]).any(dim=-1).float().mean()
