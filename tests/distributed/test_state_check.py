"""State stays what updates have made it, alike on all ranks: what parts replicas is refused, and damage is found."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from moe_lightning.callbacks.fault_recovery import FaultRecovery
from moe_lightning.dispatch.placement import Placement
from moe_lightning.dispatch.replicas import ExpertStack
from moe_lightning.errors import ConfigurationError, StateDamagedError
from moe_lightning.moe.layer import MoELayer
from moe_lightning.parallel.context import World
from moe_lightning.state.sums import Damage, Sums, differing, state_units
from moe_lightning.state.table import State
from moe_lightning.state.tensors import local
from moe_lightning.strategies import optimizer_checks, state_check
from moe_lightning.strategies.checks import identical_buffers
from moe_lightning.strategies.dense_sharding import DENSE_SHARDINGS, DenseOptimizerShards
from moe_lightning.strategies.optimizer_checks import require_updates_by_expert, require_updates_by_parameter
from moe_lightning.strategies.train_state import TrainState
from moe_lightning.strategies.worlds import Worlds
from tests.chaos.elastic_worker import state_digests
from tests.distributed.harness import connect, run_pooled
from tests.distributed.training import OwnModule, RandomTokens, Warned, make_trainer, train
from tests.parameters import slow


class Lion(Optimizer):
    """A user's own elementwise optimizer."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["lr"] * p.grad.sign()


class Lars(Lion):
    """One that scales by the norm of the whole tensor."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["lr"] * p.grad / p.grad.norm()


class EightBit(Lion):
    """Momentum in eight bits with a scale for each 256 numbers, for tensors of at least 4096."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if p.numel() < 4096:
                    momentum = state.setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                else:
                    known = state["momentum"].view(-1, 256) * state["scale"][:, None] if state else 0.0
                    momentum = 0.9 * known + 0.1 * p.grad.reshape(-1, 256)
                    state["scale"] = momentum.abs().amax(1).clamp_min(1e-30) / 127
                    state["momentum"] = (momentum / state["scale"][:, None]).round().to(torch.int8).view_as(p)
                    momentum = (state["momentum"].view(-1, 256) * state["scale"][:, None]).view_as(p)
                p.sub_(group["lr"] * momentum)


class Counted(Lion):
    """One whose count of steps is a vector of one number."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("step", torch.zeros(1)).add_(1)


class Unknown(Lion):
    """One whose constructor asks for more than its options."""

    def __init__(self, params: Any, schedule: Callable[[int], float]) -> None:
        super().__init__(params)


ELEMENTWISE: list[tuple[Any, dict[str, Any]]] = [
    (getattr(torch.optim, name), options)
    for name in ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "ASGD", "RMSprop", "Rprop"]
    for options in ({}, {"foreach": True}, {"foreach": False})
]
ELEMENTWISE += [
    (torch.optim.AdamW, {"amsgrad": True, "betas": (0.8, 0.9)}),
    (torch.optim.AdamW, {"lr": torch.tensor(1e-2)}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (Lion, {}),
]
MIXING: list[tuple[Any, dict[str, Any]]] = [(torch.optim.Adafactor, {}), (torch.optim.LBFGS, {}), (Lars, {})]


def stacks(width: int = 7) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(2, 3, width)), nn.Parameter(torch.randn(2, width))]


@pytest.mark.parametrize(("kind", "options"), ELEMENTWISE)
def test_elementwise_optimizers_pass(kind: Any, options: dict[str, Any]) -> None:
    parameters = stacks()
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = kind(parameters, **options)
        before = [p.detach().clone() for p in parameters]
        known = repr(optimizer.state_dict())
        require_updates_by_expert([optimizer], parameters)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    assert repr(optimizer.state_dict()) == known, "the run's own optimizer is not touched"
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("kind", "options"), MIXING)
def test_optimizers_that_mix_rows_are_refused(kind: Any, options: dict[str, Any]) -> None:
    parameters = stacks()
    with pytest.raises(ConfigurationError, match=rf"^{kind.__name__} updates an expert differently .* use AdamW"):
        require_updates_by_expert([kind(parameters, **options)], parameters)
    require_updates_by_expert([kind(parameters, **options)], [])  # of dense parameters it is nobody's business


class Clipping(torch.optim.SGD):
    """One that clips by the norm of all of its gradients."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


