"""Shadow experts for a step: every token is computed once, and the training does not change (L1 to L3)."""

from __future__ import annotations

import gc
import weakref
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch.utils.data import DataLoader

from benchmarks.padded_dispatch import PADDED
from moe_lightning.callbacks.load_balancer import movement_metrics
from moe_lightning.dispatch import shadow_exchange
from moe_lightning.dispatch.dispatcher import Dispatcher
from moe_lightning.dispatch.placement import Placement, uniform_placement
from moe_lightning.dispatch.quota import ShadowPlan, shadow_quota
from moe_lightning.dispatch.shadow_exchange import StepShadowTransfers
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.context import World
from tests.distributed.balanced_training import Moving, random_placement, random_shadows, train
from tests.distributed.harness import RankFailure, connect, run_pooled, run_ranks
from tests.distributed.same_training import CASES, TOLERANCE, assert_same_training, on_one_world, reference
from tests.distributed.training import OwnModule, RandomTokens, Recorder, make_trainer, set_up
from tests.parameters import slow


def dispatch_with_shadows(rank: int, world_size: int) -> int:
    """Dispatch, scale each row by its expert, combine: as if no token had travelled; and the quota is the plan's."""
    world = connect()
    shadow_copies = 0
    for seed in range(10):
        rng = np.random.default_rng((seed, world_size))
        placement = random_placement(rng, world_size, 5)
        plan = random_shadows(rng, placement)
        shadow_copies += plan.num_copies
        ids = [torch.from_numpy(rng.integers(-1, 6, (int(rng.integers(0, 9)), 2))) for _ in range(world_size)]
        slots = rng.permutation([*placement.experts_on(rank), -1]).tolist()
        backend = ("exchange", PADDED)[seed % 2]
        dispatcher = Dispatcher(placement, world, [tuple(range(world_size))], "balanced", slots, backend=backend)
        dispatcher.set_shadows(plan)
        counts_NE = torch.stack([torch.bincount(peer[peer >= 0], minlength=6) for peer in ids])
        x_TD = torch.randn(len(ids[rank]), 3)
        sent = dispatcher.dispatch(x_TD, ids[rank], counts_NE)
        quota = shadow_quota(counts_NE.numpy().T, placement, plan)
        shadow_experts = np.flatnonzero(plan.shadows[:, rank]).tolist()
        assert sent.tokens_per_slot_S.tolist() == [0 if e < 0 else quota[e, rank] for e in slots]
        if plan.num_copies:
            assert sent.tokens_per_shadow_H.tolist() == quota[shadow_experts, rank].tolist()
        else:
            assert sent.tokens_per_shadow_H is None
        experts = torch.tensor([*slots, *shadow_experts])
        sizes = quota[experts.clamp_min(0), rank] * (experts >= 0).numpy()
        assert len(sent.rows_MD) == sizes.sum()
        scale_M = (experts + 1.0).repeat_interleave(torch.from_numpy(sizes))
        out_TD = dispatcher.combine(sent.rows_MD * scale_M[:, None], sent, torch.ones(ids[rank].shape))
        expected_T = torch.where(ids[rank] >= 0, ids[rank] + 1.0, 0.0).sum(dim=1)
        torch.testing.assert_close(out_TD, x_TD * expected_T[:, None])
    return shadow_copies


@pytest.mark.parametrize("world_size", [slow(2), 4])
def test_tokens_reach_residents_and_shadows_as_planned(world_size: int) -> None:
    assert run_pooled(world_size, dispatch_with_shadows)[0] > 0


def padded_equals_plain(rank: int, world_size: int) -> tuple[int, int, int]:
    """Same rows, same gradients; more bytes."""
    world = connect()
    rng = np.random.default_rng(5)
    placement = uniform_placement(6, world_size)
    ids = [torch.from_numpy(rng.choice(6, (8, 2), p=[0.5, 0.3, 0.1, 0.1, 0.0, 0.0])) for _ in range(world_size)]
    counts_NE = torch.stack([torch.bincount(peer.flatten(), minlength=6) for peer in ids])
    plain = Dispatcher(placement, world, [tuple(range(world_size))])
    results = []
    for dispatcher in (plain, Dispatcher(placement, world, [tuple(range(world_size))], backend=PADDED)):
        x_TD = torch.arange(24.0).view(8, 3).requires_grad_()
        sent = dispatcher.dispatch(x_TD, ids[rank], counts_NE)
        rows_MD = sent.rows_MD
        out_TD = dispatcher.combine(rows_MD * rows_MD, sent, torch.ones(8, 2))
        (gradient,) = torch.autograd.grad(out_TD.sum(), x_TD)
        results.append((rows_MD, out_TD, gradient))
    for found, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(found, expected)
    return plain.last_sent_rows, dispatcher.last_sent_rows, int(counts_NE.max())


