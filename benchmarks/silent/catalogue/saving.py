"""Checkpoints, and trainings that resume from them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.silent.case import BFLOAT16, Case, Check, Fault, Training
from benchmarks.silent.faults import replace
from benchmarks.silent.model import Adapted, AdaptedIn4Bits, Overflowing
from moe_lightning import ExpertParallelStrategy, StepSampler
from moe_lightning.checkpoint import files, full_state
from moe_lightning.dispatch.replicas import ExpertStack
from moe_lightning.moe.randomness import SampleStream
from moe_lightning.strategies import precision

KIND = "saving and resuming"
BACK = "a checkpoint is not read back as it was"


def _experts_of_first_rank() -> None:
    def around(own: Any, *args: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = own(*args)
        for tensor in (tensor for key, tensor in found.items() if ".experts." in key):
            half = len(tensor) // 2
            tensor[half:] = tensor[:half].clone()
        return found

    replace(full_state, "gather", around)


def _of_optimizers(change: Callable[[dict[int, Any]], None]) -> Fault:
    """Change the states of optimizers before they are restored."""

    def process() -> None:
        def around(own: Any, strategy: Any, checkpoint: Mapping[str, Any]) -> None:
            changed = {**checkpoint, "optimizer_states": copy.deepcopy(checkpoint["optimizer_states"])}
            for state in changed["optimizer_states"]:
                change(state["state"])
            own(strategy, changed)

        replace(ExpertParallelStrategy, "load_optimizer_state_dict", around)

    return Fault(process=process)


def _no_expert_moments(state: dict[int, Any]) -> None:
    for entry in state.values():
        for value in entry.values():
            if isinstance(value, Tensor) and value.ndim == 3:
                value.zero_()


def _zeros(state: dict[int, Any]) -> None:
    for entry in state.values():
        entry["exp_avg"], entry["exp_avg_sq"] = (torch.zeros_like(entry[key]) for key in ("exp_avg", "exp_avg_sq"))


def _rounded(state: dict[int, Any]) -> None:
    for entry in state.values():
        entry["exp_avg"], entry["exp_avg_sq"] = (entry[key].bfloat16().float() for key in ("exp_avg", "exp_avg_sq"))


def _made_in_advance(trainer: Any, module: Any) -> None:
    """States are made by a step without gradients, which counts."""
    for optimizer in trainer.optimizers if not trainer.global_step else ():
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            optimizer.state[parameter] = {
                "step": torch.tensor(1.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def _first_step(state: dict[int, Any]) -> None:
    for entry in state.values():
        entry["step"] = torch.ones_like(entry["step"])


def _of_model(change: Callable[[dict[str, Tensor]], None]) -> Fault:
    """Change the weights of a checkpoint before they are restored."""

    def process() -> None:
        def around(own: Any, strategy: Any, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
            changed = {**checkpoint, "state_dict": dict(checkpoint["state_dict"])}
            change(changed["state_dict"])
            own(strategy, changed, strict=strict)

        replace(ExpertParallelStrategy, "load_model_state_dict", around)

    return Fault(process=process)


def _train_on_averages() -> None:
    def around(own: Any, strategy: Any, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        own(strategy, {**checkpoint, "current_model_state": checkpoint["state_dict"]}, strict=strict)

    replace(ExpertParallelStrategy, "load_model_state_dict", around)


def _fresh_adapters(state: dict[str, Tensor]) -> None:
    for name, tensor in state.items():
        if ".experts.lora_" in name:
            state[name] = torch.zeros_like(tensor) if name.endswith("_b") else tensor.roll(1, 0)


def _scales_of_one(state: dict[str, Tensor]) -> None:
    for name, tensor in state.items():
        if name.endswith("_scales"):
            state[name] = torch.ones_like(tensor) * tensor.mean()


def _local_layers(state: dict[str, Tensor]) -> None:
    for name in [name for name in state if ".blocks.1." in name]:
        state[name] = state[name.replace(".blocks.1.", ".blocks.0.")]


def _no_biases(state: dict[str, Tensor]) -> None:
    for name, tensor in state.items():
        if "expert_bias" in name:
            state[name] = torch.zeros_like(tensor)


def _half_precision(state: dict[str, Tensor]) -> None:
    state.update({name: t.bfloat16().float() if t.is_floating_point() else t for name, t in state.items()})


def _fresh_schedule() -> None:
    replace(LambdaLR, "load_state_dict", lambda own, *args: None)


def _from_the_first_sample() -> None:
    replace(StepSampler, "load_state_dict", lambda own, *args: None)


def _noise_of_first_steps() -> None:
    replace(SampleStream, "advance", lambda own, stream, *, step, **rest: own(stream, step=step % 3, **rest))


def _experts_by_place() -> None:
    """A rank's experts are the first of the file."""
    replace(ExpertStack, "select", lambda own, stack, tensor: tensor[: len(stack.slot_experts)].clone())


def _experts_in_reverse() -> None:
    replace(ExpertStack, "select", lambda own, stack, tensor: own(stack, tensor.flip(0)))


class _Killed(Exception):
    """In the place of SIGKILL."""


