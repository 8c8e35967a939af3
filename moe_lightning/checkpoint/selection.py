"""Selection of experts for partial checkpoints, and Dynamic-K.

Partial Experts Checkpointing saves K of the E experts of every MoE layer; the others keep their older version. Every
rank computes the whole selection (sequential or load-aware) alone, from the ordinal of the checkpoint or from counters
that are equal everywhere, so saving needs no communication. Sources: PEC 3.1 and Alg. 1, MoC-System 3 and 5.

Dynamic-K saves more experts as faults use up the budget of lost tokens: K starts small and doubles until all experts
are saved. Level j (K0, 2 K0, 4 K0, ... E) may spend threshold * 2^-(j+1): the loss per fault halves when K doubles, so
every level lasts for about the same number of faults, and all levels together stay below the threshold. Because one
fault can overshoot a limit that is checked only afterwards, K also doubles before a checkpoint whose restore would
break the threshold. Sources: PEC 3.2, MoC-System 5.3 (which print no limit per K).

Shapes: L MoE layers, E experts a layer, K saved experts a layer. Counts are routed assignments actually processed
(after any capacity drops).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from moe_lightning.arrays import BoolArray, IntArray
from moe_lightning.config import validated
from moe_lightning.errors import ConfigurationError

SCOPES = ("weight", "master", "exp_avg", "exp_avg_sq")
"""The kinds of state of an expert: low-precision weight, fp32 master weight, Adam's first and second moment."""

SCOPE_PRESETS = {
    "full": SCOPES,
    "moc": ("weight", "exp_avg", "exp_avg_sq"),
    "weights": ("weight", "master"),
    "none": (),
}
"""`full` is PEC as described; `moc` is the accounting behind MoC-System's figures (master weights are always saved, so
that no update of a weight is ever lost and only moments go stale); `none` makes every checkpoint full."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The experts that one checkpoint saves.

    Attributes:
        experts: for each layer the selected experts, in the order in which the policy found them.
        num_experts: E.
    """

    experts: tuple[tuple[int, ...], ...]
    num_experts: int

    def mask(self) -> BoolArray:
        """bool [L, E]: True where the expert is selected."""
        table = np.zeros((len(self.experts), self.num_experts), dtype=np.bool_)
        for layer, chosen in enumerate(self.experts):
            table[layer, list(chosen)] = True
        return table


def parse_scopes(scopes: str | Iterable[str]) -> frozenset[str]:
    """The state kinds to which partial saving applies: a preset's name or the kinds themselves.

    Raises:
        ConfigurationError: an unknown name.
    """
    if isinstance(scopes, str):
        if scopes not in SCOPE_PRESETS:
            raise ConfigurationError(
                f"scopes={scopes!r} is not a preset: use one of {sorted(SCOPE_PRESETS)} or a list of {list(SCOPES)}"
            )
        return frozenset(SCOPE_PRESETS[scopes])
    chosen = frozenset(scopes)
    unknown = sorted(chosen - set(SCOPES))
    if unknown:
        raise ConfigurationError(
            f"scopes contain {unknown}, which is not a state of an expert: use some of {list(SCOPES)}"
        )
    return chosen


def full_selection(num_layers: int, num_experts: int) -> Selection:
    """Every expert of every layer: the first checkpoint after a start, and any that the user asks for."""
    return Selection(experts=(tuple(range(num_experts)),) * num_layers, num_experts=num_experts)