def test_the_padded_baseline_differs_in_what_travels_only() -> None:
    for world_size in (2, 3):
        for plain, padded, fullest in run_pooled(world_size, padded_equals_plain):
            assert padded > plain
            assert padded == fullest * 6 * (world_size - 1) // world_size


def visit_and_return(rank: int, world_size: int) -> dict[str, Any]:
    """Two layers, expert e of rank e; expert 0 has shadows everywhere, expert 1 on rank 0. Gradients are known."""
    world = connect()
    placement = Placement(replicas=np.eye(2, world_size, dtype=np.int64))
    shadows = np.zeros((2, world_size), dtype=np.bool_)
    shadows[0, 1:] = shadows[1, 0] = True
    shadows[1, 2:] = True
    plan = ShadowPlan(shadows=shadows, homes=np.array([0, 1]))
    slots = placement.experts_on(rank)
    step, layers = StepShadowTransfers(world, torch.bfloat16), []
    for layer in range(2):
        stacks = {
            "w": torch.nn.Parameter(torch.full((len(slots), 2, 3), 10.0 * layer + rank)),
            "b": torch.nn.Parameter(torch.full((len(slots), 5), 0.5 + layer + rank)),
        }
        layers.append((stacks, step.add_layer(stacks, slots, plan, early_share=0.3)))
    step.begin()
    shadow_experts = np.flatnonzero(shadows[:, rank]).tolist()
    for micro_batch in range(2):
        step.is_last_backward = micro_batch == 1
        for layer, (_, shadow_transfers) in enumerate(layers):
            shadow_transfers.start_next(early=True)
            weights = shadow_transfers.weights()
            for row, expert in enumerate(shadow_experts):
                assert torch.equal(weights["w"][row], torch.full((2, 3), 10.0 * layer + expert))
                assert torch.equal(weights["b"][row], torch.full((5,), 0.5 + layer + expert))
            assert weights["w"].shape == (len(shadow_experts), 2, 3)
            shadow_transfers.start_next()
            sum((weight * (rank + 1.0)).sum() for weight in weights.values()).backward()  # type: ignore[union-attr]
    step.finish()
    return {
        "gradients": [{name: p.grad for name, p in stacks.items()} for stacks, _ in layers],
        "sent_bytes": step.costs.sent_bytes,
        "waits": (step.costs.trans_waits.seconds, step.costs.agg_waits.seconds),
    }


@pytest.mark.parametrize("world_size", [slow(2), 3])
def test_weights_come_and_gradients_go_home(world_size: int) -> None:
    results = run_pooled(world_size, visit_and_return)
    visited = {0: range(1, world_size), 1: [rank for rank in range(world_size) if rank != 1]}
    for home, ranks in visited.items():
        expected = 2.0 * sum(rank + 1.0 for rank in ranks)  # two micro-batches
        for layer in results[home]["gradients"]:
            for gradient in layer.values():
                assert torch.equal(gradient, torch.full_like(gradient, expected))
    copies = sum(len(list(ranks)) for ranks in visited.values())
    numbers, layers = 2 * 3 + 5, 2
    assert sum(result["sent_bytes"] for result in results) == copies * layers * numbers * (2 + 4)
    assert all(wait >= 0 for result in results for wait in result["waits"])


def visit_with_adapters(rank: int, world_size: int) -> torch.Tensor | None:
    """Expert 0 of rank 0 on rank 1; what is trained has another dtype than what is frozen beside it."""
    plan = ShadowPlan(shadows=np.array([[False, True], [False, False]]), homes=np.array([0, 1]))
    step = StepShadowTransfers(connect(), torch.float32)
    base = torch.nn.Parameter(torch.ones(1, 3, dtype=torch.bfloat16), requires_grad=False)
    adapter = torch.nn.Parameter(torch.ones(1, 5))
    transfers = step.add_layer({"base": base, "adapter": adapter}, (rank,), plan)
    step.begin()
    step.is_last_backward = True
    (transfers.weights()["adapter"] * 3.0).sum().backward()
    step.finish()
    return adapter.grad


def test_gradients_go_home_in_their_dtype() -> None:
    home, _ = run_pooled(2, visit_with_adapters)
    assert torch.equal(home, torch.full((1, 5), 3.0))