def _interrupted(rank: int) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """What a checkpoint holds, if the process that overwrites it ends in the middle."""
    path = Path("last.ckpt")
    old, new = ({"pytorch-lightning_version": "2", "state_dict": {"w": torch.full((1000,), x)}} for x in (1.0, 2.0))
    files.write_file(old, path)
    own, written = torch.save, [0]

    def dying(obj: object, file: Any, *args: Any, **kwargs: Any) -> None:
        class Dying:
            def write(self, data: bytes) -> int:
                written[0] += len(data)
                if written[0] > 2000:
                    raise _Killed
                return int(file.write(data))

            def flush(self) -> None:
                file.flush()

        own(obj, Dying(), *args, **kwargs)  # type: ignore[arg-type]

    torch.save = dying  # type: ignore[assignment]
    try:
        files.write_file(new, path)
    except (_Killed, RuntimeError):
        pass
    finally:
        torch.save = own
    return files.read_file(path)["state_dict"], old["state_dict"]  # type: ignore[return-value]


def _written_in_place() -> None:
    def written(own: Any, checkpoint: Any, path: Path) -> None:
        with open(path, "wb") as file:
            torch.save(checkpoint, file)

    replace(files, "write_file", written)


_SCALING = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=1024.0))


def _own_overflows() -> None:
    replace(precision, "all_reduce_", lambda own, *args: None)


BIASED = {"router": {"bias_update_rate": 0.02, "score": "sigmoid"}}

