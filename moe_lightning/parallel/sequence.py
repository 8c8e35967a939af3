"""Context parallelism: each of several ranks computes one part of every sequence.

Everything but attention works on positions one by one. Attention exchanges sequence for heads: one all-to-all gives
each rank whole sequences of its share of the heads, another one undoes it (DeepSpeed-Ulysses, arXiv 2309.14509). Where
the heads of keys and values do not divide, ranks gather keys and values and keep their own queries. `SequenceParts`
cuts the sequences of every batch, and gathers predictions.

Shapes: B sequences, H heads, L positions of this rank, C head size.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from moe_lightning.compat import private_torch
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World
from moe_lightning.parallel.exchange import linear


def _swap(tensors: Sequence[Tensor], give: int, take: int, sharers: World) -> list[Tensor]:
    """Cut dimension `give` of every tensor over the N ranks and join their pieces along dimension `take`, in one
    exchange; the gradient travels back the same way.

    Args:
        tensors: of one dtype; the size of `give` is a multiple of N.

    Returns:
        Tensors whose dimension `give` is N times smaller and `take` N times larger.
    """
    pieces = [torch.stack(tensor.chunk(sharers.size, dim=give)) for tensor in tensors]
    flat = torch.cat([piece.flatten(1) for piece in pieces], dim=1)
    received = torch.split(_exchange(flat, sharers), [piece[0].numel() for piece in pieces], dim=1)
    return [torch.cat(part.view(piece.shape).unbind(), dim=take) for part, piece in zip(received, pieces, strict=True)]


def _gather(tensors: Sequence[Tensor], dim: int, sharers: World) -> list[Tensor]:
    """Every tensor with the pieces of all ranks along one dimension; gradients are summed in the order of ranks."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    copies = flat.expand(sharers.size, -1)
    received = torch.split(_exchange(copies, sharers), [tensor.numel() for tensor in tensors], dim=1)
    return [
        torch.cat(part.view(sharers.size, *tensor.shape).unbind(), dim=dim)
        for part, tensor in zip(received, tensors, strict=True)
    ]


def _exchange(pieces: Tensor, sharers: World) -> Tensor:
    """Row r of [N, ...] to rank r, row r of the result from it."""
    swap = partial(_all_to_all, sharers=sharers)
    return linear(pieces, swap, swap)


def _all_to_all(pieces: Tensor, sharers: World) -> Tensor:
    pieces = pieces.contiguous()
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=sharers.dense)
    return received