def leave(rank: int, world_size: int) -> bool:
    """True if the memory of a shadow is free once its step is over, without the help of the garbage collector."""
    world = connect()
    plan = ShadowPlan(shadows=np.array([[False, True], [True, False]]), homes=np.array([0, 1]))
    step = StepShadowTransfers(world, torch.float32)
    shadow_transfers = step.add_layer({"w": torch.nn.Parameter(torch.ones(1, 8))}, (rank,), plan)
    step.begin()
    step.is_last_backward = True
    stack = shadow_transfers.weights()["w"]
    stack.sum().backward()
    gone = weakref.ref(stack)
    del stack
    step.finish()
    gc.disable()
    step.release()
    return gone() is None


def test_shadows_leave_no_memory_behind() -> None:
    assert run_ranks(2, leave) == [True, True]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        slow(2, [("plain", {}), ("swiglu", {"replicas": 1})]),
        (3, [("accumulate", {})]),
        slow(4, [("plain", {"dense": "zero1"}), ("top_1", {"quota": "equal"})]),
    ],
)
def test_shadow_experts_change_nothing(world_size: int, cases: list[tuple[str, dict[str, Any]]]) -> None:
    options = [{"strategy": strategy, "moving": {"shadows": True}, **CASES[key]} for key, strategy in cases]
    for (key, strategy), ranks in zip(cases, on_one_world(world_size, train, options), strict=True):
        assert ranks[0]["shadow_copies"] > 0
        assert_same_training(reference(key), ranks, f"{key}, {strategy}")


class Resting(OwnModule):
    """Its experts rest in every other step: they run in none, or their results are in no loss."""

    runs = False

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        h, rests = self.embed(batch[0]), bool(self.global_step % 2)
        if not rests:
            h = h + self.moe(h)
        elif self.runs:
            h = h + self.moe(h).detach()
        loss = torch.nn.functional.cross_entropy(self.out(h).flatten(0, 1), batch[1].flatten())
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.5)


class RunningInVain(Resting):
    runs = True


RESTING: dict[str, Any] = {"steps": 4, "strategy": {"find_unused_parameters": True, "slots": 6}}


@cache
def resting_alone(module: type[Resting]) -> dict[str, Any]:
    result: dict[str, Any] = run_pooled(1, partial(train, own_module=module, **RESTING))[0]
    return result


@pytest.mark.parametrize("module", [Resting, RunningInVain])
@pytest.mark.parametrize(
    "moving",
    [{"shadows": False}, {"shadows": True}, {"shadows": True, "move_at": (0, 2), "seed": 3}],
    ids=["none", "shadows", "shadows and replicas"],
)
def test_experts_that_rest_in_a_step_are_neither_moved_nor_decayed(
    module: type[Resting], moving: dict[str, Any]
) -> None:
    ranks = run_pooled(2, partial(train, own_module=module, moving=moving, **RESTING))
    assert (ranks[0]["shadow_copies"] > 0) == moving["shadows"]
    assert (ranks[0]["moved_states"] > 0) == ("move_at" in moving)
    assert_same_training(resting_alone(module), ranks)


class CheckpointedModule(OwnModule):
    """Computes its MoE layer again in the backward pass."""

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        h = self.embed(x)
        h = h + torch.utils.checkpoint.checkpoint(self.moe, h, use_reentrant=False)
        loss = torch.nn.functional.cross_entropy(self.out(h).flatten(0, 1), y.flatten())
        self.log("train/loss", loss, sync_dist=True)
        return loss


def train_checkpointed(rank: int, world_size: int, shadows: bool) -> tuple[list[float], int]:
    recorder, mover = Recorder(), Moving(shadows=shadows)
    trainer = make_trainer(rank, world_size, max_steps=4, callbacks=[recorder, mover])
    trainer.fit(CheckpointedModule(), DataLoader(RandomTokens(72), batch_size=12))
    return recorder.losses, mover.shadow_copies


def test_shadows_under_activation_checkpointing() -> None:
    expected, _ = run_pooled(1, train_checkpointed, False)[0]
    for losses, shadow_copies in run_pooled(2, train_checkpointed, True):
        assert shadow_copies > 0
        np.testing.assert_allclose(losses, expected, rtol=0, atol=TOLERANCE)


class CheckpointedTwice(OwnModule):
    """Its MoE layer lies in two reentrant checkpoints, each with a backward pass of its own."""

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        h = self.embed(batch[0])
        for _ in range(2):
            h = h + torch.utils.checkpoint.checkpoint(self.moe, h, use_reentrant=True)
        loss = torch.nn.functional.cross_entropy(self.out(h).flatten(0, 1), batch[1].flatten())
        self.log("train/loss", loss, sync_dist=True)
        return loss