def sequential_selection(*, ordinal: int, k: int, num_layers: int, num_experts: int, ep_size: int = 1) -> Selection:
    """K consecutive positions per layer, the window moving on by K with every checkpoint and every layer (MoC Fig. 4).

    Position p is expert (p mod ep_size) * (E / ep_size) + p div ep_size, so that neighbouring positions lie on
    different ranks and no rank of an expert-parallel group saves more than ceil(K * L / ep_size) experts. The window
    starts at (layer + ordinal) * K, not at layer + ordinal * K: the windows of one checkpoint then tile the positions.

    Args:
        ordinal: number of the partial checkpoint, from 0.
        k: experts per layer, clamped to E.
        ep_size: ranks among which the experts are dealt in contiguous blocks.

    Raises:
        ConfigurationError: ep_size does not divide E.
    """
    k = min(k, num_experts)
    if ep_size < 1 or num_experts % ep_size:
        raise ConfigurationError(
            f"ep_size={ep_size} does not divide the {num_experts} experts: use a divisor of {num_experts}"
        )
    per_rank = num_experts // ep_size

    def window(layer: int) -> tuple[int, ...]:
        positions = ((layer + ordinal) * k + np.arange(k)) % num_experts
        return tuple(int(p % ep_size) * per_rank + int(p // ep_size) for p in positions)

    return Selection(experts=tuple(window(layer) for layer in range(num_layers)), num_experts=num_experts)


@lru_cache(maxsize=64)
def window_slots(*, k: int, num_layers: int, num_experts: int, ep_size: int = 1) -> IntArray:
    """int64 [L, E], not to be changed: the ordinal of the first sequential checkpoint that saves each expert.

    Where K divides E, experts with the same slot are saved together for ever, so their files die together.
    """
    slots = np.full((num_layers, num_experts), -1, dtype=np.int64)
    for ordinal in reversed(range(-(-num_experts // min(k, num_experts)))):
        window = sequential_selection(
            ordinal=ordinal, k=k, num_layers=num_layers, num_experts=num_experts, ep_size=ep_size
        )
        slots[window.mask()] = ordinal
    slots.setflags(write=False)
    return slots


def load_aware_selection(unsaved: IntArray, *, k: int, owners: IntArray, num_ranks: int) -> Selection:
    """PEC's Algorithm 1: layer after layer, the experts with most unsaved tokens whose rank still has room.

    As printed, the layers are taken from last to first, and early layers starve: the room is used up by then.
    `load_aware_global_selection` is better.

    Args:
        unsaved: int64 [L, E], tokens since each expert's last saved version.
        owners: int64 [L, E], the rank that would save each expert.
        num_ranks: ranks among which the ceil(L * K / num_ranks) experts each are shared.
    """
    num_layers, num_experts = unsaved.shape
    k = min(k, num_experts)
    capacity = np.full(num_ranks, -(-num_layers * k // num_ranks))
    chosen: list[tuple[int, ...]] = [()] * num_layers
    for layer in reversed(range(num_layers)):
        picks: list[int] = []
        for expert in np.argsort(-unsaved[layer], kind="stable"):
            rank = owners[layer, expert]
            if len(picks) < k and capacity[rank] > 0:
                capacity[rank] -= 1
                picks.append(int(expert))
        chosen[layer] = tuple(picks)
    return Selection(experts=tuple(chosen), num_experts=num_experts)


def load_aware_global_selection(unsaved: IntArray, *, k: int, owners: IntArray, num_ranks: int) -> Selection:
    """The (layer, expert) pairs with most unsaved tokens, K of every layer and as few of the busiest rank as possible.

    Loses 40 to 66 percent fewer tokens than sequential selection on a recorded routing trace; deviates from PEC's
    Algorithm 1 in that no layer chooses before another and every layer gets its K experts. A rank saves at most
    ceil(L * K / ranks) of them, or one, two, ... more, where the owners leave no other choice.

    Args: as `load_aware_selection`.
    """
    num_layers, num_experts = unsaved.shape
    k = min(k, num_experts)
    share = -(-num_layers * k // num_ranks)
    picks: list[set[int]] = [set() for _ in range(num_layers)]
    saves = [0] * num_ranks
    order = np.argsort(-unsaved, axis=None, kind="stable")
    for layer, expert in zip(*(axis.tolist() for axis in np.unravel_index(order, unsaved.shape)), strict=True):
        rank = int(owners[layer, expert])
        if len(picks[layer]) < k and saves[rank] < share:
            saves[rank] += 1
            picks[layer].add(expert)
    ranking = np.argsort(-unsaved, axis=1, kind="stable").tolist()
    for layer in range(num_layers):
        while len(picks[layer]) < k:
            if not _pick_one_more(layer, picks, saves, ranking, owners, share):
                share += 1  # no choice of experts keeps all ranks below
    chosen = (tuple(expert for expert in row if expert in own) for row, own in zip(ranking, picks, strict=True))
    return Selection(experts=tuple(chosen), num_experts=num_experts)


def _pick_one_more(
    layer: int, picks: list[set[int]], saves: list[int], ranking: list[list[int]], owners: IntArray, share: int
) -> bool:
    """Give a layer one more expert, so that no rank saves more than its share; False where that cannot be.

    Where the ranks of the layer's other experts have enough to save, another layer passes one of its experts there over
    for one elsewhere, and so on: the shortest such chain.
    """
    came_from: dict[int, tuple[int, int]] = {}  # rank -> the layer that wants an expert there, and which
    gives_up: dict[int, int] = {layer: -1}  # layer -> the expert that it would pass over; -1: none
    queue = [layer]
    for wanting in queue:  # grows while it is walked
        for expert in ranking[wanting]:
            rank = int(owners[wanting, expert])
            if expert in picks[wanting] or rank in came_from:
                continue
            came_from[rank] = wanting, expert
            if saves[rank] < share:
                saves[rank] += 1
                while wanting != layer:
                    picks[wanting].add(expert)
                    given = gives_up[wanting]
                    picks[wanting].remove(given)
                    wanting, expert = came_from[int(owners[wanting, given])]
                picks[layer].add(expert)
                return True
            for other, row in enumerate(ranking):
                if other not in gives_up:
                    given = next((x for x in reversed(row) if x in picks[other] and owners[other, x] == rank), -1)
                    if given >= 0:
                        gives_up[other] = given
                        queue.append(other)
    return False


def persist_selection(snapshot: Selection, *, k: int, persisted_version: IntArray) -> Selection:
    """Those K_persist of the snapshot's experts whose persisted version is oldest, ties in the snapshot's order.

    The papers leave the choice open; taking the first ones of each window would persist the same few experts for ever.

    Args:
        k: K_persist, clamped to what the snapshot has.
        persisted_version: int64 [L, E], the step of each expert's newest version on storage (-1: none).
    """

    def oldest(layer: int, window: tuple[int, ...]) -> tuple[int, ...]:
        ages = persisted_version[layer, list(window)]
        kept = sorted(np.argsort(ages, kind="stable")[:k])
        return tuple(window[i] for i in kept)

    return Selection(
        experts=tuple(oldest(layer, window) for layer, window in enumerate(snapshot.experts)),
        num_experts=snapshot.num_experts,
    )


@validated
class DynamicKRule:
    """The number of experts to save per layer, as a state machine fed with the PLT of every fault.

    Args:
        k0: experts per layer at the start, in 1..E.
        num_experts: E; K never exceeds it.
        threshold: the budget of PLT for the whole training, between 0 and 1; MoC-System uses 0.0375, PEC 0.05.
        looks_ahead: K also rises before a fault; False: as the papers print it.
    """

    def __init__(self, *, k0: int, num_experts: int, threshold: float = 0.0375, looks_ahead: bool = True) -> None:
        self.k = k0
        self.level = 0
        self.spent_at_level = 0.0
        self.total = 0.0
        self.num_experts = num_experts
        self.threshold, self.looks_ahead = threshold, looks_ahead

    def after_fault(self, plt: float) -> int:
        """Account for the PLT that one recovery cost and return the K to use from now on."""
        self.spent_at_level += plt
        self.total += plt
        if self.spent_at_level >= self.threshold * 2.0 ** -(self.level + 1):
            self._double()
        return self.k

    def before_checkpoint(self, cost: Callable[[int], float]) -> int:
        """The K to use for the next checkpoint, so that a restore of it keeps the budget.

        Args:
            cost: K -> PLT that a restore of that checkpoint would cost; 0 where all experts are saved.
        """
        while self.looks_ahead and self.k < self.num_experts and self.total + cost(self.k) > self.threshold:
            self._double()
        return self.k

    def _double(self) -> None:
        if self.k < self.num_experts:
            self.k = min(2 * self.k, self.num_experts)
            self.level += 1
            self.spent_at_level = 0.0

    def state_dict(self) -> dict[str, Any]:
        """The level and what was spent, to be saved with the checkpoint."""
        return {"k": self.k, "level": self.level, "spent_at_level": self.spent_at_level, "total": self.total}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, with the larger K of the two; K is clamped if the model now has fewer experts."""
        self.k = min(max(self.k, int(state["k"])), self.num_experts)
        self.level = int(state["level"])
        self.spent_at_level = float(state["spent_at_level"])
        self.total = float(state["total"])