@pytest.mark.parametrize(("kind", "options"), [*ELEMENTWISE, (torch.optim.Adafactor, {}), (Lars, {})])
def test_optimizers_of_whole_parameters_pass(kind: Any, options: dict[str, Any]) -> None:
    state = torch.get_rng_state()
    for dtype in (torch.float32, torch.bfloat16):
        scale = nn.Parameter(torch.ones((), dtype=dtype))
        for group in ([nn.Parameter(torch.ones(3, 5, dtype=dtype))], [scale]):
            require_updates_by_parameter([kind(group, **options)], "dense=zero1")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", [Clipping, torch.optim.LBFGS])
@pytest.mark.parametrize("shape", [(), (3, 5)])
def test_optimizers_that_mix_parameters_are_refused_where_ranks_have_some(kind: Any, shape: tuple[int, ...]) -> None:
    optimizer = kind([nn.Parameter(torch.ones(shape))])
    with pytest.raises(ConfigurationError, match=rf"^{kind.__name__} updates .* in others, and mesh.pp gives each"):
        require_updates_by_parameter([optimizer], "mesh.pp")


def test_trials_of_optimizers_gather_no_rows() -> None:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        rows = nn.Parameter(DTensor.from_local(torch.ones(4, 8), mesh, [Shard(0)], run_check=False))
        with CommDebugMode() as collectives:
            require_updates_by_parameter([torch.optim.AdamW([rows])], "mesh.pp")
    finally:
        dist.destroy_process_group()
    assert collectives.get_total_counts() == 0


def test_trials_of_optimizers_leave_generators_of_other_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of GPUs that are used later: torch keeps seeds for them."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail(f"GPUs are seeded with {seed}"))
    parameters = stacks(9)
    require_updates_by_expert([torch.optim.AdamW(parameters)], parameters)


