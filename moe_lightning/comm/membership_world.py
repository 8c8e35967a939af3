"""Builds the groups of one membership of an elastic run, so that they can be cut from any thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from moe_lightning.comm.building import begin_building, set_collectives_timeout
from moe_lightning.parallel.abort import ConnectionCut, turn_strangers_away
from moe_lightning.parallel.collectives import all_gather_json, check_versions
from moe_lightning.parallel.context import World, first_group_options, is_silent, prepare_environment
from moe_lightning.parallel.mesh import Layout


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
    guard: Callable[[Callable[[], None]], None],
) -> World:
    """Make torch's default group and ours for one membership, so that they can be cut from any thread.

    Args:
        name: unique for ever; the prefix of what the groups keep in the store.
        store: outlives its members.
        timeout: of every collective.
        build_timeout_s: of building; a member may die meanwhile.
        layout: as of `World.connect`.
        guard: told how to cut the connections, before any is made.

    Raises:
        WorldCutError: the world broke meanwhile.
        ConfigurationError: this rank has other versions than rank 0, and would plan otherwise.
    """
    cut = ConnectionCut()
    guard(cut.cut)
    if size == 1:
        return World.single(device)
    prefixed = PrefixStore(name, store)
    prefixed.set_timeout(timedelta(seconds=build_timeout_s))
    with cut:
        short = begin_building(prefixed, size, build_timeout_s)
        prepare_environment(is_elastic=True)
        own = first_group_options(device)
        dist.init_process_group(backend, store=prefixed, rank=rank, world_size=size, timeout=short, **own)
        world = replace(World.connect(device, short, layout), is_cut=lambda: cut.is_cut)
    cut.tune()
    for group in world.groups:
        set_collectives_timeout(group, timeout)
    cut.add_groups([group for group in world.groups if is_silent(group, device)], device)
    cut.confirm(lambda value: all_gather_json(value, world))
    turn_strangers_away(cut.connections)
    check_versions(world, others_go_on=True)
    return world
