"""Elastic worlds of one rank: join, commit steps together, recover.

A step is committed in two phases: after all its collectives every rank agrees that it is prepared, and only then
applies its update. So survivors of a fault differ by at most one update, and those that were prepared can apply it
later. A recovery does not leave `trainer.fit`: the fit loop runs again with the progress of the last committed step,
in the same process, with the same module, optimizers, loggers and callbacks, as Lightning does on a resume. A retry
inside the strategy could not restore the micro-batches before a failed one, and `trainer.fit` would run the user's
setup hooks once more. Sources: Lazarus 4.3 and REFT 4; here live state replaces the checkpoint.

Process groups are built so that a lost member is detected soon and the next attempt works: gloo waits for another
rank's first connection for five times the group's timeout. So groups are built with a short timeout, after all
members have met in the store (a wait that can be aborted), and get the timeout of their collectives afterwards.

Exceptions of lost peers are recognized by their type and place. Messages count only where torch or this package has
written them: a service that a user's code asks may refuse connections, too.
"""

from __future__ import annotations

import gc
import logging
import opcode
import re
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroup,
    Store,
)
from torch.nn import parallel
from torch.optim import Optimizer

from moe_lightning import dispatch
from moe_lightning import kernels as ops
from moe_lightning import parallel as own_parallel
from moe_lightning.balancing.repair import Repair, repair_placements
from moe_lightning.checkpoint.memory import DamagedSnapshots
from moe_lightning.checkpoint.recovery_plan import RankInventory, RecoveryPlan, without_snapshots
from moe_lightning.compat import private_lightning, private_torch
from moe_lightning.data.loader import leave_schedule
from moe_lightning.dispatch.dispatcher import Dispatcher
from moe_lightning.dispatch.transports import AllToAllSpec, ExchangeBackend
from moe_lightning.elastic.membership import Members, Membership
from moe_lightning.elastic.rendezvous_client import WorldTooSmall
from moe_lightning.elastic.worker import KILLED, PeerFailed, Preempted, RunFinished, signature_of, take_over_terminal
from moe_lightning.errors import ConfigurationError, WorldCutError
from moe_lightning.moe.layer import MoELayer
from moe_lightning.moe.losses import load_balancing_loss, router_z_loss
from moe_lightning.moe.randomness import StreamDropout
from moe_lightning.moe.router import Router, drop_overflow
from moe_lightning.parallel.abort import GroupAborter, reject_unknown_connections
from moe_lightning.parallel.collectives import all_gather_json, check_versions
from moe_lightning.parallel.context import World, agree, any_says, first_group_options, is_silent, prepare_environment
from moe_lightning.parallel.mesh import Layout
from moe_lightning.strategies.recovery import (
    FitProgress,
    RecoveryListener,
    RecoveryPlanner,
    RecoveryReport,
    Stopwatch,
    enter_experts,
    fetch_missing,
    fetch_rows,
    finish_step,
    inventory_of,
    newcomers_of,
    repaired,
    restore_missing,
    set_up_data,
    share_state,
    transfer_progress,
)
from moe_lightning.strategies.train_state import TrainState
from moe_lightning.strategies.worlds import WorldListener, Worlds

_GLOO_PATIENCE = 5


def begin_building(store: Store, size: int, timeout_s: float) -> timedelta:
    """Wait until every member of a world has come to build its groups; the timeout to build them with.

    With it building ends within `timeout_s`, whoever is lost meanwhile. Give each group the timeout of its collectives
    with `set_collectives_timeout` afterwards.

    Args:
        store: under a prefix that is this world's alone.
        size: number of members, each of which calls this once.

    Raises:
        TimeoutError: not all came in time.
        RuntimeError: the store was cut.
    """
    assert not dist.is_initialized(), "destroy the former groups first"
    private_torch.reset_group_names()
    meet(store, "build their groups", size, timeout_s)
    return timedelta(seconds=timeout_s / _GLOO_PATIENCE)