def test_an_optimizer_is_tried_once_with_the_same_options() -> None:
    class Stepping(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            Stepping.steps += 1
            return super().step(closure)

    def steps(**options: float) -> int:
        before, parameters = Stepping.steps, stacks()
        require_updates_by_expert([Stepping(parameters, **options)], parameters)
        return Stepping.steps - before

    assert steps() > 0
    assert steps() == 0
    assert steps(momentum=0.9) > 0
    assert steps(lr=1e-3) == 0, "the default"


class DenseClipped(OwnModule):
    """Trains dense parameters only."""

    def configure_optimizers(self) -> Any:
        self.moe.requires_grad_(False)
        return Clipping([p for p in self.parameters() if p.requires_grad], lr=0.1)


def refused_start(rank: int, world_size: int, strategy: dict[str, Any]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        make_trainer(rank, world_size, strategy, max_steps=1).fit(
            DenseClipped(), DataLoader(RandomTokens(12), batch_size=6)
        )
    return str(caught.value)


class DenseInTurn(DenseOptimizerShards):
    """Sharding of a plugin."""


def refused_start_with_a_plugin(rank: int, world_size: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DENSE_SHARDINGS._members, "in_turn", DenseInTurn)
        return refused_start(rank, world_size, {"dense": "in_turn"})


def test_an_optimizer_that_clips_by_itself_is_refused_where_ranks_own_states() -> None:
    for text in run_pooled(2, refused_start, {"dense": "zero1"}):
        assert text.startswith("Clipping updates a parameter by what is in others, and dense=zero1 gives each rank")
    for text in run_pooled(2, refused_start_with_a_plugin):
        assert text.startswith("Clipping updates a parameter by what is in others, and dense=in_turn gives each rank")


def test_optimizers_that_quantize_large_states_are_refused() -> None:
    stack = nn.Parameter(torch.randn(8, 16, 64))
    with pytest.raises(ConfigurationError, match="EightBit updates an expert differently beside other experts"):
        require_updates_by_expert([EightBit([stack])], [stack])


def test_states_without_a_row_for_each_expert_are_refused() -> None:
    parameters = stacks()
    with pytest.raises(ConfigurationError, match=r"'step' of experts has shape \[1\], which cannot be cut by expert"):
        require_updates_by_expert([Counted(parameters)], parameters)


def test_rows_that_half_precision_rounds_by_their_place_are_refused() -> None:
    parameters = [nn.Parameter(p.detach().half()) for p in stacks()]
    for kind in (torch.optim.AdamW, torch.optim.Adafactor):
        with pytest.raises(ConfigurationError, match=r"ranks: use AdamW or another elementwise .* float32 parameters"):
            require_updates_by_expert([kind(parameters)], parameters)


@pytest.mark.parametrize(("width", "is_refused"), [(7, True), (78, True), (16, False), (64, False)])
def test_fused_updates_are_refused_where_rows_end_within_a_vector(width: int, is_refused: bool) -> None:
    parameters = [nn.Parameter(torch.randn(2, 3, width))]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    if is_refused:
        with pytest.raises(ConfigurationError, match=r"AdamW updates an expert differently .* drop fused=True"):
            require_updates_by_expert([optimizer], parameters)
    else:
        require_updates_by_expert([optimizer], parameters)


def test_an_optimizer_that_cannot_be_tried_is_told_once() -> None:
    parameters = stacks()
    optimizers = [Unknown(parameters, float)]
    optimizer_checks._warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"Unknown cannot be tried on a small parameter \(TypeError\)"):
        require_updates_by_expert(optimizers, parameters)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_updates_by_parameter(optimizers, "dense=zero1")


class WithOptimizer(OwnModule):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self._kind = kind

    def configure_optimizers(self) -> Optimizer:
        optimizer: Optimizer = self._kind(self.parameters(), lr=1e-3)
        return optimizer


def fit_with(rank: int, world_size: int, kind: Any) -> str:
    trainer = make_trainer(rank, world_size, max_steps=1)
    try:
        trainer.fit(WithOptimizer(kind), DataLoader(RandomTokens(24), batch_size=12))
    except ConfigurationError as error:
        return str(error)
    return ""


def test_a_fit_refuses_them_before_its_first_step() -> None:
    first, second = run_pooled(2, fit_with, torch.optim.Adafactor)
    assert first == second
    assert first.startswith("Adafactor updates an expert differently")
    assert run_pooled(1, fit_with, torch.optim.Adafactor) == [""]


# ---------------------------------------------------------------------- the comparison


def held(rank: int, change: dict[int, tuple[int, int, int]]) -> list[ExpertStack]:
    """Two layers on three ranks: experts 0..3 in other slots on each, the second layer bf16 with a vacant slot."""
    slots = ((0, 1, 2), (2, 0, 3), (1, 3, 0))[rank]
    placement = Placement(replicas=np.array([[1, 1, 1], [1, 0, 1], [1, 1, 0], [0, 1, 1]]))
    layers = []
    for index, dtype in enumerate((torch.float32, torch.bfloat16)):
        full = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(index)).to(dtype)
        own: Tensor = full[list(slots)].clone()
        if rank in change and change[rank][0] == index:
            _, expert, element = change[rank]
            bits = own[slots.index(expert)].view(torch.int16 if dtype is torch.bfloat16 else torch.int32)
            bits.view(-1)[element] ^= 1
        parameters = {"w": nn.Parameter(own), "b": nn.Parameter(own.mean(dim=(1, 2))[:, None])}
        layers.append(ExpertStack(parameters=parameters, slot_experts=slots, placement=placement, rank=rank))
    nobody = {"w": nn.Parameter(torch.randn(1, 3))}
    return [*layers, ExpertStack(parameters=nobody, slot_experts=(-1,), placement=placement, rank=rank)]


def compare(rank: int, world_size: int, change: dict[int, tuple[int, int, int]]) -> list[Damage]:
    state = State(nn.Module(), held(rank, change), [], state_ranks={}, rank=rank, world_size=world_size)
    world = connect()
    return differing(Sums(state_units(state, ()), world), world)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({1: (0, 2, 29)}, [("expert 2 of MoE layer 0", ((0,), (1,)))]),
        ({2: (1, 0, 0)}, [("expert 0 of MoE layer 1", ((0, 1), (2,)))]),
        (
            {0: (0, 0, 3), 1: (1, 3, 7)},
            [("expert 0 of MoE layer 0", ((0,), (1, 2))), ("expert 3 of MoE layer 1", ((1,), (2,)))],
        ),
    ],
)
def test_one_bit_is_found_and_named(change: dict[int, tuple[int, int, int]], expected: list[Any]) -> None:
    results = run_pooled(3, compare, change)
    assert results[0] == results[1] == results[2]
    assert [(d.name, d.groups) for d in results[0]] == expected