class ContextParallel:
    """This rank's part of each sequence, and attention over whole sequences.

    A module that mixes positions keeps one as its attribute `context`; the strategy puts its own there. Without a
    strategy, with `mesh.cp=1`, and outside of the strategy's steps, sequences are whole.

    Attributes:
        is_attending: attention over parts is being computed.
    """

    def __init__(self) -> None:
        self._sharers: World | None = None
        self._length: int | None = None
        self.is_attending = False

    def __deepcopy__(self, memo: dict[int, object]) -> ContextParallel:
        """A copy of a module has its sequences among the same ranks."""
        return self

    def __reduce__(self) -> tuple[type[ContextParallel], tuple[()]]:
        """In another process sequences are whole."""
        return ContextParallel, ()

    def enter(self, sharers: World | None, length: int | None) -> None:
        """Sequences are cut over ranks, into parts of `length` positions, until this is called again.

        Args:
            sharers: the ranks; None: they are whole.
            length: None: the batch was not cut.
        """
        self._sharers, self._length = sharers, length

    @property
    def is_sharded(self) -> bool:
        """True if sequences are sharded in the running step."""
        return self._sharers is not None

    @property
    def _parts(self) -> int:
        return 1 if self._sharers is None else self._sharers.size

    def whole(self, length: int) -> int:
        """Positions of a sequence of which this rank has `length`.

        Raises:
            ConfigurationError: `length` is not the part that the batch was cut into.
        """
        if self.is_sharded and length != self._length:
            raise ConfigurationError(
                f"attention got {length} positions, but mesh.cp={self._parts} has cut the batch into parts of "
                f"{self._length}: a step must not add or drop positions, so shift targets in the dataset"
            )
        return length * self._parts

    def first(self, length: int) -> int:
        """The position in its sequence of this rank's first one, of `length`.

        Raises:
            ConfigurationError: see `whole`.
        """
        self.whole(length)
        return 0 if self._sharers is None else self._sharers.rank * length

    def positions(self, length: int, begins_BL: Tensor | None = None) -> slice | Tensor:
        """The positions of this rank's `length` tokens, as an index: in their sequences, or int64 [B, L], in their
        documents.

        Args:
            begins_BL: int64, the position in its sequence at which the document of each token begins; None: a sequence
                is one document.

        Raises:
            ConfigurationError: see `whole`.
        """
        first = self.first(length)
        if begins_BL is None:
            return slice(first, first + length)
        return torch.arange(first, first + length, device=begins_BL.device) - begins_BL

    def attention(
        self,
        q_BHLC: Tensor,
        k_BGLC: Tensor,
        v_BGLC: Tensor,
        *,
        is_causal: bool = True,
        documents_BL: Tensor | None = None,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Scaled dot-product attention over whole sequences; [B, H, L, C of values].

        Args:
            q_BHLC: queries of this rank's positions, which carry their place in the whole sequence already.
            k_BGLC, v_BGLC: keys and values; H is a multiple of their G heads.
            is_causal: a position sees none after it.
            documents_BL: integers; a position sees those of its own number only. None: one document.
            window: a position sees this many up to itself; needs `is_causal`. None: all.
            scale: of the products; None: 1 / sqrt(C).

        Raises:
            ConfigurationError: see `whole`.
        """
        sight = _Sight(is_causal=is_causal, documents_BK=documents_BL, window=window)
        if self._sharers is None:
            return _attend(q_BHLC, k_BGLC, v_BGLC, sight, scale)
        self.whole(q_BHLC.shape[2])
        mixed: Tensor = self._attend_to_parts(self._sharers, q_BHLC, k_BGLC, v_BGLC, sight, scale)
        return mixed

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _attend_to_parts(
        self, sharers: World, q: Tensor, k: Tensor, v: Tensor, sight: _Sight, scale: float | None
    ) -> Tensor:
        swaps = k.shape[1] % sharers.size == 0
        if sight.documents_BK is not None:
            (documents_BK,) = _gather([sight.documents_BK], 1, sharers)
            sight = replace(sight, documents_BK=documents_BK)
        if swaps:
            q, k, v = _swap([q, k, v], 1, 2, sharers)
        else:
            sight = replace(sight, first=self.first(q.shape[2]))
            k, v = _gather([k, v], 2, sharers)
        self.is_attending = True
        try:
            mixed = _attend(q, k, v, sight, scale)
        finally:
            self.is_attending = False
        return _swap([mixed], 2, 1, sharers)[0] if swaps else mixed


@dataclass(frozen=True, kw_only=True)
class _Sight:
    """Mask of the K keys for queries that begin at position `first`; see `ContextParallel.attention`."""

    is_causal: bool
    documents_BK: Tensor | None
    window: int | None
    first: int = 0

    def mask(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
        """bool [1 or B, 1, queries, keys]; None where plain causal attention, or all of it, is meant."""
        is_plain = self.documents_BK is None and self.window is None
        if is_plain and (num_queries == num_keys or not self.is_causal):
            return None
        queries = slice(self.first, self.first + num_queries)
        at = torch.arange(num_keys, device=device)
        behind = at[queries, None] - at
        seen = behind >= 0 if self.is_causal else torch.ones_like(behind, dtype=torch.bool)
        if self.window is not None:
            seen = seen & (behind < self.window)
        seen = seen[None, None]
        if self.documents_BK is not None:
            seen = seen & (self.documents_BK[:, None, queries, None] == self.documents_BK[:, None, None, :])
        return seen


def _attend(q: Tensor, k: Tensor, v: Tensor, sight: _Sight, scale: float | None) -> Tensor:
    mask = sight.mask(q.shape[2], k.shape[2], q.device)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=sight.is_causal and mask is None, scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip


_ATTENTION = ("scaled_dot_product_attention", "flex_attention")


class OtherAttention(TorchFunctionMode):
    """Finds attention that does not ask the context, and so would see the positions of a part only: torch's own
    functions, or a softmax over positions for each position.

    Raises:
        ConfigurationError: there is some.
    """

    def __init__(self, context: ContextParallel, length: int) -> None:
        super().__init__()
        self._context, self._length = context, length
        self._found = ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        scores = args[0] if args else (kwargs or {}).get("input")
        is_attention = name in _ATTENTION or (name == "softmax" and self._is_square(scores))
        if is_attention and not self._context.is_attending:
            self._found = name
            if not torch.compiler.is_compiling():  # there an error becomes one of the compiler
                self._refuse()
        return func(*args, **(kwargs or {}))

    @override
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._found and not isinstance(error[1], ConfigurationError):
            self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigurationError(
            f"{self._found} mixes the {self._length} positions of a part only, where mesh.cp has cut sequences: call "
            "the attention of a moe_lightning.ContextParallel, which the module keeps as `context`, or set mesh.cp=1"
        )

    def _is_square(self, scores: object) -> bool:
        return (
            isinstance(scores, Tensor) and scores.ndim > 2 and tuple(scores.shape[-2:]) == (self._length, self._length)
        )


def attach_context(model: nn.Module, context: ContextParallel) -> None:
    """Let every module of the model that mixes positions read this context."""
    for module in model.modules():
        if isinstance(getattr(module, "context", None), ContextParallel):
            module.context = context  # type: ignore[assignment]


_MIXERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.RNNBase, nn.Conv1d)
"""torch's own modules that mix positions, and cannot work on parts of sequences."""


class SequenceParts:
    """This rank's part of each sequence.

    Attributes:
        parts: number of ranks that share a sample.
    """

    def __init__(self) -> None:
        self.parts = 1
        self._context = ContextParallel()
        self._sharers: World | None = None
        self._length: int | None = None  # of this rank's parts of the last batch
        self._batches = 0

    def attach(self, module: nn.Module, world: World, cp: int) -> None:
        """Attach the context of parallel sequences to a module's attention.

        Args:
            cp: ranks that share a sample in every world that trains.

        Raises:
            ConfigurationError: a part of it mixes positions without the context.
        """
        if cp > 1:
            _require_context(module, cp)
        attach_context(module, self._context)
        self.enter_world(world)

    def enter_world(self, world: World) -> None:
        """Set this rank's part in a world."""
        self._sharers, self.parts = world.along("cp") if "cp" in world.groups else None, world.shape.cp
        self._batches, self._length = 0, None
        self._watched: set[bool] = set()
        self.leave()

    def enter(self) -> None:
        """Mark sequences as parts, at the begin of a step."""
        self._context.enter(self._sharers, self._length)

    @contextmanager
    def watched(self, *, training: bool) -> Generator[None, None, None]:
        """Check, around a module's first step in a world, that it has no attention without the context.

        Raises:
            ConfigurationError: it has some.
        """
        if self._sharers is None or self._length is None or training in self._watched:
            yield
            return
        with OtherAttention(self._context, self._length):
            yield
        self._watched.add(training)

    def leave_world(self) -> None:
        """Release the groups of the present world."""
        self._sharers = None
        self.leave()

    def leave(self) -> None:
        """Mark sequences as whole, outside of steps."""
        self._context.enter(None, None)

    def cut(self, batch: Any) -> Any:
        """Return this rank's part of every tensor [B, L, ...] of a batch; tensors [B] stay.

        Raises:
            ConfigurationError: tensors that do not all have L positions, or an L that the ranks do not divide; ranks
                that share samples have unlike ones.
        """
        if self._sharers is None:
            return batch
        leaves = [leaf for leaf in private_torch.tree_leaves(batch) if isinstance(leaf, Tensor)]
        self._batches += 1
        is_looked_at = self._batches & (self._batches - 1) == 0  # the first ones, and then more and more rarely
        if is_looked_at and len(set(all_gather_json(_digest(leaves), self._sharers))) > 1:
            raise ConfigurationError(
                f"the {self.parts} ranks that share samples under mesh.cp={self.parts} have loaded different "
                "batches: let a sample follow from its index alone, not from a random generator of the process"
            )
        sequences = [leaf for leaf in leaves if leaf.ndim > 1]
        lengths = {leaf.shape[1] for leaf in sequences}
        if len(lengths) != 1:
            shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves)
            raise ConfigurationError(
                f"mesh.cp={self.parts} cuts the second dimension of a batch's tensors, which must be the positions of "
                f"all, but the batch has tensors of {shapes}: give tensors [B, L, ...] of one L, or [B]"
            )
        (length,) = lengths
        if length % self.parts:
            raise ConfigurationError(
                f"sequences of {length} positions cannot be cut into mesh.cp={self.parts} equal parts: pad or cut them "
                f"to a multiple of {self.parts}, with targets of -100 where they are padded"
            )
        self._length = length // self.parts
        part = slice(self._sharers.rank * self._length, (self._sharers.rank + 1) * self._length)
        return private_torch.tree_map(
            lambda leaf: leaf[:, part] if isinstance(leaf, Tensor) and leaf.ndim > 1 else leaf, batch
        )

    def require_targets(self, batch: Any) -> None:
        """
        Raises:
            ConfigurationError: sequences without targets beside them: made in the step, those at the borders of parts
                would be lacking.
        """
        if self.parts == 1 or sum(isinstance(leaf, Tensor) for leaf in private_torch.tree_leaves(batch)) > 1:
            return
        raise ConfigurationError(
            f"mesh.cp={self.parts} cuts sequences before the step sees them, which so cannot shift inputs to make "
            "targets: let the dataset give (inputs, targets)"
        )

    @torch.no_grad()
    def whole(self, prediction: Any) -> Any:
        """Return a prediction of whole sequences on the first of the ranks that share them, and of no rows on the
        others.
        """
        sharers = self._sharers
        if sharers is None:
            return prediction

        def gathered(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.ndim:
                return leaf
            if leaf.ndim > 1 and leaf.shape[1] == self._length:
                (leaf,) = _gather([leaf], 1, sharers)
            return leaf if sharers.rank == 0 else leaf[:0]

        return private_torch.tree_map(gathered, prediction)


def _digest(leaves: list[Tensor]) -> str:
    """Return short text that differs for different tensors."""
    arrays = [leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy() for leaf in leaves]
    return str([(list(leaf.shape), zlib.crc32(array.tobytes())) for leaf, array in zip(leaves, arrays, strict=True)])


def _require_context(module: nn.Module, parts: int) -> None:
    holders = {name: m for name, m in module.named_modules() if isinstance(_context_of(m), ContextParallel)}
    kind = type(module).__name__
    knowing = [name for name, holder in holders.items() if _mixes(holder)]
    for name, part in module.named_modules():
        is_known = any(holder == name or holder.startswith(f"{name}.") for holder in holders)
        if not _mixes(part) or is_known or any(name.startswith(f"{outer}.") for outer in knowing):
            continue
        raise ConfigurationError(
            f"mesh.cp={parts} cuts sequences, and {name or kind} ({type(part).__name__}) of {kind} would mix the "
            "positions of a part only: let it keep a moe_lightning.ContextParallel() as `context` and call "
            "context.attention, or set mesh.cp=1"
        )
    if not holders:
        raise ConfigurationError(
            f"mesh.cp={parts} cuts sequences, and no part of {kind} knows of it: let its attention keep "
            "a moe_lightning.ContextParallel() as `context` and call context.attention, or set mesh.cp=1"
        )


def _context_of(module: nn.Module) -> object:
    return module.__dict__.get("context")


def _mixes(module: nn.Module) -> bool:
    """True if a module mixes positions, judged by its type or class name."""
    return isinstance(module, _MIXERS) or type(module).__name__.endswith(("Attention", "Attn", "Mamba", "Mixer"))