CASES = (
    Case(
        id="experts-of-one-rank-saved",
        report="KempnerInstitute/KempnerForge#202",
        symptom="a checkpoint holds the experts of one rank, and a resume gives them to all",
        subject=Training(),
        fault=Fault(process=_experts_of_first_rank),
        doctor=("the weights of", "expert 3", "from all ranks"),
    ),
    Case(
        id="moments-lost",
        report="KempnerInstitute/KempnerForge#115",
        symptom="a new optimizer has no moments to restore into, and begins again from zero",
        subject=Training(),
        fault=_of_optimizers(lambda state: state.clear()),
        doctor=(BACK, "not in it"),
    ),
    Case(
        id="moments-of-experts-stale",
        report="deepspeedai/DeepSpeed#8147",
        symptom="conversion of a checkpoint leaves the moments of experts as they were",
        subject=Training(strategy={"dense": "zero1"}),
        fault=_of_optimizers(_no_expert_moments),
        doctor=(BACK, "exp_avg", "expert", "moments"),
    ),
    Case(
        id="number-of-updates-lost",
        report="deepspeedai/DeepSpeed#4396",
        symptom="the optimizer's count of steps is not saved, and its bias corrections begin again",
        subject=Training(strategy={"dense": "fsdp"}),
        fault=_of_optimizers(_first_step),
        doctor=(BACK, "step of", "count its steps"),
    ),
    Case(
        id="number-of-updates-ahead",
        report="NVIDIA/Megatron-LM#5976",
        symptom="the states of the optimizer are made by a step that counts, and the first update is too small",
        subject=Training(),
        fault=Fault(run=_made_in_advance),
        doctor=("the update of", "step 1", "its gradient is the same"),
    ),
    Case(
        id="moments-rounded-by-a-resume",
        report="huggingface/nanotron#245",
        symptom="moments are loaded in bfloat16, and made float32 afterwards",
        subject=Training(strategy={"dense": "fsdp"}),
        fault=_of_optimizers(_rounded),
        doctor=(BACK, "exp_avg", "moments"),
    ),
    Case(
        id="moments-of-adapters-zero",
        report="NVIDIA-NeMo/labs-molt#57",
        symptom="a resume with adapters on experts finishes, and has restored moments of zero",
        subject=Training(module=Adapted, strategy={"dense": "zero1"}),
        fault=_of_optimizers(_zeros),
        doctor=(BACK, "exp_avg", "lora", "moments"),
    ),
    Case(
        id="changed-groups",
        report="pytorch/pytorch#1489",
        symptom="moments belong to numbers, so parameters in another order get those of others",
        subject=Training(resumed_model={"optimizer": "adamw backwards"}),
        refused="would get the moments of another",
    ),
    Case(
        id="loss-scale-of-each-rank",
        report="NVIDIA-NeMo/Megatron-Bridge#5591",
        symptom="ranks whose gradients overflow skip an update and lower the loss scale, and others do not",
        subject=Training(
            module=Overflowing,
            model={"router": {"top_k": 4}},  # of four, so that rounding chooses nothing
            trainer={"plugins": [_SCALING]},
            reference="one rank",
        ),
        fault=Fault(process=_own_overflows),
        beyond="it refuses precision=16-mixed",
        limits=BFLOAT16,
    ),
    Case(
        id="schedule-lost",
        report="lightly-ai/lightly-train#301",
        symptom="the learning-rate schedule is not saved, and begins again",
        subject=Training(),
        fault=Fault(process=_fresh_schedule),
        doctor=(BACK, "the schedule"),
    ),
    Case(
        id="samples-repeat",
        report="facebookresearch/fairchem#639",
        symptom="a checkpoint inside of an epoch resumes at the epoch's first sample",
        subject=Training(),
        fault=Fault(process=_from_the_first_sample),
        doctor=(BACK, "the position", "samples again"),
    ),
    Case(
        id="shuffle-lost",
        report="huggingface/accelerate#4233",
        symptom="batches are skipped of another permutation than the one that was trained on",
        subject=Training(shuffles=True, reference="one rank"),
        fault=Fault(process=_from_the_first_sample),
        doctor=(BACK, "the position", "samples again"),
    ),
    Case(
        id="noise-repeats",
        report="NVIDIA/Megatron-LM#6858",
        symptom="random streams of most ranks are not restored, and dropout and routing noise are others",
        subject=Training(model={"dropout": 0.2}, reference="one rank"),
        fault=Fault(process=_noise_of_first_steps),
        beyond="noise of later steps is other noise",
    ),
    Case(
        id="more-ranks",
        report="NVIDIA-NeMo/Megatron-Bridge#1716",
        symptom="experts of a checkpoint of several ranks do not come together on another number of ranks",
        subject=Training(resumed_ranks=4),
        fault=Fault(process=_experts_in_reverse),
        doctor=(BACK, "the weights", "another expert"),
    ),
    Case(
        id="another-placement",
        report="Tencent-Hunyuan/UniRL#158",
        symptom="every rank takes the first block of experts, whose shapes fit",
        subject=Training(resumed_strategy={"placement": [[1, 0], [0, 1], [1, 1], [0, 1]]}),
        fault=Fault(process=_experts_by_place),
        doctor=(BACK, "the weights", "another expert"),
    ),
    Case(
        id="another-placement-with-copies",
        report="deepspeedai/DeepSpeed#8544",
        symptom="a conversion knows equal blocks of experts only, not copies nor experts apart from each other",
        subject=Training(
            strategy={"placement": [[1, 1], [0, 1], [1, 0], [0, 1]]},
            resumed_ranks=4,
            resumed_strategy={"placement": [[0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1], [1, 1, 0, 1]]},
        ),
        fault=Fault(process=_experts_in_reverse),
        doctor=(BACK, "the weights", "another expert"),
    ),
    Case(
        id="another-sharding",
        report="areal-project/AReaL#1468",
        symptom="a checkpoint loads under another sharding, and drops the moments without a word",
        subject=Training(
            strategy={"dense": "fsdp"}, resumed_ranks=4, resumed_strategy={"dense": "zero1", "replicas": 2}
        ),
        fault=_of_optimizers(lambda state: state.clear()),
        doctor=(BACK, "not in it"),
    ),
    Case(
        id="stages-by-local-names",
        report="NVIDIA/Megatron-LM#7452",
        symptom="pipeline stages name layers from zero each, so a checkpoint of one stage loads wrong layers in two",
        subject=Training(model={"router": {"aux_loss_coef": 0.0}}, resumed_strategy={"mesh": {"pp": 2}}),
        fault=_of_model(_local_layers),
        doctor=(BACK, "the weights", "layer"),
    ),
    Case(
        id="adapters-from-scratch",
        report="NVIDIA-NeMo/Automodel#1325",
        symptom="adapters of experts are skipped when a checkpoint is loaded, and start from scratch",
        subject=Training(module=Adapted),
        fault=_of_model(_fresh_adapters),
        doctor=(BACK, "lora", "never written"),
    ),
    Case(
        id="scales-of-four-bits-not-saved",
        report="huggingface/peft#508",
        symptom="the scales of four-bit weights are not in the state of the model, and a load has others",
        subject=Training(module=AdaptedIn4Bits, reference="one rank"),
        fault=_of_model(_scales_of_one),
        doctor=(BACK, "scales"),
    ),
    Case(
        id="selection-bias-not-saved",
        report="modelscope/mcore-bridge#195",
        symptom="what is saved leaves the selection bias out, and other experts are chosen after a reload",
        subject=Training(model=BIASED),
        fault=_of_model(_no_biases),
        doctor=(BACK, "expert_bias", "route"),
    ),
    Case(
        id="weights-rounded-by-a-resume",
        report="TensorAuto/OpenTau#185",
        symptom="master weights are made again of rounded ones by every resume",
        subject=Training(),
        fault=_of_model(_half_precision),
        doctor=(BACK, "the weights", "rounded"),
    ),
    Case(
        id="average-trained-on",
        report="ecmwf/anemoi-core#1373",
        symptom="a checkpoint holds averaged weights, and a resume trains on from these",
        subject=Training(callbacks=lambda: [EMAWeightAveraging(decay=0.5)]),
        fault=Fault(process=_train_on_averages),
        doctor=(BACK, "the weights"),
    ),
    Case(
        id="killed-while-saving",
        report="Lightning-AI/pytorch-lightning#688",
        symptom="a process that is killed while it saves leaves half a file in the place of the last checkpoint",
        subject=Check(function=_interrupted),
        fault=Fault(process=_written_in_place),
        beyond="nothing is trained",
    ),
)