class Normed(OwnModule):
    """Has other layers with buffers inside of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoELayer(32, 48, num_experts=6, router={"top_k": 2, "bias_update_rate": 1e-3})
        router: Any = self.moe.router
        router.norm = nn.BatchNorm1d(32, affine=False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        router: Any = self.moe.router
        router.norm(self.embed(batch[0]).flatten(0, 1))
        return super().training_step(batch, batch_idx)


def fit_normed(rank: int, world_size: int) -> tuple[list[str], str]:
    trainer = make_trainer(rank, world_size, {"check_state_every": 1}, max_steps=4)
    module = Normed()
    try:
        trainer.fit(module, DataLoader(RandomTokens(), batch_size=4))
    except StateDamagedError as error:
        return identical_buffers(module), str(error)
    return identical_buffers(module), ""


def test_running_statistics_inside_of_our_layers_may_differ() -> None:
    for names, error in run_pooled(2, fit_normed):
        assert error == ""
        assert not any("norm" in name for name in names)
        assert any(name.startswith("moe.router.") for name in names)


class Meddler(pl.Callback):
    """After a step, changes one weight of expert 4 on one rank."""

    def __init__(self, step: int) -> None:
        self.step, self.compared = step, 0

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        slots = module.moe.experts.slot_experts
        if trainer.global_step == self.step and trainer.global_rank == 1:
            module.moe.experts.w_up.data[slots.index(4), 0, 0] += 1e-3


def fit_meddled(rank: int, world_size: int, replicas: int, every: int, step: int) -> tuple[str, int, int]:
    options = {"replicas": replicas, "check_state_every": every}
    trainer = make_trainer(rank, world_size, options, callbacks=[Meddler(step)], max_steps=8)
    compared = 0
    stock = state_check.differing
    module, loader = OwnModule(), DataLoader(RandomTokens(96), batch_size=12)

    def counted(*args: Any) -> Any:
        nonlocal compared
        compared += 1
        return stock(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_check, "differing", counted)
        try:
            trainer.fit(module, loader)
        except StateDamagedError as error:
            return str(error), trainer.global_step, compared
    return "", trainer.global_step, compared


def test_a_meddled_replica_ends_the_run_at_the_next_comparison() -> None:
    first, second = run_pooled(2, fit_meddled, 2, 3, 4)
    assert first == second
    assert first[1:] == (6, 3)
    assert first[0].startswith(
        "after step 6 the replicas of expert 4 of MoE layer 0 differ between ranks [0] and ranks"
    )


@pytest.mark.parametrize("begun", [None, 29, 30], ids=["a newcomer", "a survivor", "one that was further"])
def test_all_ranks_compare_before_a_save_in_which_no_step_has_begun(
    begun: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault comes after the last step: what a rank knows of its world before must not keep it from comparing."""
    worlds = Worlds()
    compared: list[Any] = []
    check = state_check.StateCheck(worlds, TrainState(worlds, dense="ddp"), every="auto")
    monkeypatch.setattr(check, "_sums", lambda *_: None)

    def compare(*_: Any) -> list[Damage]:
        compared.append(check._own)
        return []

    monkeypatch.setattr(check, "_damage", compare)
    world = World.offline(0, 2, torch.device("cpu"))
    if begun is not None:
        worlds.set_present(replace(world, generation=1))
        check.before_step(begun)
        check.before_save(begun + 1)
        assert compared == [], "in the first steps of a world nothing is compared"
    worlds.set_present(replace(world, generation=2))
    check.before_save(31)
    assert compared == [None]


@pytest.mark.parametrize(("replicas", "every", "compared"), [(2, 3, 4), slow(2, 0, 0), slow(2, 100, 0), (1, 3, 4)])
def test_nothing_is_compared_in_other_steps(replicas: int, every: int, compared: int) -> None:
    assert run_pooled(2, fit_meddled, replicas, every, -1) == [("", 8, compared)] * 2


def test_a_further_training_is_checked_from_its_begin() -> None:
    """Its steps are counted from 0 again."""
    worlds = Worlds()
    worlds.set_present(World.offline(0, 2, torch.device("cpu")))
    schedule = state_check.CheckSchedule(worlds, "auto", most_steps=100, unchecked=2)
    schedule.begins(5000)
    schedule.begin_training()
    assert [step for step in range(5) if schedule.begins(step) and schedule.is_due(step)] == [2, 3, 4]


