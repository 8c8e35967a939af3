"""Training and evaluation steps in a pipeline.

The batch of a rank is cut into micro-batches of samples. Every stage runs the user's step on every micro-batch: the
last stage to its end, the others up to their blocks. Gradients, losses and logged values are those of as many
micro-batches of accumulated gradients. Outputs and logged values are joined over the micro-batches and logged on every
rank, so that callbacks and loggers see the same as without a pipeline.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torchmetrics import Metric

from moe_lightning.checkpoint.training_state import preserved_generators
from moe_lightning.compat import private_torch
from moe_lightning.data.sampler import OwnGenerators, StepSlice, mixed_seed
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.layer import LayerStatistics, MoELayer
from moe_lightning.parallel.collectives import broadcast_object
from moe_lightning.parallel.context import World, all_reduce_, broadcast_
from moe_lightning.parallel.mesh import STAGES_PER_RANK, ScheduleName
from moe_lightning.state.tensors import is_sharded
from moe_lightning.strategies.dense_parameters import sum_gradients
from moe_lightning.strategies.dummy_batches import without_traces, without_updates
from moe_lightning.strategies.fsdp import GatheringStep, gathered, is_fully_sharded
from moe_lightning.strategies.stages import Left, StageCut
from moe_lightning.strategies.steps import Context, Steps, add_gradients
from moe_lightning.strategies.train_state import TrainState
from moe_lightning.strategies.worlds import Worlds

if TYPE_CHECKING:
    from moe_lightning.parallel.pipeline import Pipe


def batch_pieces(batch: Any, rows: Sequence[int]) -> list[Any]:
    """Cut a batch into micro-batches of so many samples each.

    Args:
        batch: nested containers of tensors [samples, ...] and lists of a value for each sample; numbers, strings and
            scalars are given to every micro-batch.

    Raises:
        ConfigurationError: something else.
    """
    ends = list(accumulate(rows))
    return [_piece(batch, slice(end - count, end), ends[-1]) for count, end in zip(rows, ends, strict=True)]


def _piece(value: Any, where: slice, total: int) -> Any:
    if isinstance(value, Tensor) and value.ndim and len(value) == total:
        return value[where]
    if isinstance(value, Mapping):
        return {key: _piece(inner, where, total) for key, inner in value.items()}
    if isinstance(value, list) and len(value) == total and not any(isinstance(item, Tensor) for item in value):
        return value[where]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_piece(inner, where, total) for inner in value))
    if isinstance(value, list | tuple):
        return type(value)(_piece(inner, where, total) for inner in value)
    if value is None or isinstance(value, int | float | str) or (isinstance(value, Tensor) and not value.ndim):
        return value
    shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise ConfigurationError(
        f"a batch of {total} samples holds {shown}, which mesh.pp cannot cut into micro-batches: let its tensors begin "
        "with the samples"
    )


def joined(outcomes: Sequence[Any], counts: Sequence[int], weights: Sequence[float]) -> Any:
    """Join the results of a step over its micro-batches: rows, and lists of a value for each sample, are concatenated,
    scalars averaged.

    Args:
        counts: samples of each; rows of micro-batches without samples are left out.
        weights: of the means.

    Raises:
        ConfigurationError: something that is neither.
    """
    first = outcomes[0]
    if isinstance(first, Mapping):
        return {key: joined([outcome[key] for outcome in outcomes], counts, weights) for key in first}
    if isinstance(first, list) and _are_of_samples(outcomes, counts):
        return [value for outcome, count in zip(outcomes, counts, strict=True) for value in outcome[:count]]
    if isinstance(first, list | tuple):
        columns = zip(*outcomes, strict=True)
        return type(first)(joined(column, counts, weights) for column in columns)
    if isinstance(first, Tensor) and first.ndim:
        pairs_of_rows = zip(outcomes, counts, strict=True)
        return torch.cat([rows.detach() if count else rows[:0].detach() for rows, count in pairs_of_rows])
    if isinstance(first, Tensor | float | int) and not isinstance(first, bool):
        total = sum(weights)
        pairs = [(float(o), w) for o, w in zip(outcomes, weights, strict=True) if w]
        mean = sum(o * w for o, w in pairs) / total if total else 0.0
        return torch.tensor(mean, dtype=first.dtype, device=first.device) if isinstance(first, Tensor) else mean
    if first is None or isinstance(first, bool | str):
        return first
    raise ConfigurationError(
        f"a step returns a {type(first).__name__}, which mesh.pp cannot put together from micro-batches: return tensors"
    )


def _are_of_samples(outcomes: Sequence[list[Any]], counts: Sequence[int]) -> bool:
    """True if lists have a value, and no tensor, for each sample of their micro-batches."""
    fit = all(len(outcome) == count for outcome, count in zip(outcomes, counts, strict=True) if count)
    return fit and any(counts) and not any(isinstance(leaf, Tensor) for leaf in private_torch.tree_leaves(outcomes))


_SIGNATURE = inspect.signature(pl.LightningModule.log)
_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {"sum": sum, "max": max, "min": min}


@contextmanager
def recording_logs(
    module: pl.LightningModule, calls: list[dict[str, Any]], count: int, shared_weight: Callable[[], Tensor | None]
) -> Generator[None, None, None]:
    """Add the module's calls of `log` inside to a list, instead of logging.

    Args:
        calls: "name" and "value" of each, None of a Metric; "metric", the name of a Metric's attribute; "options",
            other arguments than the defaults; "count", samples of the micro-batch on this rank; "weight" of the value
            among those of other micro-batches.
        count: samples of the micro-batch on this rank.
        shared_weight: returns the weight of a mean over all ranks; None if the step has not set it.
    """

    def log(*arguments: Any, **named: Any) -> None:
        given = dict(_SIGNATURE.bind(module, *arguments, **named).arguments)
        name, value = given.pop("name"), given.pop("value")
        del given["self"]
        options = {key: _plain(key, v) for key, v in given.items() if v != _SIGNATURE.parameters[key].default}
        metric = ""
        if isinstance(value, Metric):
            metric = next((path for path, part in module.named_modules() if part is value), "")
            if not metric:
                raise ConfigurationError(
                    f"log({name!r}) got a Metric that is no part of the module: assign it to an attribute, or "
                    "put it into an nn.ModuleDict or nn.ModuleList"
                )
        if not count and "batch_size" in options:  # a dummy batch counts for nothing
            options["batch_size"] = 0
        if not count and options.get("reduce_fx") == "sum":
            value = 0.0
        weight = options.get("batch_size")
        if weight is None and not options.get("sync_dist"):
            weight = shared_weight()
        calls.append(
            {
                "name": name,
                "value": None if metric else value.detach() if isinstance(value, Tensor) else float(value),
                "metric": metric,
                "options": options,
                "count": count,
                "weight": count if weight is None else weight,
            }
        )

    object.__setattr__(module, "log", log)
    try:
        yield
    finally:
        object.__delattr__(module, "log")


def log_joined(module: pl.LightningModule, calls: Sequence[Mapping[str, Any]], count: int) -> None:
    """Log the calls that `recording_logs` has recorded, joined to one value for each name.

    Args:
        calls: without tensors.
        count: samples of this rank in all micro-batches.
    """
    for name in dict.fromkeys(call["name"] for call in calls):
        own = [call for call in calls if call["name"] == name]
        options = own[0]["options"]
        if own[0]["metric"]:
            logged = module.get_submodule(own[0]["metric"])
            assert isinstance(logged, Metric)
            module.log(name, logged, **options)
            continue
        values, weights = [call["value"] for call in own], [call["weight"] for call in own]
        total, reduction = sum(weights), options.get("reduce_fx", "mean")
        if reduction in _REDUCTIONS:
            of_samples = [call["value"] for call in own if call["count"]]
            value = _REDUCTIONS[reduction](of_samples or values)
        elif total > 0:
            value = sum(v * w for v, w in zip(values, weights, strict=True) if w) / total
        else:
            value = values[0]
        sizes = [call["options"]["batch_size"] for call in own if "batch_size" in call["options"]]
        module.log(name, value, **options | {"batch_size": sum(sizes) if sizes else max(1, count)})


def _plain(option: str, value: Any) -> Any:
    if option == "reduce_fx" and value in (torch.mean, torch.sum, torch.max, torch.min):
        return value.__name__
    if option == "metric_attribute" or isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, Tensor) and value.ndim == 0:
        return int(value)
    raise ConfigurationError(f"log({option}={value!r}) cannot be told to the other stages of mesh.pp: drop it")


_MOST_SHAPES = 8
"""Schedules that are cached for batches of different shapes."""


@dataclass
class _Run:
    """One batch in the pipeline.

    Attributes:
        step: of the user's module.
        context: around its forward passes.
        calls: its arguments for each micro-batch.
        pieces: samples of each micro-batch.
        metrics: outside of blocks, whose updates count in the last stage only.
        is_training: backward passes follow.
        outcomes, weights, logs: of the last stage.
        losses: of the last stage, as they are differentiated.
        statistics: of the layers here, of each micro-batch.
        auxiliary: losses of the layers here, each times the micro-batch's share of this rank's samples.
    """

    step: Callable[..., Any]
    context: Context
    calls: list[tuple[Any, ...]]
    pieces: tuple[StepSlice, ...]
    metrics: list[Metric]
    is_training: bool
    outcomes: list[Any] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    logs: list[dict[str, Any]] = field(default_factory=list)
    statistics: dict[MoELayer, list[LayerStatistics]] = field(default_factory=lambda: defaultdict(list))
    auxiliary: dict[MoELayer, list[Tensor]] = field(default_factory=lambda: defaultdict(list))


class Pipeline:
    """Forward and backward passes of a module through the stages of a pipeline, see `WholeModel` for one without.

    Args:
        module: the user's.
        schedule: the order of micro-batches.
        steps: weights and gradients of the steps.
        worlds: the present world, with the stages of its ranks.
        state: the state of this rank, with its experts.
        scaled: returns a loss as it is differentiated: multiplied by the scale of float16, if any.

    Attributes:
        cut: the parts of the module on this rank.
        last_loss: weighted loss of the last batch in the last stage; None on ranks without it.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        schedule: ScheduleName,
        steps: Steps,
        worlds: Worlds,
        state: TrainState,
        scaled: Callable[[Tensor], Tensor],
    ) -> None:
        world, num_stages = worlds.present, STAGES_PER_RANK[schedule] * worlds.axes.pp
        self.cut = StageCut(module, range(world.pipe.rank, num_stages, world.shape.pp), num_stages)
        self._module, self._schedule, self._steps, self._worlds = module, schedule, steps, worlds
        self._state, self._scaled = state, scaled
        self._pipes: OrderedDict[Any, tuple[Pipe, int]] = OrderedDict()
        self._run: _Run | None = None
        self._wire = 0  # elements that are sent for a micro-batch of the running batch
        self.last_loss: Tensor | None = None
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._is_over = False
        module.register_state_dict_pre_hook(self._require_run)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(self._require_run)  # type: ignore[no-untyped-call]
        self.cut.apply(world.device)

    def begin_run(self) -> None:
        """Let the module be read and loaded in stages."""
        self._is_over = False

    def end_run(self) -> None:
        """Refuse the module's state_dict from now on."""
        self._is_over = True

    @contextmanager
    def opened(self) -> Generator[None, None, None]:
        """Let the state_dict of the module be read inside, as those of a run are."""
        was_over, self._is_over = self._is_over, False
        try:
            yield
        finally:
            self._is_over = was_over

    def _require_run(self, *_: object) -> None:
        """
        Raises:
            ConfigurationError: training is over, and the module has the stages of this rank only.
        """
        if self._is_over and self.cut.is_applied and not self.cut.is_whole:
            raise ConfigurationError(
                "a module that mesh.pp has cut has the stages of this rank only, and its state_dict is not the "
                "model's: save a checkpoint with the Trainer that cut it (trainer.save_checkpoint), and load that into "
                "another module"
            )

    @property
    def _world(self) -> World:
        return self._worlds.present

    @property
    def _is_last(self) -> bool:
        return self.cut.stages[-1] == self.cut.num_stages - 1

    # ------------------------------------------------------------------ steps

    def wrapped(self, model: nn.Module, _ignored: Collection[str], _devices: list[int] | None) -> nn.Module:
        """Return the model as it is: `backward` sums its gradients."""
        return model

    def unwrapped(self, module: nn.Module) -> nn.Module:
        """Return the module, which is not in DDP."""
        return module

    @property
    def lacks_unfrozen(self) -> bool:
        """False: `backward` sums the gradients of all parameters that train by then."""
        return False

    def train(self, _stock: Callable[..., Any], context: Context, *arguments: Any, **_named: Any) -> Any:
        """Run forward and backward of a batch; gradients wait for `backward`, because Lightning clears them before it.

        Returns:
            What the step returns, as the mean over its micro-batches.
        """
        parameters = list(self._module.parameters())
        before = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        outcome = self._through(self._module.training_step, context, arguments, backward=True)
        self._gradients = {p: p.grad for p in parameters if p.grad is not None}
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
        return outcome

    def evaluate(self, stock: Callable[..., Any], context: Context, *arguments: Any, **named: Any) -> Any:
        """Run forward of a batch, and return the joined results of its micro-batches."""
        if self.cut.is_whole:  # too few ranks to train: every one holds all stages
            return stock(*arguments, **named)
        return self._through(getattr(self._module, stock.__name__), context, arguments, backward=False)

    def weighted(self, loss: Tensor) -> Tensor:
        """Return the loss: `train` has weighted those of the micro-batches."""
        return loss

    def backward(self, _stock: Callable[[], object]) -> None:
        """Add the gradients of the batch to those before it. Where it is the last one of the optimizer step, sum dense
        ones over the ranks of the stage; collective then.
        """
        add_gradients(self._gradients)
        self._gradients = {}
        if not self._steps.is_blocked and self._world.stage.size > 1 and not is_fully_sharded(self._module):
            experts = self._state.experts.stack_of
            dense = [p for p in self._module.parameters() if p.requires_grad and p not in experts and not is_sharded(p)]
            sum_gradients(dense, partial(all_reduce_, world=self._world.stage), self._world.device)

    def forget_step(self) -> None:
        """Forget an aborted step."""
        self._run, self._gradients = None, {}
        self._pipes.clear()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Broadcast the dense values of the first rank of the stage, in their precision by now; collective."""
        experts = self._state.experts.stack_of
        for tensor in [*self._module.parameters(), *self._module.buffers()]:
            if tensor not in experts and not is_sharded(tensor):
                broadcast_(tensor.detach(), 0, self._world.stage)

    # ------------------------------------------------------------------ a batch

    def _through(self, step: Callable[..., Any], context: Context, arguments: Sequence[Any], *, backward: bool) -> Any:
        steps, batch, module = self._steps, self._steps.batch, self._module
        if batch is None or not batch.pieces:
            raise ConfigurationError(
                "mesh.pp needs batches that can be cut over ranks: return a torch DataLoader or a StepLoader"
            )
        parts = batch_pieces(arguments[0], [piece.rows for piece in batch.pieces])
        step = step.own if isinstance(step, GatheringStep) else step
        metrics = [part for part in module.modules() if isinstance(part, Metric) and self.cut.is_outside(part)]
        calls = [(part, *arguments[1:]) for part in parts]
        run = _Run(step, context, calls, batch.pieces, metrics, is_training=backward)
        generators = preserved_generators(self._world.device), OwnGenerators(0)
        with generators[0], generators[1], gathered(module) if is_fully_sharded(module) else nullcontext():
            pipe, self._wire, is_new = self._pipe(run)
            self._run = run
            try:
                with self.cut.flow.watching() if is_new else nullcontext():
                    pipe.run(backward=backward)
                    summary = self._summary(run) if self._is_last else None
            finally:
                self._run = None
                steps.begin_batch(batch)
        self.last_loss = torch.stack(run.losses).sum() if run.losses else None
        for layer, seen in run.statistics.items():
            layer.join_micro_batches(seen, run.auxiliary[layer])
        outcome, logs, weights = broadcast_object(summary, self._world.shape.pp - 1, self._world.pipe)
        if backward and not self._is_last:
            steps.weights.append(weights, self._world.device)
        with nullcontext() if batch.count else without_traces(module):
            log_joined(module, logs, batch.count)
        return outcome

    def _summary(self, run: _Run) -> list[Any]:
        """Return the last stage's result, logs and weights, for the other stages."""
        counts, weights = [piece.count for piece in run.pieces], [float(weight) for weight in run.weights]
        if len(weights) < len(counts):  # a validation may weigh some micro-batches only
            weights = []
        outcome = joined(run.outcomes, counts, weights or [float(count) for count in counts])
        logs = private_torch.tree_map(lambda v: float(v) if isinstance(v, Tensor) else v, run.logs)
        return [outcome, logs, weights]

    def _pipe(self, run: _Run) -> tuple[Pipe, int, bool]:
        """Return the pipe for batches of the shapes of this one, the elements that it sends for a micro-batch, and True
        if it is new: the use of parameters is then checked.
        """
        leaves = [leaf for call in run.calls for leaf in private_torch.tree_leaves(call)]
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor))
        rows = tuple(piece.rows for piece in run.pieces)
        key = run.is_training, run.step.__name__, rows, shapes, torch.is_inference_mode_enabled()
        is_new = key not in self._pipes
        if is_new:
            from moe_lightning.parallel.pipeline import Pipe  # runs without pipelines need none of what this imports

            hidden = self._probe(run)
            size, rest = divmod(hidden.numel(), rows[0])
            if rest:
                raise ConfigurationError(
                    f"{rows[0]} samples make hidden states of shape {list(hidden.shape)}, and mesh.pp cannot tell how "
                    "many another number makes: let each sample make as many, or drop mesh.pp"
                )
            own: dict[str, Any] = {"device": self._world.device, "requires_grad": run.is_training}
            sent = torch.empty(size * max(rows), dtype=hidden.dtype, **own), torch.empty(1, **own)
            pipe = Pipe(self._schedule, len(rows), sent, self._compute, self._return_to, self._world.pipe)
            self._pipes[key] = pipe, size * max(rows)
            while len(self._pipes) > _MOST_SHAPES:
                self._pipes.popitem(last=False)
        self._pipes.move_to_end(key)
        return *self._pipes[key], is_new

    def _probe(self, run: _Run) -> Tensor:
        """Return the hidden states that arrive at the first block of the first micro-batch, or a tensor of
        their shape.
        """
        quiet = recording_logs(self._module, [], 0, lambda: None)
        self._steps.begin_micro_batch(run.pieces[0], is_training=run.is_training)
        with without_traces(self._module), torch.no_grad(), quiet, run.context():
            try:
                with self.cut.flow.probing():
                    run.step(*run.calls[0])
            except Left as left:
                return left.hidden
        raise ConfigurationError(
            f"{run.step.__name__} calls none of the blocks at which mesh.pp cuts the model: drop mesh.pp"
        )

    def _return_to(self, micro: int) -> None:
        """Return to the samples of a micro-batch, whose keyed noise its backward pass may draw again."""
        assert self._run is not None
        self._steps.begin_batch(self._run.pieces[micro])

    def _compute(self, stage: int, micro: int, arrived: tuple[Tensor, ...]) -> Any:
        """Compute one stage of a micro-batch."""
        run = self._run
        assert run is not None
        piece, is_last = run.pieces[micro], stage == self.cut.num_stages - 1
        hidden, auxiliary = arrived if stage else (None, torch.zeros(1, device=self._world.device))
        layers = self.cut.chunk_layers(stage)
        self._steps.begin_micro_batch(piece, is_training=run.is_training)
        logs = run.logs if is_last else []
        recording = recording_logs(self._module, logs, piece.count, lambda: self._steps.weights.of_mean)
        traces = nullcontext() if piece.count else without_traces(self._module)
        updates = nullcontext() if is_last else without_updates(run.metrics)
        before = self.cut.block_before(stage).carrying(auxiliary.squeeze(0)) if is_last else nullcontext()
        self._seed(piece, 0)  # alike on all stages, of which one computes with the noise and another one its loss
        flow = self.cut.flow.of(stage, hidden, partial(self._seed, piece, 1 + stage))
        with traces, updates, before, flow, recording, run.context():
            try:
                outcome = run.step(*run.calls[micro])
            except Left as left:
                outcome = left.hidden
        share = piece.count / max(1, sum(each.count for each in run.pieces))
        for layer in layers:
            if layer.statistics is not None:
                run.statistics[layer].append(layer.statistics)
            if layer.auxiliary_loss is not None:
                run.auxiliary[layer].append(layer.auxiliary_loss.detach() * share)
        if not is_last:
            return self._sent(outcome, auxiliary, layers, self._wire)
        return self._loss(run, outcome, auxiliary)

    def _seed(self, piece: StepSlice, part: int) -> None:
        """Seed the global generators for a part of the step of a micro-batch."""
        seed = mixed_seed(self._steps.stream.seed, piece.step, piece.micro, piece.offset, part)
        OwnGenerators.seed(seed)
        if self._world.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _sent(self, hidden: Tensor, auxiliary: Tensor, layers: Sequence[MoELayer], wire: int) -> tuple[Tensor, Tensor]:
        """Return the tensors for the next stage: hidden states, and the auxiliary losses so far."""
        for layer in layers:
            if (loss := layer.take_auxiliary_loss()) is not None:
                auxiliary = auxiliary + loss
        flat = hidden.reshape(-1)
        return pad(flat, (0, wire - flat.numel())) if flat.numel() < wire else flat, auxiliary

    def _loss(self, run: _Run, outcome: Any, auxiliary: Tensor) -> Tensor:
        """Return the weighted loss of a micro-batch; zero outside of training."""
        loss = outcome.get("loss") if isinstance(outcome, dict) else outcome
        run.outcomes.append(private_torch.tree_map(lambda v: v.detach() if isinstance(v, Tensor) else v, outcome))
        weight = self._steps.weights.of_batch
        if weight is not None:
            run.weights.append(weight)
        if not run.is_training:
            return torch.zeros((), device=self._world.device)
        if not isinstance(loss, Tensor):
            raise ConfigurationError(
                f"training_step returns {outcome!r} of a micro-batch, and mesh.pp needs a loss of each: return one"
            )
        share = torch.as_tensor(self._steps.share(), dtype=loss.dtype, device=loss.device)
        loss, batch = loss * share, self._steps.batch
        if batch is not None and batch.count:
            run.losses.append(loss.detach())
        return self._scaled(loss + 0.0 * auxiliary.squeeze(0))  # every stage gets a gradient back