def test_shadows_of_a_layer_in_two_reentrant_checkpoints() -> None:
    options = {"own_module": CheckpointedTwice, "steps": 4, "strategy": {"static_graph": True}}
    (alone,), ranks = (
        run_pooled(1, partial(train, **options)),
        run_pooled(2, partial(train, moving={"shadows": True}, **options)),
    )
    assert ranks[0]["shadow_copies"] > 0
    assert_same_training(alone, ranks)


class Device:
    """A GPU that works behind the host: events and transfers take its time."""

    now_ms = 0.0


class TimedEvent:
    def __init__(self, **_: object) -> None: ...

    def record(self, _stream: object) -> None:
        self.at_ms = Device.now_ms

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: TimedEvent) -> float:
        return end.at_ms - self.at_ms


class Transfer:
    """In the place of a `PendingExchange` of NCCL, whose `wait` returns at once: 7 ms of the stream's time."""

    def __init__(self, _flat: Any, _send: Any, recv: list[int], _world: World) -> None:
        self._arrived = torch.zeros(sum(recv))

    def wait(self) -> torch.Tensor:
        Device.now_ms += 7.0
        return self._arrived


def test_waits_of_a_gpu_for_shadows_are_what_they_cost_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", TimedEvent)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    monkeypatch.setattr(shadow_exchange, "PendingExchange", Transfer)
    plan = ShadowPlan(shadows=~np.eye(2, dtype=np.bool_), homes=np.array([0, 1]))
    world = World(rank=0, size=2, device=torch.device("cuda"))
    step = StepShadowTransfers(world, torch.float32)
    stack = torch.nn.Parameter(torch.ones(1, 8))
    layer = step.add_layer({"w": stack}, (0,), plan, early_share=0.5)
    step.begin()
    layer.weights()
    stack.grad = torch.zeros_like(stack)
    step.finish()
    found = {metric.name: metric.value for metric in movement_metrics([], step)}
    assert found["balance/exposed_trans_ms"] == pytest.approx(2 * 7.0), "two parts"
    assert found["balance/exposed_agg_ms"] == pytest.approx(7.0)


class Replaced(OwnModule):
    """Its experts have other weights while it validates in the middle of a step."""

    difference: float | None = None

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        h, transfers, plan = self.embed(batch[0]), self.moe.shadow_transfers, self.moe.dispatcher.shadows
        if transfers is None or plan is None:
            return  # between steps
        self.moe.experts.w_up.data.add_(1.0)
        shadowed = self.moe(h)
        self.moe.drop_shadows()
        self.difference = float((self.moe(h) - shadowed).abs().max())
        self.moe.start_shadows(plan, transfers)
        self.moe.experts.w_up.data.sub_(1.0)


def validate_in_a_step(rank: int, world_size: int) -> float | None:
    module, mover = Replaced(), Moving(shadows=True)
    options = {"max_steps": 1, "accumulate_grad_batches": 2, "val_check_interval": 1, "num_sanity_val_steps": 0}
    trainer = make_trainer(rank, world_size, callbacks=[mover], **options)
    loader = DataLoader(RandomTokens(48), batch_size=12)
    trainer.fit(module, loader, loader)
    return module.difference


def test_shadows_take_no_part_in_evaluation() -> None:
    assert run_pooled(2, validate_in_a_step) == [0.0, 0.0]


class Masked(OwnModule):
    """Keeps the first matrices of all experts as they are."""

    def on_fit_start(self) -> None:
        self.moe.experts.w_up.register_hook(torch.zeros_like)


def test_hooks_that_gradients_of_shadows_would_pass_by_are_refused() -> None:
    with pytest.raises(RankFailure, match=r"experts\.w_up has a hook .*: set the balancer's shadows to none, or"):
        run_pooled(2, partial(train, own_module=Masked, steps=2, moving={"shadows": True}))


def refusals(rank: int, world_size: int) -> list[str]:
    messages = []
    here = Placement(replicas=np.ones((6, world_size), dtype=np.int64))
    for strategy in ({"ep_size": 1}, {}):
        trainer = set_up(rank, world_size, strategy, OwnModule())
        plan = ShadowPlan(shadows=np.zeros(here.replicas.shape, dtype=np.bool_), homes=np.zeros(6, dtype=np.int64))
        plan.shadows[0, 1] = True
        with pytest.raises(ConfigurationError) as caught:
            trainer.strategy.start_shadow_experts([plan])  # type: ignore[attr-defined]
        messages.append(str(caught.value))
    return messages


def test_shadows_that_cannot_be() -> None:
    groups, foreign = run_ranks(2, refusals)[0]
    assert "plan again after a new placement" in groups or "shadows need one dispatch group" in groups
    assert "plan again after a new placement" in foreign