def test_steps_that_pass_over_all_multiples_are_checked() -> None:
    """As those of two optimizers, in batches of two steps that begin at odd ones."""
    worlds, due = Worlds(), list[int]()
    worlds.set_present(World.offline(0, 2, torch.device("cpu")))
    schedule = state_check.CheckSchedule(worlds, 4, most_steps=100, unchecked=2)
    for step in (0, *range(1, 20, 2)):
        if schedule.begins(step) and schedule.is_due(step):
            due.append(step)
            schedule.plan(torch.tensor([1, 1]))
    assert due == [5, 9, 13, 17]


class Odd(nn.Module):
    """Parameters of unusual shapes and types."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.vector = nn.Parameter(torch.tensor([1.0 + 2.0j, 3.0]))
        self.narrow = nn.Parameter(torch.ones(3, dtype=torch.float8_e4m3fn), requires_grad=False)


def compare_odd(rank: int, world_size: int, changed: str) -> list[str]:
    module = Odd()
    state = State(module, [], [], state_ranks={}, rank=rank, world_size=world_size)
    if rank == 1 and changed:
        module.get_parameter(changed).data.view(-1).view(torch.uint8)[-1] ^= 1
    world = connect()
    return [damage.name for damage in differing(Sums(state_units(state, ()), world), world)]


@pytest.mark.parametrize("changed", ["", "scalar", "vector", "narrow"])
def test_parameters_of_any_shape_and_type_are_compared(changed: str) -> None:
    assert run_pooled(2, compare_odd, changed) == [[changed] if changed else []] * 2


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FlipBits(pl.Callback):
    """After the second step, flips one bit after the other on one rank after the other, and undoes it when all ranks
    have compared.
    """

    def __init__(self, flips: int) -> None:
        self.flips = flips
        self.flipped: list[str] = []
        self.unseen: list[str] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step != 2:
            return
        check, world = trainer.strategy.update.state_check, trainer.strategy.world  # type: ignore[attr-defined]
        assert not differing(check._sums(), world)
        draw = np.random.default_rng(world.rank)
        for number in range(self.flips):
            name = None
            if number % world.size == world.rank:
                found = [unit for unit in check.units() if len(unit.holders) > 1]
                replica = found[draw.integers(len(found))]
                tensors = replica.tensors()
                name, tensor = replica.name, tensors[draw.integers(len(tensors))]
                bits = tensor.detach().view(_BITS[tensor.element_size()])
                place = tuple(int(draw.integers(size)) for size in bits.shape)
                before = bits[place].clone()
                bits[place] ^= 1 << int(draw.integers(8 * tensor.element_size() - 1))
                self.flipped.append(name)
            seen = differing(check._sums(), world)
            if name is not None:
                if [difference.name for difference in seen] != [name] or (world.rank,) not in seen[0].groups:
                    self.unseen.append(name)
                bits[place] = before
        assert not differing(check._sums(), world)


def flip_bits(
    rank: int, world_size: int, strategy: dict[str, Any], options: dict[str, Any]
) -> tuple[list[str], list[str]]:
    flip = FlipBits(20)
    model = {"tie_embeddings": False, "router": {"top_k": 2, "bias_update_rate": 0.01}}
    train(
        rank, world_size, model=model, strategy={"check_state_every": 1, **strategy}, trainer=options, steps=3,
        dataset_size=36, callbacks=[flip],
    )  # fmt: skip
    return flip.flipped, flip.unseen


@pytest.mark.parametrize(
    ("ranks", "strategy", "options", "kinds"),
    [
        (2, {"replicas": 2}, {}, ["weight", "exp_avg", "router", "expert"]),
        slow(2, {"dense": "zero1"}, {}, ["weight", "router"]),
        (2, {"mesh": {"tp": 2}}, {}, ["norm", "exp_avg", "router"]),
        slow(2, {"mesh": {"cp": 2}}, {"precision": "bf16-mixed"}, ["weight", "exp_avg", "router"]),
        slow(4, {"dense": "hsdp", "shard_size": 2}, {}, ["weight", "exp_avg", "router"]),
        slow(4, {"mesh": {"pp": 2}, "replicas": 2}, {}, ["weight", "exp_avg", "router", "expert"]),
        slow(4, {"mesh": {"pp": 2}, "dense": "zero1"}, {"precision": "bf16-mixed"}, ["weight", "router"]),
        slow(4, {"mesh": {"tp": 2}, "dense": "fsdp"}, {}, ["router"]),
    ],
    ids=str,
)
def test_a_flipped_bit_is_found_wherever_several_ranks_hold_it(
    ranks: int, strategy: dict[str, Any], options: dict[str, Any], kinds: list[str]
) -> None:
    results = run_pooled(ranks, flip_bits, strategy, options)
    flipped = [name for names, _ in results for name in names]
    assert len(flipped) == 20
    assert [unseen for _, unseen in results] == [[]] * ranks
    assert all(any(kind in name for name in flipped) for kind in kinds), flipped


class Flip(pl.Callback):
    """Flips a bit of some tensors on one rank, at a place of a step."""

    def __init__(self, step: int, where: str, names: Sequence[str], rank: int = 1) -> None:
        self.step, self.where, self.names, self.rank = step, where, names, rank

    def _at(self, where: str, trainer: pl.Trainer, module: Any) -> None:
        if (where, trainer.global_step, trainer.global_rank) != (self.where, self.step, self.rank):
            return
        for name in self.names:
            name, _, scope = name.partition("/")
            tensor = attrgetter(name)(module)
            tensors = {"": tensor, "grad": tensor.grad, **trainer.optimizers[0].state.get(tensor, {})}
            if scope in tensors:  # or another rank has it
                local(tensors[scope]).data.view(torch.int32).flatten()[5] ^= 1 << 29

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self._at("between steps", trainer, module)

    def on_before_backward(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self._at("in a step", trainer, module)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self._at("before the update", trainer, module)

    on_before_backward.__module__ = on_before_optimizer_step.__module__ = "torch"
    """Memory asks nobody: hooks of the user that may change gradients are named as the cause."""


_DENSE = ("out.weight", "embed.weight/exp_avg")


def fit_with_flips(
    rank: int,
    world_size: int,
    step: int,
    where: str = "between steps",
    names: Sequence[str] = _DENSE,
    strategy: dict[str, Any] | None = None,
    kind: type[OwnModule] = OwnModule,
) -> tuple[str, dict[str, Any], list[str]]:
    warned = Warned()
    logging.getLogger("moe_lightning").addHandler(warned)
    options = {"check_state_every": 2, **(strategy or {})}
    callbacks = [Flip(step, where, names), FaultRecovery(min_replicas=1)]
    trainer = make_trainer(rank, world_size, options, callbacks=callbacks, max_steps=6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(kind(), DataLoader(RandomTokens(96), batch_size=12))
        except StateDamagedError as error:
            return str(error), {}, warned.lines
    lines = [*warned.lines, *(line for each in caught if "changes nothing" in (line := str(each.message)))]
    return "", state_digests(trainer.strategy), lines  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [2, slow(3)])
def test_memory_that_has_changed_is_overwritten_before_it_is_used(ranks: int) -> None:
    calm, repaired = run_pooled(ranks, fit_with_flips, -1), run_pooled(ranks, fit_with_flips, 4)
    assert [told for told, *_ in repaired] == [""] * ranks
    assert [state for _, state, _ in repaired] == [state for _, state, _ in calm], "caught before its first use"
    assert [len(lines) for *_, lines in repaired] == [2, *[0] * (ranks - 1)]
    assert "after step 4 embed.weight (exp_avg) on ranks [1] had changed in memory" in repaired[0][2][0]
    assert "after step 4 out.weight on ranks [1] had changed in memory" in repaired[0][2][1]


class Buffered(OwnModule):
    """Has a buffer that stays as it is, and one that each rank writes for itself from the second check on."""

    angles: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.ones(8), persistent=False)
        self.register_buffer("seen", torch.zeros(8))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx > 2:
            self.seen.data += 1 + self.global_rank
        return super().training_step(batch, batch_idx)


def test_buffers_of_users_are_compared_as_long_as_they_are_alike() -> None:
    results = run_pooled(2, fit_with_flips, 4, "between steps", ["angles"], None, Buffered)
    assert [told for told, *_ in results] == ["", ""]
    (line,) = results[0][2]
    assert line.startswith("after step 4 the buffer angles on ranks [1] had changed in memory")


class Saves(pl.Callback):
    """Saves as stock Lightning's ModelCheckpoint does."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint("saved.ckpt")