def meet(store: Store, purpose: str, size: int, timeout_s: float) -> None:
    """Wait until so many ranks have come here.

    Args:
        store: a world's.
        purpose: what they come for, as words after "came to"; once in a world.

    Raises:
        TimeoutError: not all came in time.
        RuntimeError: the store was cut.
    """
    met, everybody = f"{purpose}: met", f"{purpose}: all"
    if store.add(met, 1) == size:
        store.set(everybody, "")
    try:
        store.wait([everybody], timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        came = store.add(met, 0)
        raise TimeoutError(f"only {came} of {size} ranks came to {purpose} within {timeout_s:g} s") from None


def set_collectives_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Give a group that has been built the timeout of its collectives."""
    private_torch.set_group_timeout(group, timeout)


def build_world(
    name: str,
    *,
    store: Store,
    rank: int,
    size: int,
    backend: str,
    timeout: timedelta,
    build_timeout_s: float,
    device: torch.device,
    layout: Layout | None = None,
    generation: int = 0,
    guard: Callable[[Callable[[], None]], None],
) -> World:
    """Make torch's default group and ours for one membership, so that they can be cut from any thread.

    Args:
        name: unique for ever; the prefix of what the groups keep in the store.
        store: outlives its members.
        timeout: of every collective.
        build_timeout_s: of building; a member may die meanwhile.
        layout: as of `World.connect`.
        generation: number of the membership.
        guard: told how to cut the connections, before any is made.

    Raises:
        WorldCutError: the world broke meanwhile.
        ConfigurationError: this rank has other versions than rank 0, and would plan otherwise.
    """
    aborter = GroupAborter()
    guard(aborter.abort)
    if size == 1:
        return World.single(device, generation=generation)
    prefixed = PrefixStore(name, store)
    prefixed.set_timeout(timedelta(seconds=build_timeout_s))
    with aborter:
        short = begin_building(prefixed, size, build_timeout_s)
        prepare_environment(is_elastic=True)
        own = first_group_options(device)
        dist.init_process_group(backend, store=prefixed, rank=rank, world_size=size, timeout=short, **own)
        world = World.connect(device, short, layout, is_cut=lambda: aborter.is_cut, generation=generation)
    aborter.tune()
    for group in world.all_groups:
        set_collectives_timeout(group, timeout)
    aborter.add_groups([group for group in world.all_groups if is_silent(group, device)], device)
    aborter.confirm(lambda value: all_gather_json(value, world))
    reject_unknown_connections(aborter.connections)
    check_versions(world, recovers=True)
    return world


ROWS_PER_SLOT = (16, 128)
"""Few and many: kernels have tiles of their own for each, see `kernels.triton.tiles`."""

logger = logging.getLogger(__name__)


def warm_up(module: nn.Module, layers: Iterable[MoELayer], device: torch.device) -> None:
    """Compute layers on numbers of no meaning, forward and backward, without a word to other ranks; nothing of the
    module changes, and no random number is drawn. Does nothing on a CPU.

    Autocast is that of the caller. A layer's slots, and the ranks that its dispatcher knows, are those of its steps.

    Args:
        module: has the layers, and dropout that follows samples, perhaps.
        layers: as they are placed.
        device: of the steps.
    """
    if device.type == "cpu":
        return
    began = time.perf_counter()
    dropout = next((part.p for part in module.modules() if isinstance(part, StreamDropout) and part.p), 0.0)
    for layer in {_kind(layer): layer for layer in layers}.values():
        dtypes = {layer.experts.dtype}
        if torch.is_autocast_enabled(device.type):
            dtypes.add(torch.get_autocast_dtype(device.type))
        for dtype in sorted(dtypes, key=str):
            for rows in ROWS_PER_SLOT:
                _compute(layer, rows, dtype, device, dropout)
        if (layer.dispatcher.placement.replicas.sum(axis=1) > 1).any():
            for length in (1024, 1023):  # sizes of gradients that memory takes in wide words, and others
                gradients = torch.zeros(2, length, dtype=layer.experts.dtype, device=device)
                ops.sum_in_rank_order(gradients, out=gradients[0].clone())
    logger.info("kernels were launched for the first time in %.1f s", time.perf_counter() - began)


def _kind(layer: MoELayer) -> Hashable:
    """Alike for layers that launch the same kernels."""
    sizes = tuple((name, p.shape, p.dtype) for name, p in layer.experts.stacked_parameters().items())
    return sizes, layer.experts.activation, layer.num_experts, repr(layer.router.config), layer.dispatcher.world.size


def _compute(layer: MoELayer, rows: int, dtype: torch.dtype, device: torch.device, dropout: float) -> None:
    experts, config, dispatcher = layer.experts, layer.router.config, layer.dispatcher
    num_tokens = -(-rows * max(1, experts.num_slots) // (16 * config.top_k)) * 16
    generator = torch.Generator().manual_seed(0)
    scores_TE = torch.rand(num_tokens, layer.num_experts, generator=generator).to(device)
    given_TD = torch.randn(num_tokens, experts.width, generator=generator).to(device, dtype).requires_grad_()
    router, x_TD = layer.router, given_TD
    if isinstance(router, Router) and router.is_plain:
        with torch.autocast(device.type, enabled=False):
            logits_TE, scores_TE, weights_TK, ids_TK, alike_TD = router.routed(given_TD)
        x_TD = given_TD if alike_TD is None else alike_TD
    else:
        ids_TK = router.choose(scores_TE) if isinstance(router, Router) else ops.top_k_experts(scores_TE, config.top_k)
        logits_TE, weights_TK = scores_TE.requires_grad_(), scores_TE.gather(-1, ids_TK)
    if config.capacity_factor is not None:
        limit = config.capacity(ids_TK.numel(), layer.num_experts)
        ids_TK = drop_overflow(ids_TK, weights_TK, limit, layer.num_experts, config.drop_policy)
    counts_E = ops.count_by_expert(ids_TK, layer.num_experts)
    if dispatcher.world.size > 1:
        planner = Dispatcher(
            dispatcher.placement, dispatcher.world, dispatcher.groups, "balanced", experts.slot_experts
        )
        plan, alone = planner.plan(counts_E.cpu().expand(dispatcher.world.size, -1)), _Alone(dispatcher.world)
        rows_MD, tokens_S, route = alone.dispatch(x_TD, ids_TK, plan, None)
        y_TD = alone.combine(experts(rows_MD, tokens_S), route, weights_TK)
    elif experts.takes_tokens(x_TD):
        y_TD = experts.of_tokens(x_TD, dispatcher.sorted_by_slot(ids_TK), weights_TK, None)
    else:
        sent = dispatcher.dispatch(x_TD, ids_TK, counts_E.unsqueeze(0))
        y_TD = dispatcher.combine(experts(sent.rows_MD, sent.tokens_per_slot_S), sent, weights_TK)
    if dropout:  # keys fill 64 bits
        y_TD = ops.keyed_dropout(y_TD, dropout, ops.Draw(key=1 << 62, first=0, here=1, parts=1, part=0))
    result = y_TD.sum()
    if config.aux_loss_coef:
        result = result + load_balancing_loss(scores_TE, counts_E)
    if config.z_loss_coef:
        result = result + router_z_loss(logits_TE)
    leaves = [given_TD, *(p for p in layer.parameters() if p.requires_grad)]
    torch.autograd.grad(result, leaves, allow_unused=True)


class _Alone(ExchangeBackend):
    """Exchange without peers: as many rows arrive as others would send, but they are this rank's own, and zeros."""

    def exchange(self, rows_MD: Tensor, spec: AllToAllSpec) -> Tensor:
        return F.pad(rows_MD, (0, 0, 0, sum(spec.recv_splits) - len(rows_MD)))


_LOOK_S = 0.1


class WorldChanged(Exception):
    """The ranks agreed, between two steps, to form another world: somebody wants in, or leaves."""


def hand_over(
    state: TrainState,
    world: World,
    engine: Membership,
    notice: str | None,
    nodes: Sequence[str],
    min_replicas: int,
    timeout: timedelta,
    spares: int,
    reason: str,
) -> bool:
    """Transfer the state that only leaving ranks hold to the others, before they leave on notice or because the mesh
    has no place for them. No rank returns, and so aborts the world, while another one still needs it for the transfer.

    Args:
        notice: why this rank leaves, as a sentence; None: it stays.
        nodes: of all ranks.
        min_replicas: nodes that shall hold each expert.
        timeout: longest wait for a peer.
        spares: ranks, the last ones, that leave until there are enough for a multiple.
        reason: why the world changes; who has met all others breaks it up with this.

    Returns:
        True if this rank is spare.

    Raises:
        Preempted: on the ranks that leave on notice.
    """
    notices = all_gather_json(notice, world)
    staying = [rank for rank, notice in enumerate(notices[: world.size - spares]) if notice is None]
    if 0 < len(staying) < world.size and world.is_connected and state.stages is not None:
        state.hand_over(staying, world)
        state.stage_transfer.hand_over(staying, world, nodes, min_replicas=min_replicas)
    elif 0 < len(staying) < world.size and world.is_connected:
        held = np.stack([p.replicas > 0 for p in state.experts.placements])
        repair = repair_placements(
            held[..., staying],
            nodes=[nodes[rank] for rank in staying],
            min_replicas=min_replicas,
            max_slots=state.max_slots,
        )
        state.experts.hand_over(staying, repair.placements, state.optimizers, nodes)
        state.hand_over(staying, world)
    try:
        meet(engine.store, "hand over", world.size, timeout.total_seconds())
    except (dist.DistError, TimeoutError):
        if engine.reason != reason:
            raise
    left = [f"left/{rank}" for rank, notice in enumerate(notices) if notice is not None]
    if notice is not None:
        with suppress(dist.DistError):  # the world breaks now for another reason, and this rank is done
            engine.store.set(f"left/{world.rank}", "")
        raise Preempted(notice)
    if left:
        engine.store.wait(left, timeout)
    return world.rank >= world.size - spares


def starts_anew(engine: Membership, world: World, timeout: timedelta, can_restore: bool) -> bool:
    """True if a first world follows one without survivors, whose state can be restored; collective.

    All ranks then abort this world, once all have met: gloo may never wake a rank that waits on connections
    which others have closed.
    """
    is_later = can_restore and max(all_gather_json(engine.task.starts, world)) > 1
    if is_later and world.is_connected:
        meet(engine.store, "go back to what was saved", world.size, timeout.total_seconds())
    return is_later


def drop_groups() -> None:
    """Release the groups of a world that has ended, and the objects tied to them."""
    if dist.is_initialized():
        dist.destroy_process_group()
    # What a failed backward pass left in autograd's queue of this thread goes with the next pass; until then it keeps
    # the gradient accumulators of parameters alive, which remember the old number of slots.
    torch.zeros((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    gc.collect()  # graphs of the failed step, their threads and connections


def wait_for_ranks(world: World, engine: Membership, limit: int) -> WorldTooSmall:
    """In a world that holds the state but is too small to train, wait until others come.

    Args:
        limit: ranks that train: `min_ranks`, or those that the mesh needs.

    Returns:
        After `join_timeout_s` without others, on all ranks: what to raise when the state is saved.

    Raises:
        WorldChanged: somebody came, or shall leave.
    """
    size, timeout_s = world.size, engine.settings.join_timeout_s
    name = "min_ranks" if limit == engine.settings.min_ranks else "strategy.mesh"
    rank_zero_warn(f"only {size} of at least {limit} ranks ({name}) are here: waiting up to {timeout_s:g} s")
    deadline = time.monotonic() + timeout_s
    while True:
        is_over = time.monotonic() > deadline
        changes, ends = any_says([engine.has_newcomers() or engine.notice is not None, is_over], world)
        if changes:
            raise WorldChanged(f"ranks come or leave while there are fewer than {limit}")
        if ends:
            return WorldTooSmall(
                f"only {size} of at least {limit} ranks ({name}) came together within {timeout_s:g} s: the run ends "
                f"here; start it again with more workers, or lower {name}"
            )
        time.sleep(_LOOK_S)


_COLLECTIVES = tuple(f"{Path(str(package.__file__)).parent}/" for package in (dist, parallel, own_parallel, dispatch))
"""The folders whose code talks to other ranks."""

_NETWORK_FAULT = re.compile(
    r"gloo|NCCL|TCPStore|process group|is not registered|connection (closed|reset|refused|aborted)|broken pipe|"
    r"socket (timeout|error)|timed out (waiting|after)|wait timeout",
    re.I,
)
_NATIVE_FAULT = re.compile(r"gloo|NCCL|TCPStore|process ?group", re.I)
"""In the words of compiled code that any frame may have called: a backward pass, or a `wait` in a user's code."""

_LOST_DEVICE = re.compile(
    r"CUDA error: .*(illegal memory access|illegal instruction|device-side assert|misaligned address|launch failure|"
    r"hardware stack error|invalid program counter|uncorrectable ECC|unspecified)",
    re.I,
)
"""Errors after which every call of the process to its GPU fails: what an aborted exchange left was used as an index."""


def is_worlds_fault(error: BaseException, known_reason: str | None) -> bool:
    """True if an exception was caused by a lost peer or an agreed change, not by an error of this process.

    Args:
        known_reason: why the world ended, where the monitor has heard of it.

    Raises:
        PeerFailed: the device context of this process is of no use any more, so a fresh process must take its place.
    """
    if _LOST_DEVICE.search(str(error)):
        raise PeerFailed(f"a rank lost its device ({str(error).splitlines()[0]}), so a process starts over", "death")
    if isinstance(error, WorldChanged):
        return True
    if isinstance(error, ConfigurationError | PeerFailed | Preempted | RunFinished):
        return False
    if known_reason is not None:
        return True
    return is_network_fault(error)


def is_network_fault(error: BaseException | None) -> bool:
    """True if a collective, or what surrounds it, raised an exception because of its connections."""
    return any(_raised_in_collective(cause) for cause in _causes(error))


def reason_of(fault: BaseException | None, known_reason: str | None) -> str:
    """The words for the console: what is known, before what an exception says."""
    if isinstance(fault, WorldChanged):
        return str(fault)
    if known_reason is not None:
        return known_reason
    if is_network_fault(fault):
        return "the connection to another rank broke"
    return f"{type(fault).__name__}: {fault}"


def _raised_in_collective(error: BaseException) -> bool:
    if isinstance(error, dist.DistError | WorldCutError):
        return True
    place = _innermost(error.__traceback__)
    if place is None or not isinstance(error, RuntimeError | ValueError | ConnectionError | TimeoutError):
        return False
    code = place.tb_frame.f_code
    if code.co_filename.startswith(_COLLECTIVES):
        return isinstance(error, ConnectionError | TimeoutError) or bool(_NETWORK_FAULT.search(str(error)))
    # Compiled code has no frame of its own: what raised is then the instruction that called it.
    is_native = opcode.opname[code.co_code[place.tb_lasti]] != "RAISE_VARARGS"
    return is_native and isinstance(error, RuntimeError) and bool(_NATIVE_FAULT.search(str(error)))


def _innermost(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and what it came of: a pipeline wraps what a stage raises."""
    found, seen = [error], set()
    while found:
        error = found.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            found += [error.__context__, error.__cause__]
            yield error


def explained(error: Exception, engine: Membership) -> Exception:
    """Return the exception to raise instead of one that leaves the Trainer: a lost connection is another rank's end,
    whose cause a launcher or the rendezvous host reports some moments later.
    """
    if not is_worlds_fault(error, None) or isinstance(error, WorldChanged):
        return error
    cause = engine.wait_for_cause()
    if cause is None:
        return error
    if KILLED in cause and not engine.is_finished():
        return PeerFailed(f"{cause} before it trained, so all ranks start again", "death")
    return PeerFailed(
        f"{cause}, outside the training loop, where the others cannot continue without it: fix that, then give "
        "the same "
        "command again"
    )


def scrub(error: BaseException | None) -> None:
    """Release the frames of an exception: they refer to groups whose connections would stay open."""
    for cause in list(_causes(error)):
        cause.__traceback__ = cause.__context__ = cause.__cause__ = None


_ATTEMPTS = 3


def first_world(engine: Membership, build: Callable[[Members], World]) -> tuple[Members, World] | None:
    """Joined at once with all others; None where a run is under way.

    Where nobody was lost, its groups are built again: a machine with more to do than it has cores may not have
    connected all ranks within `build_timeout_s`.

    Args:
        build: the groups of a membership.
    """
    if engine.world_exists():
        return None
    attempts = 0
    while True:
        attempts += 1
        members = engine.join()
        if engine.withdraw_if_early(members):
            return None
        try:
            return members, build(members)
        except Exception as error:
            if attempts == _ATTEMPTS or not is_worlds_fault(error, engine.reason):
                raise
            engine.abort(reason_of(error, engine.reason))
            drop_groups()
            if engine.wait_for_cause() is not None:
                raise
            scrub(error)


_MOST_REPEATS = 3  # of one fault in one step, without a lost rank


class ElasticWorlds:
    """Worlds of this rank: joining them, and the transfer of its state between them.

    Args:
        worlds: learns the present one.
        state: what crosses.
        wrapped: left before the state crosses and entered after it: the module with what surrounds it.
        take_place: tell Lightning of this rank's place in a world.
        engine: membership, monitor and sockets.
        device, backend, timeout: of the groups.

    Attributes:
        members: of the world that this process joined last; None before the first.
        min_replicas: nodes that shall hold each expert.
        max_recoveries: recoveries after which the run gives up.
        version: committed optimizer steps of the live state.
        is_newcomer: this process holds nothing of the run yet.
        change_is_due: the ranks agreed to form another world before the next step.
        parting: why this rank shall leave after the present step; None: only if it is given notice.
        planner: chooses what to go on from.
        has_rolled_back: the last change of the world went back to a saved state.
        listeners, report: have a part in recoveries; of the last one, None before the first.
    """

    def __init__(
        self,
        worlds: Worlds,
        state: TrainState,
        wrapped: WorldListener,
        take_place: Callable[[World], None],
        engine: Membership,
        device: torch.device,
        backend: str,
        timeout: timedelta,
    ) -> None:
        self._worlds, self._state, self._wrapped, self._take_place = worlds, state, wrapped, take_place
        self._device, self._backend, self._timeout = device, backend, timeout
        self.engine = engine
        worlds.allow_changes()
        engine.multiple = worlds.axes.num_ranks
        self.members: Members | None = None
        self.min_replicas, self.max_recoveries = 1, 1000
        self.version = self._recoveries = 0
        self.is_newcomer = self.change_is_due = False
        self.parting: str | None = None
        self.listeners: list[RecoveryListener] = []
        self.planner = RecoveryPlanner(self.listeners)
        self.has_rolled_back = self._has_newcomers = False
        self.report: RecoveryReport | None = None
        self._pending: Optimizer | None = None
        self._progress: FitProgress | None = None
        self._batch_end: tuple[int, private_lightning.BatchEnd] | None = None  # by the step that it belongs to
        self._ended: tuple[int, private_lightning.BatchEnd] | None = None  # here, perhaps not yet on rank 0
        self._has_lost_rank_zero = False
        self._is_torn = self._is_spare = False
        self._cause: str | None = None
        self._made_steps = False
        self._last_fault, self._repeats = "", 0
        gc.collect()
        gc.freeze()  # the libraries' objects; a collection in the middle of a recovery need not look at them

    # ------------------------------------------------------------------ joining

    def enter(self, ranks_per_node: int) -> World:
        """Return the first world of this process: joined at once with all others, or, where a run is under way, a place
        to set up in until the fit loop joins it.
        """
        first = first_world(self.engine, self._build)
        if first is not None:
            self.members, world = first
            return world
        self.is_newcomer = True
        task = self.engine.task
        place = min(task.slot, task.expected - 1), task.expected
        nodes = [rank // ranks_per_node for rank in range(task.expected)]
        return World.offline(*place, self._device, self._worlds.layout(nodes))

    def _join(self, watch: Stopwatch) -> World:
        with watch.phase("rendezvous"):
            members = self.engine.join(is_ready=True, is_spare=self._is_spare)
        if self.is_newcomer and self.engine.is_finished():
            raise RunFinished("the others finished the run before this process joined it")
        self._cause = self.engine.reason or self._cause  # by now a launcher may have said how a rank ended
        with watch.phase("groups"):
            return self._build(members)

    def _build(self, members: Members) -> World:
        world = build_world(
            members.name,
            store=self.engine.store,
            rank=members.rank,
            size=members.size,
            backend=self._backend,
            timeout=self._timeout,
            build_timeout_s=self.engine.settings.build_timeout_s,
            device=self._device,
            layout=self._worlds.layout(members.nodes),
            generation=members.number,
            guard=lambda cut: self.engine.guard(members, cut),
        )
        self.members = members
        if world.rank == 0:
            take_over_terminal()
        return world

    def close(self) -> None:
        """Leave for good, when training is over."""
        gc.unfreeze()
        self.engine.close()

    def _require_members(self) -> Members:
        assert self.members is not None, "join first"
        return self.members

    # ------------------------------------------------------------------ steps

    def prepare(self, optimizer: Optimizer) -> None:
        """Every collective of the step is done: wait until all say so, and agree whether the world changes now."""
        self._pending = optimizer
        self.engine.record_progress()
        is_asked = self.engine.has_newcomers() or (self.engine.notice or self.parting) is not None
        (is_wished,) = any_says([is_asked], self._worlds.present)
        self.change_is_due = is_wished and self._state.window_replay is None  # state that crosses is whole

    def begin_update(self) -> None:
        """Values change from here on."""
        self._is_torn = True

    def commit(self) -> None:
        """The update is applied, and spread where one rank computes it for others."""
        self._is_torn = False
        self._pending = None
        self.version += 1
        self._made_steps = True
        self.engine.record_progress()

    def keep_progress(self, *, after_step: bool) -> None:
        """Remember how far the fit loop is, after a committed step or at the start."""
        trainer = self._state.trainer
        if after_step or self._progress is None:  # what was restored stays the place to go back to
            self._progress = FitProgress.of(trainer, after_step=after_step)
        self.version = trainer.global_step

    def batch_ended(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The batch of a committed step ends here; rank 0, which logs it, may be lost before."""
        num_parts = private_lightning.BatchEnd.num_parts(self._state.trainer)
        self._ended = self.version, private_lightning.BatchEnd((outputs, batch, batch_idx), done=num_parts)

    def met_after_batch(self) -> None:
        """All ranks have ended the last batch: they have met in a collective since."""
        self._ended = None

    def validated(self) -> None:
        """The validation after the last step ended."""
        if self._progress is not None:
            self._progress = replace(self._progress, validation_is_due=False)

    def epoch_ended(self) -> None:
        """Another epoch begins."""
        if self._progress is not None:
            self._progress = self._progress.after_epoch(self._state.trainer)

    # ------------------------------------------------------------------ recovering

    def run(self, fit: Callable[[], None]) -> None:
        """Run the fit loop to its end, through as many worlds as it takes.

        Raises:
            Preempted: this process shall leave.
            RunFinished: this process comes too late.
            WorldTooSmall: fewer than `min_ranks` are left, and no others came; the state is saved.
        """
        self._state.remember_forward()
        fault: BaseException | None = None
        self.engine.listen()  # a SIGTERM would end Lightning's loop on every rank
        trainer = self._state.trainer
        set_up_data(trainer)
        with trainer.precision_plugin.forward_context():  # once others know of this rank, they wait for it
            warm_up(self._state.module, self._state.experts.layers, self._device)
        is_first, self._progress = not self.is_newcomer, None
        self.version, loop = trainer.global_step, trainer.fit_loop
        while True:
            must_recover = fault is not None or self.is_newcomer
            if must_recover:
                self._recover(fault)
            try:
                if self._worlds.spares:
                    raise WorldChanged(f"ranks wait until they are a multiple of {self._worlds.axes.num_ranks}")
                if must_recover:
                    self._end_batch()
                    finish_step(trainer, self._progress, with_newcomers=self._has_newcomers)
                if must_recover and loop.done:  # after the last step: only what ends a run is left to do
                    loop.on_run_start()
                    loop.on_run_end()
                    return self.engine.finish()
                if is_first:
                    is_first, self.is_newcomer = False, self._follows_a_lost_world()
                    if self.is_newcomer:
                        continue
                self._wait_for_ranks()
                leave_schedule(trainer)
                fit()
                return self.engine.finish()
            except Exception as error:
                if not is_worlds_fault(error, self.engine.reason):
                    error.add_note(self._place())
                    raise
                fault = error
                self._remember_batch_end(error)
                if is_first:  # nobody knows yet whether there is anything to go on from: the next world will
                    is_first, self.is_newcomer = False, self.version == 0

    def _remember_batch_end(self, fault: BaseException) -> None:
        """Keep what a fault has left to do of the last step, if that is committed. Where nothing is left here, rank 0
        may not have logged it.
        """
        trainer, is_prepared = self._state.trainer, self._pending is not None
        left = private_lightning.BatchEnd.left_by(fault, trainer, is_prepared=is_prepared)
        if left is not None:
            self._batch_end = trainer.global_step + is_prepared, left
        elif self._ended is not None:
            self._batch_end = self._ended
        self._ended = None

    def _end_batch(self) -> None:
        """Run the hooks of the committed step that a fault kept from running, each once; collective.

        A hook that failed is run again, unless it has ended on another rank: then its exchange took place. Where rank 0
        is lost and nobody has met it since, its successor logs the step.
        """
        trainer, step, left = self._state.trainer, -1, None
        if self._batch_end is not None and not self.has_rolled_back:
            step, left = self._batch_end
        left = left if step == self.version else None
        num_parts = private_lightning.BatchEnd.num_parts(trainer)
        done, has_met = num_parts if left is None else left.done, left is None and self._made_steps
        reports = all_gather_json([done, has_met], self._worlds.present)
        everyones = [done for done, _ in reports]
        succeeds = self._has_lost_rank_zero and self._worlds.present.rank == 0 and not any(met for _, met in reports)
        if min(everyones) < num_parts and self._has_newcomers:
            rank_zero_warn(
                f"on_train_batch_end of step {self.version} does not run in every callback: a fault came before it, "
                "and a process that has not made the step has joined"
            )
            if succeeds and left is not None:
                left.done = num_parts - 1  # its row needs no exchange
                left.run(trainer)
        elif left is not None:
            left.done += left.has_failed and max(everyones) > left.done
            kept = self._progress
            if succeeds:
                left.repeat_for_rank_zero(trainer)
            left.run(trainer)
            if kept is not None and self._progress is not None:  # what others have still to do follows here, too
                self._progress = replace(
                    self._progress, validation_is_due=kept.validation_is_due, epoch_is_over=kept.epoch_is_over
                )
        self._batch_end, self._has_lost_rank_zero = None, False

    def _place(self) -> str:
        """Return the place of an error in words: launchers count the errors of one place."""
        return f"in the step after step {self.version}" if self._made_steps else "in the first step of this process"

    def _wait_for_ranks(self) -> None:
        """Nobody trains with too few ranks: wait for others, and end with a checkpoint where none come."""
        least = max(self.engine.settings.min_ranks, self._worlds.axes.num_ranks)
        if self._worlds.present.size >= least:
            return
        too_small, loop = wait_for_ranks(self._worlds.present, self.engine, least), self._state.trainer.fit_loop
        if self.version > 0:
            loop.on_run_start()
            loop.on_run_end()
        raise too_small

    def _follows_a_lost_world(self) -> bool:
        """True if this first world of its ranks follows one without survivors: saved state is then restored."""
        return starts_anew(self.engine, self._worlds.present, self._timeout, self.planner.sources is not None)

    def _recover(self, fault: BaseException | None) -> None:
        began_at, began = time.time(), time.perf_counter()
        self._cause = None
        reason, details = self._reason(fault), self._look_into(fault)
        scrub(fault)
        before, version = (0 if self.is_newcomer else self._worlds.present.size), self.version
        former = self._require_members().ids if before else ()
        while True:
            self._recoveries += 1
            if self._recoveries > self.max_recoveries:
                raise ConfigurationError(
                    f"the run has recovered {self.max_recoveries} times, the limit of max_recoveries: {reason}"
                )
            watch = Stopwatch()
            try:
                if isinstance(fault, WorldChanged):
                    who = self.engine, self.engine.notice or self.parting, self._require_members().nodes
                    promise, spares = (self.min_replicas, self._timeout), self._worlds.spares
                    self._is_spare = hand_over(self._state, self._worlds.present, *who, *promise, spares, reason)
                    if self._is_spare:  # what it holds others hold, too
                        self.is_newcomer, before = True, 0
                with watch.phase("leaving"):
                    self._leave(reason)
                plan, repair = self._join_and_transfer(watch)
                break
            except Exception as error:
                if not is_worlds_fault(error, self.engine.reason):
                    raise
                fault, reason = error, self._reason(error)
                scrub(error)
        seconds = watch.seconds | {"total": time.perf_counter() - began}
        self.report = RecoveryReport(
            reason=reason if isinstance(fault, WorldChanged) or before == 0 else self._cause or reason,
            step=self.version,
            steps_lost=max(0, version - self.version) if before else 0,
            lost_ranks=tuple(rank for rank, id in enumerate(former) if id not in self._require_members().ids),
            ranks_before=before,
            ranks_after=self._worlds.present.size,
            restored=plan.describe(),
            stale_experts=len(plan.stale),
            min_replicas=repair.min_replicas,
            began_at=began_at,
            seconds=seconds,
        )
        self._has_lost_rank_zero |= 0 in self.report.lost_ranks
        for listener in self.listeners:
            listener.recovered(self.report)
        if self.report.lost_ranks:
            self._repeats = 0
        elif self._repeats >= _MOST_REPEATS:
            raise PeerFailed(
                f"the step after step {version} failed {_MOST_REPEATS} times in the same way, and no rank was "
                f"lost: {reason}",
                details=details,
            )

    def _look_into(self, fault: BaseException | None) -> str:
        """Count how often a fault has come in a row. An error that no connection has caused is shown: a recovery would
        hide it.

        Returns:
            The traceback of one that came too often.
        """
        if fault is None or isinstance(fault, WorldChanged):
            self._last_fault, self._repeats = "", 0
            return ""
        signature = f"{self.version}; {signature_of(fault)}"
        is_known = signature == self._last_fault
        self._last_fault, self._repeats = signature, self._repeats + 1 if is_known else 1
        if not is_known and not is_network_fault(fault):
            logger.warning("taken for a consequence of a broken world (%s)", self.engine.reason, exc_info=fault)
        return "".join(traceback.format_exception(fault)) if self._repeats >= _MOST_REPEATS else ""

    def _reason(self, fault: BaseException | None) -> str:
        return "this process joins a running world" if self.is_newcomer else reason_of(fault, self.engine.reason)

    def _leave(self, reason: str) -> None:
        """Abort the old world on all ranks, so that nothing waits on its connections."""
        self.engine.abort(reason)
        self._wrapped.leave()
        drop_groups()

    def _join_and_transfer(self, watch: Stopwatch) -> tuple[RecoveryPlan, Repair]:
        """Join the next world and bring every rank to the same committed step."""
        layers = self._state.layers
        world = self._join(watch)
        counts = not (self.is_newcomer or self._is_torn or self._state.window_replay)
        own = inventory_of(
            self._state,
            former=self._worlds.present,
            rank=world.rank,
            node=self._require_members().nodes[world.rank],
            version=self.version,
            counts=counts,
            is_prepared=self._pending is not None,
        )
        inventories = [RankInventory.from_json(entry) for entry in all_gather_json(own.to_json(), world)]
        while True:
            with watch.phase("plan"):
                plan, inventories = self.planner.plan(
                    inventories,
                    world,
                    num_layers=len(layers),
                    num_experts=max((layer.num_experts for layer in layers), default=0),
                    last_step=self.version,
                    has_trained=self.version > 0 or self._is_torn,
                )
                repair = repaired(plan, self._state, world, min_replicas=self.min_replicas)
            try:
                with watch.phase("movement"):
                    self._move(plan, repair, world)
                break
            except DamagedSnapshots as damage:
                inventories = without_snapshots(inventories, damage.damaged)
        with watch.phase("settling"):
            self.version, self.has_rolled_back = plan.resumes_at, plan.level != "live"
            if plan.level == "live" and plan.stale:
                for listener in self.listeners:
                    listener.count_stale(plan.stale)
            self._has_newcomers = bool(newcomers_of(plan, world))
            self._progress = transfer_progress(self._progress, self._state, plan, world)
            self._wrapped.enter(world)
            self._progress.restore(self._state.trainer)
            if self.has_rolled_back:
                self._progress = self._progress.with_dues(self._state.trainer)
        self.is_newcomer = self.change_is_due = self._is_torn = self._is_spare = False
        self._pending = None
        return plan, repair

    def _move(self, plan: RecoveryPlan, repair: Repair, world: World) -> None:
        """Transfer the state of the plan's version to the ranks of the placements."""
        state = self._state
        state.window_replay = None
        if world.rank in plan.apply_prepared:
            self._make_up()
        saved = fetch_missing(self.planner, plan, repair, world)
        if plan.level == "live":
            share_state(state, plan, world)
        # Another fault in these exchanges leaves live rows as they were; what follows does not wait for peers, except
        # where optimizer shards change hands.
        rows = fetch_rows(state, plan, world) if plan.level == "live" else None
        self._is_torn |= plan.level != "live"
        enter_experts(state, plan, repair, world)
        self._is_torn = True
        self._take_place(world)  # from here on the new world is the present one
        state.reshard(plan.shards if plan.level == "live" else (), rows)
        restore_missing(state, plan, saved)
        state.find_twins()
        agree(world)
        self._is_torn = False

    def _make_up(self) -> None:
        """Apply the update that others have applied."""
        assert self._pending is not None
        self._state.apply_update(self._pending)
        self._pending = None
        self.version += 1
