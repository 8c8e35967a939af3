"""Exports for other programs: two ranks train a model of transformers at a rate of almost zero, and transformers must
compute the same with what they export.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.silent.case import Case, Check, Fault, Training
from benchmarks.silent.faults import replace
from benchmarks.silent.model import Tokens
from benchmarks.silent.training import train

KIND = "export"
BEYOND = "nothing is trained"
_SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_QWEN3 = ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16})
_MIXTRAL = ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2})


class Exported(pl.Callback):
    """Saves the model at the end of training, and exports the checkpoint to the folder ours."""

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        from moe_lightning.cli.huggingface import export_checkpoint

        trainer.save_checkpoint("ours.ckpt")
        if trainer.is_global_zero:
            export_checkpoint(Path("ours.ckpt"), Path("ours"))
        trainer.strategy.barrier()


def _quiet_transformers() -> Any:
    """The library, which asks no hub and prints nothing."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _round_trip(kind: tuple[str, Mapping[str, Any]], **options: Any) -> Callable[[int], Any]:
    """Logits of what two ranks export, and those of the model that they loaded."""

    def function(rank: int) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        transformers = _quiet_transformers()
        from moe_lightning import HuggingFaceModule

        name, sizes = kind
        if rank == 0:
            torch.manual_seed(3)
            config = getattr(transformers, name)(**{**_SIZES, **sizes, **options})
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained("theirs")
        dist.barrier()
        optimizer = {"lr": 1e-12, "weight_decay": 0.0, "warmup_steps": 0, "decay": "constant"}
        training = Training(
            module=lambda model: HuggingFaceModule({"pretrained": "theirs", "context_length": 8}, optimizer),
            trainer={"limit_train_batches": 1, "max_epochs": 1},
            data=Tokens,
        )
        train(rank, 2, training, [Exported()])
        if rank:
            return {}, {}
        ids = torch.stack([Tokens()[index][0] for index in range(4)])
        models = [transformers.AutoModelForCausalLM.from_pretrained(Path(folder)) for folder in ("ours", "theirs")]
        with torch.no_grad():
            ours, theirs = (model.eval()(ids).logits for model in models)
        return {"logits": ours}, {"logits": theirs}

    return function


def _merged(rank: int) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Logits of adapters on experts in four bits, merged for transformers, and those of the training."""
    transformers = _quiet_transformers()
    from moe_lightning import HuggingFaceModule

    ids = torch.stack([Tokens()[index][0] for index in range(4)])
    logits: dict[str, Tensor] = {}

    class Logits(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            with torch.no_grad():
                logits["logits"] = module.eval()(ids)

    torch.manual_seed(3)
    config = transformers.MixtralConfig(**_SIZES | _MIXTRAL[1] | {"hidden_size": 32, "intermediate_size": 64})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained("theirs")
    adapter = {"kind": "qlora", "rank": 2, "alpha": 32.0}
    optimizer = {"lr": 0.05, "weight_decay": 0.0, "warmup_steps": 0, "decay": "constant"}
    training = Training(
        module=lambda model: HuggingFaceModule(
            {"pretrained": "theirs", "context_length": 8, "adapter": adapter}, optimizer
        ),
        trainer={"limit_train_batches": 2, "max_epochs": 1},
    )
    train(rank, 1, training, [Logits(), Exported()])
    with torch.no_grad():
        ours = transformers.AutoModelForCausalLM.from_pretrained(Path("ours")).eval()(ids).logits
    return {"logits": ours}, logits


def _base_alone() -> None:
    from moe_lightning.models.huggingface import export

    def around(own: Any, stacks: Mapping[str, Tensor], *args: Any) -> Any:
        return own({name: stack for name, stack in stacks.items() if not name.startswith("lora_")}, *args)

    replace(export, "merged_experts", around)


def _written(change: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]) -> Fault:
    """Change the stacks of experts before they are written."""

    def process() -> None:
        from moe_lightning.models.huggingface.weights import SeparateExperts

        replace(SeparateExperts, "write", lambda own, layout, prefix, stacks: own(layout, prefix, change(dict(stacks))))

    return Fault(process=process)


def _transposed(stacks: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {**stacks, "w_down": stacks["w_down"].transpose(1, 2)}


def _dropped(stacks: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {name: torch.randn_like(stack) for name, stack in stacks.items()}


def _of_first_rank(stacks: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {name: stack[: len(stack) // 2].repeat(2, 1, 1) for name, stack in stacks.items()}


def _untied() -> None:
    from moe_lightning.models.huggingface.export import Export

    def around(own: Any, export: Any, *args: Any, **kwargs: Any) -> int:
        export.config.tie_word_embeddings = False
        return int(own(export, *args, **kwargs))

    replace(Export, "write", around)


CASES = (
    Case(
        id="transposed-experts",
        report="huggingface/transformers#47031",
        symptom="matrices whose sides are equal are taken for transposed already, and the experts are garbage",
        subject=Check(ranks=2, function=_round_trip(_QWEN3)),
        fault=_written(_transposed),
    ),
    Case(
        id="experts-left-out",
        report="NVIDIA/Megatron-LM#5844",
        symptom="a converter finds no name for the experts, leaves them as they were made, and reports success",
        subject=Check(ranks=2, function=_round_trip(_MIXTRAL)),
        fault=_written(_dropped),
    ),
    Case(
        id="experts-of-one-rank-exported",
        report="modelscope/twinkle#116",
        symptom="the gathered tensor is that of one mesh alone, so only the experts of one rank are exported",
        subject=Check(ranks=2, function=_round_trip(_QWEN3, norm_topk_prob=True)),
        fault=_written(_of_first_rank),
    ),
    Case(
        id="adapters-not-merged",
        report="axolotl-ai-cloud/axolotl#3771",
        symptom="adapters are added to quantised numbers as they are stored, and are lost in what is merged",
        subject=Check(function=_merged),
        fault=Fault(process=_base_alone),
    ),
    Case(
        id="tied-head-not-exported",
        report="vllm-project/vllm#53019",
        symptom="a head that is tied is in no file, and stays random where nobody ties it again",
        subject=Check(ranks=2, function=_round_trip(_MIXTRAL, tie_word_embeddings=True)),
        fault=Fault(process=_untied),
    ),
)