def save_damaged(rank: int, world_size: int) -> tuple[str, bool]:
    callbacks = [Flip(3, "between steps", ["out.weight"], rank=0), Saves()]
    trainer = make_trainer(rank, world_size, {"check_state_every": 100}, callbacks=callbacks, max_steps=4)
    try:
        trainer.fit(OwnModule(), DataLoader(RandomTokens(96), batch_size=12))
    except StateDamagedError as error:
        return str(error), Path("saved.ckpt").exists()
    return "", Path("saved.ckpt").exists()


def test_stock_checkpoints_hold_no_state_that_ranks_have_otherwise() -> None:
    for told, is_saved in run_pooled(2, save_damaged):
        assert told.startswith("after step 3 the replicas of out.weight differ between ranks [0] and ranks [1]")
        assert not is_saved


def test_dense_state_that_differs_from_a_majority_is_overwritten() -> None:
    told, _, lines = run_pooled(3, fit_with_flips, 3)[0]
    assert told == ""
    assert "after step 4 embed.weight on ranks [1] differed from its other replicas" in lines[0]


def test_an_expert_that_differs_from_a_majority_is_overwritten_whole() -> None:
    names = ("moe.experts.w_up", "moe.experts.w_up/exp_avg")
    results = run_pooled(3, fit_with_flips, 3, "between steps", names, {"replicas": 3})
    assert [told for told, *_ in results] == [""] * 3
    assert results[0][1] == results[1][1] == results[2][1], "weights and moments"
    (line,) = results[0][2]
    assert re.match(
        r"after step 4 expert \d of MoE layer 0 on ranks \[1\] differed .*overwritten with that of rank 0", line
    )


def test_of_two_dense_replicas_that_differed_before_the_last_update_nobody_knows_which_is_intact() -> None:
    for told, *_ in run_pooled(2, fit_with_flips, 3):
        assert told.startswith(
            "after step 4 the replicas of embed.weight differ between ranks [0] and ranks [1] (and of "
        )


@pytest.mark.parametrize(
    ("where", "names", "damaged"),
    [
        ("in a step", ["out.weight"], "out.weight"),
        ("before the update", ["moe.router.weight/exp_avg_sq"], "moe.router.weight (exp_avg_sq)"),
        ("before the update", ["out.weight/grad"], "the gradient of out.weight"),
        ("before the update", ["moe.experts.w_up/grad"], "the gradient of expert"),
    ],
)
def test_damage_during_a_step_leaves_its_update_out(where: str, names: list[str], damaged: str) -> None:
    results = run_pooled(2, fit_with_flips, 4, where, names, {"replicas": 2})
    assert [told for told, *_ in results] == [""] * 2
    assert results[0][1]["dense"] == results[1][1]["dense"]
    (line,) = [line for line in results[0][2] if "changes nothing" in line]
    assert line.startswith(damaged)
    assert line.endswith("ranks [1] in the step after step 4; this step changes nothing")


@pytest.mark.parametrize(
    ("ranks", "strategy", "names", "damaged"),
    [
        (2, {"replicas": 1}, ["moe.experts.w_up"], "expert"),
        (2, {"dense": "zero1"}, ["out.weight/exp_avg", "embed.weight/exp_avg"], "weight (exp_avg)"),
        (2, {"dense": "fsdp"}, ["out.weight"], "out.weight at [32, 0]"),
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["between steps", "before the update"])
def test_memory_of_one_rank_alone_ends_the_run_before_it_is_used(
    ranks: int, strategy: dict[str, Any], names: list[str], damaged: str, where: str
) -> None:
    for told, *_ in run_pooled(ranks, fit_with_flips, 4, where, names, strategy):
        assert told.startswith("after step 4 ")
        assert f"{damaged}" in told
        assert "has changed in the memory of rank 1 without being written" in told


@pytest.mark.parametrize(
    ("groups", "healthy"),
    [
        (((0,), (1,)), ()),
        (((0, 2), (1,)), (0, 2)),
        (((0,), (1, 2)), (1, 2)),
        (((0,), (1,), (2,)), ()),
        (((0, 1), (2, 3)), ()),
        (((0,), (1, 3), (2,)), (1, 3)),
    ],
)
def test_the_majority_of_replicas(groups: tuple[tuple[int, ...], ...], healthy: tuple[int, ...]) -> None:
    assert Damage(name="w", groups=groups).healthy == healthy
