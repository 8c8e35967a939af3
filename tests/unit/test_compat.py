"""Private names of Lightning, torchmetrics, torch and Hydra: used in `moe_lightning/compat` only, and still there.

A canary fails when a release has moved a name: the docstring of the function that uses it says why it is needed.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import lightning
import omegaconf
import pytest
import torch
import torch.distributed as dist
import torchmetrics

from moe_lightning.compat import private_torch
from tests.test_layers import nodes_of

PACKAGE = Path(__file__).parents[2] / "moe_lightning"
COMPAT = tuple(path for path in sorted((PACKAGE / "compat").glob("*.py")) if path.name != "__init__.py")

LIBRARIES = {
    "hydra": hydra,
    "lightning": lightning,
    "omegaconf": omegaconf,
    "torch": torch,
    "torchmetrics": torchmetrics,
}
SEEN = {"hydra": "1.3.8", "lightning": "2.6.6", "omegaconf": "2.3.1", "torch": "2.15.0", "torchmetrics": "1.9.0"}
"""The releases in which the names below were seen."""

WORKERS = "lightning.pytorch.strategies.launchers.multiprocessing._MultiProcessingLauncher"
METHODS = {
    "torch.nn.Module._apply": "self, fn, recurse",
    "torch.utils.data.DataLoader._get_iterator": "self",
    "torch.nn.Module._load_from_state_dict":
        "self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs",
    "torch.nn.modules.dropout._DropoutNd.extra_repr": "self",
    "hydra._internal.utils._run_hydra":
        "args, args_parser, task_function, config_path, config_name, caller_stack_depth",
    "hydra._internal.utils.get_args_parser": "",
    "hydra._internal.config_loader_impl.ConfigLoaderImpl._load_configuration_impl":
        "self, config_name, overrides, run_mode, from_shell, validate_sweep_overrides",
    "omegaconf.Node._get_full_key": "self, key",
    "torch.distributed.distributed_c10d._get_default_store": "",
    "torch.distributed.distributed_c10d._set_pg_timeout": "timeout, group",
    "lightning.pytorch.callbacks.WeightAveraging._copy_average_to_current": "self, pl_module",
    "lightning.pytorch.callbacks.WeightAveraging._swap_models": "self, pl_module",
    "lightning.pytorch.callbacks.ModelCheckpoint._find_last_checkpoints": "self, trainer",
    "lightning.pytorch.callbacks.ModelCheckpoint._monitor_candidates": "self, trainer",
    "lightning.pytorch.callbacks.ModelCheckpoint._save_topk_checkpoint": "self, trainer, monitor_candidates",
    "lightning.pytorch.callbacks.RichModelSummary._summary": "self, trainer, pl_module",
    "lightning.pytorch.loops.evaluation_loop._EvaluationLoop._on_evaluation_model_train": "self",
    "lightning.pytorch.loops.optimization.automatic.ClosureResult.asdict": "self",
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._broadcast_sigterm_tensor": "self",
    "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector._sigterm_notifier_fn": "self, signum, _",
    "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector._slurm_sigusr_handler_fn":
        "self, signum, _",
    "lightning.pytorch.loops.fit_loop._FitLoop._should_accumulate": "self",
    "lightning.pytorch.loops.fit_loop._FitLoop.on_advance_end": "self",
    "lightning.pytorch.loops.fit_loop._FitLoop.run": "self",
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._should_check_val_fx": "self, data_fetcher",
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop.on_advance_end": "self, data_fetcher",
    "lightning.pytorch.plugins.Precision._after_closure": "self, model, optimizer",
    "lightning.pytorch.plugins.Precision.clip_grad_by_norm": "self, optimizer, clip_val",
    f"{WORKERS}._collect_rank_zero_results": "self, trainer, results",
    f"{WORKERS}._recover_results_in_main_process": "self, worker_output, trainer",
    f"{WORKERS}._wrapping_function": "self, process_idx, trainer, function, args, kwargs, return_queue, global_states",
    "lightning.pytorch.strategies.launchers.subprocess_script._SubprocessScriptLauncher.launch":
        "self, function, args, trainer, kwargs",
    "lightning.pytorch.trainer.call._call_callbacks_load_state_dict": "trainer, checkpoint",
    "lightning.pytorch.trainer.call._call_callbacks_on_load_checkpoint": "trainer, checkpoint",
    "lightning.pytorch.trainer.call._call_callbacks_state_dict": "trainer",
    "lightning.pytorch.trainer.call._call_lightning_module_hook": "trainer, hook_name, args, pl_module, kwargs",
    "lightning.fabric.utilities.types._Stateful.state_dict": "self",
    "lightning.pytorch.trainer.connectors.data_connector._worker_check": "trainer, dataloader, name",
    "lightning.pytorch.trainer.connectors.checkpoint_connector._CheckpointConnector.dump_checkpoint":
        "self, weights_only",
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector._LoggerConnector.epoch_end_reached": "self",
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector._LoggerConnector.on_batch_end": "self",
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector._LoggerConnector.reset_results": "self",
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector._LoggerConnector.update_train_step_metrics":
        "self",
    "lightning.pytorch.trainer.connectors.logger_connector.result._ResultCollection.valid_items": "self",
    "lightning.pytorch.utilities.model_summary.model_summary.ModelSummary._get_summary_data": "self",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": "self",
    "torch.distributed._composable_state._insert_module_state": "module, state",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.init_dtype_attrs": "self, mp_policy",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.init_unsharded_param": "self",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.to_sharded": "self",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._lazy_init": "self",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_post_backward_final_callback": "self",
    "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model":
        "module, params_and_buffers_to_ignore",
    "torch.nn.utils.clip_grad._clip_grads_with_norm_": "parameters, max_norm, total_norm, foreach",
    "torch.nn.utils.clip_grad._get_total_norm": "tensors, norm_type, error_if_nonfinite, foreach",
    "torch.utils._python_dispatch.TorchDispatchMode.__torch_dispatch__": "self, func, types, args, kwargs",
    "torch.utils._pytree.tree_leaves": "tree, is_leaf",
    "torch.utils._pytree.tree_map": "func, tree, rests, is_leaf",
}  # fmt: skip
"""Functions that are called or overridden, with their arguments."""

ATTRIBUTES = {
    "torch.distributed.checkpoint.filesystem._StorageInfo": {"length", "offset", "relative_path"},
    "lightning.pytorch.Trainer": {
        "_accelerator_connector", "_checkpoint_connector", "_logger_connector", "_signal_connector",
    },
    "lightning.pytorch.LightningModule": {"_compiler_ctx", "_current_fx_name", "_trainer"},
    "lightning.pytorch.callbacks.ModelCheckpoint": {
        "_defer_save_until_validation", "_last_checkpoint_saved", "_last_global_step_saved", "_last_time_checked",
    },
    "lightning.pytorch.callbacks.WeightAveraging": {
        "_average_model", "_device", "_kwargs", "_latest_update_step", "_use_buffers",
    },
    "lightning.pytorch.callbacks.model_summary.ModelSummary": {"_max_depth"},
    "lightning.pytorch.loggers.CSVLogger": {"_experiment", "_version"},
    "lightning.pytorch.loggers.TensorBoardLogger": {"_experiment"},
    "lightning.pytorch.loggers.WandbLogger": {"_experiment", "_id", "_save_dir", "_wandb_init"},
    "lightning.pytorch.loops.fit_loop._FitLoop": {"_data_fetcher"},
    "torch.optim.lr_scheduler.LRScheduler": {"_step_count"},
    "torch.amp.grad_scaler.GradScaler": {"_per_optimizer_states", "_scale"},
    "torch.utils.data.DataLoader": {"_iterator"},
    "lightning.pytorch.loops.loop._Loop": {"_restarting"},
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop": {
        "_batches_that_stepped", "_results", "_skip_next_val",
    },
    "lightning.pytorch.plugins.io.AsyncCheckpointIO": {"_checkpoint_io", "_error", "_executor"},
    "lightning.pytorch.overrides.distributed._IndexBatchSamplerWrapper": {"_batch_sampler"},
    "lightning.pytorch.trainer.connectors.accelerator_connector._AcceleratorConnector": {"use_distributed_sampler"},
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector._LoggerConnector": {
        "_callback_metrics", "_current_fx", "_first_loop_iter",
    },
    "lightning.pytorch.utilities.model_summary.model_summary.ModelSummary": {"_model"},
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam": {
        "_module_info", "_post_load_hook_handle", "_unsharded_param", "sharded_param", "unsharded_accumulated_grad",
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": {
        "_module_to_pre_load_state_dict_hook_handle", "_module_to_pre_save_state_dict_hook_handle", "fsdp_params",
    },
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": {
        "_fsdp_param_groups", "_modules", "_post_forward_hook_handle", "_pre_forward_hook_handle", "_state_ctx",
    },
    "torchmetrics.Metric": {"_computed", "_defaults", "_update_count"},
}  # fmt: skip
"""Attributes that objects have from their construction, by class."""

PROPERTIES = {
    "lightning.pytorch.Trainer._results",
    "lightning.pytorch.loops.loop._Loop.restarting",
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector._LoggerConnector.should_update_logs",
    "lightning.pytorch.trainer.connectors.logger_connector.result._Metadata.sync",
    "lightning.pytorch.trainer.connectors.logger_connector.result._Sync.group",
    "lightning.pytorch.trainer.connectors.logger_connector.result._Sync.should",
}

OTHERS = {
    "_C", "_IS_INTERACTIVE", "_amp_foreach_non_finite_check_and_unscale_", "_base", "_buffers", "_device_types",
    "_distributed_c10d", "_foreach_mul_", "_get_backend", "_get_sequence_number_for_group",
    "_grouped_mm", "_group_end", "_group_start", "_parameters", "_pickler", "_subclasses",
    "_timeout", "_unpickler", "_values", "_version", "_world", "_compiled_call_impl",
    "_composable", "_current_graph_task_id", "_module_state_mapping", "_orig_cls_mro_index", "_val_check_time_interval",
    "_backward_hooks", "_post_accumulate_grad_hooks",
}  # fmt: skip
"""Tested below."""


def found(name: str) -> object:
    """A module, class or attribute by its dotted name.

    Raises:
        LookupError: it is not there, in a sentence that says where it was.
    """
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:size]))
        except ImportError:
            continue
        for part in parts[size:]:
            if part not in dir(value):
                raise LookupError(gone(name))
            value = inspect.getattr_static(value, part)
        return value
    raise LookupError(gone(name))


def gone(name: str, what: str = "is gone") -> str:
    package = name.split(".")[0]
    version = LIBRARIES[package].__version__
    files = " or ".join(path.name for path in COMPAT)
    return f"{name} {what} in {package} {version}; it was there in {SEEN[package]}: replace its use in {files}"


def test_a_name_that_is_gone_is_reported_with_the_files_that_use_it() -> None:
    with pytest.raises(LookupError, match=r"^torch\.nowhere is gone in torch .*: replace its use in \w+\.py or"):
        found("torch.nowhere")


@pytest.mark.parametrize("name", METHODS)
def test_a_method_takes_what_it_took(name: str) -> None:
    method = found(name)
    method = method.__func__ if isinstance(method, staticmethod) else method
    assert callable(method), gone(name, "is no method any more")
    arguments = ", ".join(inspect.signature(inspect.unwrap(method)).parameters)
    assert arguments == METHODS[name], gone(name, f"takes ({arguments}) instead of ({METHODS[name]})")


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_object_has_what_it_had(name: str) -> None:
    owner = found(name)
    assert isinstance(owner, type)
    missing = ATTRIBUTES[name] - set(assigned(owner))
    assert not missing, gone(f"{name}.{min(missing)}")


def assigned(owner: type) -> Iterator[str]:
    """The names that a class and its bases set on `self`."""
    for base in owner.__mro__[:-1]:
        file = inspect.getsourcefile(base)
        assert file is not None
        yield from assigned_in(Path(file), base.__name__)


@cache
def assigned_in(file: Path, name: str) -> frozenset[str]:
    bodies = [n for n in nodes_of(file) if isinstance(n, ast.ClassDef) and n.name == name]
    nodes = [node for body in bodies for node in ast.walk(body)]
    on_self = {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    return frozenset(
        on_self | {n.target.id for n in nodes if isinstance(n, ast.AnnAssign) and type(n.target) is ast.Name}
    )


@pytest.mark.parametrize("name", sorted(PROPERTIES))
def test_a_property_is_one(name: str) -> None:
    assert isinstance(found(name), property), gone(name, "is no property any more")


def test_modules_keep_their_buffers_and_what_they_compiled() -> None:
    module = torch.nn.BatchNorm1d(2)
    assert module._buffers["running_mean"] is module.running_mean, gone("torch.nn.Module._buffers")
    assert module._parameters["weight"] is module.weight, gone("torch.nn.Module._parameters")
    assert module._compiled_call_impl is None, gone("torch.nn.Module._compiled_call_impl")
    module.compile(backend="eager")
    assert module._compiled_call_impl is not None, gone("torch.nn.Module._compiled_call_impl", "stays None")
    wrapped = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    assert private_torch.is_compiled(wrapped), gone("torch._dynamo.OptimizedModule")


def test_tensors_count_changes_and_know_their_base() -> None:
    tensor = torch.ones(2)
    view = tensor[:1]
    assert view._base is tensor, gone("torch.Tensor._base")
    assert tensor._base is None, gone("torch.Tensor._base")
    assert not private_torch.has_hooks(tensor)
    tensor.requires_grad_().register_hook(lambda gradient: gradient)  # type: ignore[no-untyped-call]
    assert private_torch.has_hooks(tensor), gone("torch.Tensor._backward_hooks")
    other = torch.ones(2, requires_grad=True)
    assert not private_torch.has_hooks(other)
    other.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]
    assert private_torch.has_hooks(other), gone("torch.Tensor._post_accumulate_grad_hooks")
    tensor.requires_grad_(False)
    before = tensor._version
    torch._foreach_mul_([tensor], torch.tensor(2.0))
    assert tensor.tolist() == [2.0, 2.0], gone("torch._foreach_mul_")
    assert tensor._version == before + 1, gone("torch.Tensor._version")


def test_gradients_are_divided_by_a_scale_and_watched_for_overflows() -> None:
    found, gradients = torch.zeros(()), [torch.ones(2), torch.ones(1, dtype=torch.bfloat16)]
    private_torch.SharedScaler.divide(gradients, torch.tensor(0.5), found)
    assert [g.tolist() for g in gradients] == [[0.5, 0.5], [0.5]], gone("torch._amp_foreach_non_finite_check_...")
    assert found == 0
    table = torch.nn.Embedding(3, 1, sparse=True)
    table(torch.tensor([1, 1, 2])).sum().backward()
    private_torch.SharedScaler.divide([table.weight.grad], torch.tensor(0.5), found)
    assert table.weight.grad.to_dense().tolist() == [[0.0], [1.0], [0.5]], gone("torch.Tensor._values")
    private_torch.SharedScaler.divide([torch.tensor([1.0, torch.inf])], torch.tensor(0.5), found)
    assert found == 1
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    state = torch.amp.GradScaler("cpu")._per_optimizer_states[id(optimizer)]
    assert set(state) == {"stage", "found_inf_per_device"}, gone("torch.amp.GradScaler._per_optimizer_states")


def test_operations_pass_through_a_mode_in_forward_and_backward_passes() -> None:
    class Counting(private_torch.OperationMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def during(self, func: Any, args: Any, kwargs: Any) -> Any:
            self.seen.append(func)
            return func(*args, **kwargs)

    x, w, mode = torch.ones(2, 3), torch.nn.Parameter(torch.ones(3, 4)), Counting()
    compiled = torch.compile(lambda x: x.sin().cos(), backend="eager", fullgraph=True)
    with mode:
        (x @ w).sum().backward()
        compiled(x)
        torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        torch.nn.functional.grouped_mm(
            torch.ones(8, 8).bfloat16(), torch.ones(1, 8, 8).bfloat16(), offs=torch.tensor([8]).int()
        )
    assert mode.seen.count(torch.ops.aten.mm.default) == 2, gone("TorchDispatchMode")
    assert private_torch.GROUPED_MM in mode.seen, gone("torch.ops.aten._grouped_mm")


def test_tensors_without_memory() -> None:
    existing = torch.empty(2, 3, device="meta")
    with private_torch.without_memory():
        large = torch.zeros(1 << 48) + 1
        made = torch.empty_like(existing, device="cpu")
    assert (large.untyped_storage().nbytes(), made.device.type) == (1 << 50, "cpu"), gone("FakeTensorMode")


def test_functions_that_clip_are_replaced_under_every_name() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    early = torch.nn.utils.get_total_norm  # as by `from torch.nn.utils import get_total_norm`
    private_torch.clip_norms_by(lambda tensors, order: [*tensors, torch.tensor(12.0)], lambda *_: None)
    try:
        for norm_of in (early, torch.nn.utils.get_total_norm):
            assert float(norm_of([parameter.grad])) == 13.0, gone("torch.nn.utils.get_total_norm", "calls another body")
        assert float(torch.nn.utils.clip_grad_norm_([parameter], 1e9)) == 13.0
        assert float(private_torch.stock_norm([parameter.grad])) == 5.0
        torch.nn.utils.clip_grads_with_norm_([parameter], 1.0, torch.tensor(5.0))
        assert parameter.grad.norm() == pytest.approx(1.0)
    finally:
        private_torch.clip_norms_as_usual()
    assert float(early([parameter.grad])) == pytest.approx(1.0)


def test_a_backward_pass_has_a_number() -> None:
    tensor, numbers = torch.ones(1, requires_grad=True), []
    tensor.register_hook(lambda gradient: numbers.append(torch._C._current_graph_task_id()))
    tensor.sum().backward()
    assert torch._C._current_graph_task_id() == -1, gone("torch._C._current_graph_task_id")
    assert numbers[0] != -1, gone("torch._C._current_graph_task_id")


def test_groups_keep_their_private_names(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        group, cpu = dist.distributed_c10d._get_default_group(), torch.device("cpu")
        assert group._get_backend(cpu).name() == "gloo", gone("torch.distributed.ProcessGroup._get_backend")
        assert cpu in group._device_types, gone("torch.distributed.ProcessGroup._device_types")
        assert group._get_sequence_number_for_group() >= 0
        assert dist.distributed_c10d._world.group_count >= 0, gone("torch.distributed.distributed_c10d._world")
        since = time.time_ns()
        dist.all_reduce(torch.zeros(2, 3))
        deadline = time.monotonic() + 10.0
        while not (entry := private_torch.recorded_collectives(since)[0])["retired"] and time.monotonic() < deadline:
            time.sleep(0.01)  # a thread of the group retires it
        assert entry["profiling_name"] == "gloo:all_reduce", gone("torch._C._distributed_c10d._dump_fr_trace_json")
        assert entry["input_sizes"] == [[2, 3]]
        assert entry["process_group"] == [group.group_name, group.group_desc]
        assert entry["collective_seq_id"] == group._get_sequence_number_for_group()
        assert entry["retired"]
    finally:
        dist.destroy_process_group()


def test_objects_of_collectives_are_pickled_by_names_that_can_be_replaced() -> None:
    source = inspect.getsource(dist.distributed_c10d)
    for name in ("_pickler", "_unpickler"):
        assert hasattr(dist.distributed_c10d, name), gone(f"torch.distributed.distributed_c10d.{name}")
        assert f" {name}(" in source, gone(f"torch.distributed.distributed_c10d.{name}", "is not used any more")


def test_nccl_keeps_its_private_names() -> None:
    if dist.is_nccl_available():
        for name in ("_group_start", "_group_end", "abort"):
            assert hasattr(dist.ProcessGroupNCCL, name), gone(f"torch.distributed.ProcessGroupNCCL.{name}")
        assert hasattr(dist.ProcessGroupNCCL.Options(), "_timeout"), gone(
            "torch.distributed.ProcessGroupNCCL.Options._timeout"
        )


def test_fully_shard_leaves_what_undoing_takes_away() -> None:
    """That nothing of it stays is tested with real ranks."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule, fully_shard

    assert {type(STATE_KEY), type(REGISTRY_KEY)} == {str}, gone("torch.distributed._composable.contract.STATE_KEY")
    assert hasattr(_module_state_mapping, "pop"), gone("torch.distributed._composable_state._module_state_mapping")
    assert FSDPModule._orig_cls_mro_index == 2, gone("torch.distributed.fsdp.FSDPModule._orig_cls_mro_index")
    source = inspect.getsource(inspect.unwrap(fully_shard))
    for mark in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
        assert f"{mark} = True" in source, gone(f"the mark {mark} of fully_shard")


def test_lightning_knows_prompts() -> None:
    assert found("lightning.fabric.utilities.imports._IS_INTERACTIVE") in (True, False)


def test_a_trainer_keeps_whether_it_validates_by_time() -> None:
    text = Path(str(inspect.getsourcefile(lightning.pytorch.Trainer))).with_name("setup.py")
    assert "trainer._val_check_time_interval = " in text.read_text(), gone(
        "lightning.pytorch.Trainer._val_check_time_interval"
    )


# ---------------------------------------------------------------------- nothing private elsewhere


def private_names(file: Path, *, own: bool = True) -> Iterator[tuple[int, str]]:
    """Line and name of every private attribute, imported name and attribute given as a string; with `own`, of functions
    and of attributes of `self` and `cls`, too."""
    for node in nodes_of(file):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if own or not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.lineno, node.attr
        elif isinstance(node, ast.FunctionDef) and is_private(node.name) and own:
            yield node.lineno, node.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("moe_lightning"):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, name) for name in names if is_private(name))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr"):
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from ((node.lineno, text) for text in texts if is_private(text))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def test_every_private_name_of_the_compatibility_layer_has_a_canary() -> None:
    known = {name.rpartition(".")[2] for name in (*METHODS, *PROPERTIES)} | set().union(*ATTRIBUTES.values()) | OTHERS
    known |= {part for name in (*METHODS, *PROPERTIES, *ATTRIBUTES) for part in name.split(".")}
    of_the_files = {
        "_compute_alone",
        "_continue_averages",
        "_copy",
        "_decision",
        "_deciders",
        "_end_epoch_without_restart",
        "_fetcher",
        "_gather_in",
        "_is_reduced",
        "_keep_freezing",
        "_leave_validation_out",
        "_let_clipping_call",
        "_owners_of",
        "_parameters_of",
        "_replace",
        "_restore",
        "_savers",
        "_take_back",
        "_undo_group",
    }
    of_the_files |= {"_literal", "_plain", "_saved", "_text", "_without_interpolations"}
    assert {name for file in COMPAT for _, name in private_names(file)} - known == of_the_files


def test_nothing_private_of_lightning_is_touched_elsewhere() -> None:
    """Names of its classes: on objects of theirs, or in classes that derive from them."""
    private = lightning_names()
    assert {"_should_accumulate", "_trainer", "_setup_model", "_launcher"} <= private
    own = {name for file in sources() for name in defined_names(file)}
    wrong = [
        f"{file}:{line}: {name}"
        for file in sources()
        for line, name in private_names(file)
        if name in private and (name not in own or name in inherited(file))
    ]
    assert not wrong


def test_nothing_private_of_torch_or_hydra_is_touched_elsewhere() -> None:
    """Names that no file of ours defines, and names of torch's objects wherever they are not attributes of `self`."""
    own = {name for file in (*sources(), *COMPAT) for name in defined_names(file)}
    own |= {"_replace", "_fields"}  # of every NamedTuple
    names = torch_names()
    assert {"_parameters", "_version", "_base", "_get_backend", "_set_pg_timeout", "_foreach_mul_"} <= names
    wrong = [
        f"{file}:{line}: {name}"
        for file in sources()
        for line, name in private_names(file, own=False)
        if (name in names or name not in own) and (file.name, name) not in OF_OTHER_LIBRARIES
    ]
    assert not wrong


OF_OTHER_LIBRARIES = {
    *((file, "_exit") for file in ("worker.py", "commands.py", "token_folder.py", "loader.py")),
    ("worker.py", "_shutdown"),
    ("worker.py", "_run_exitfuncs"),
    *((file, "_current_frames") for file in ("worker.py", "hangs.py", "abort.py")),
    ("arguments.py", "_SubParsersAction"),
    ("train.py", "_option_string_actions"),
    ("export.py", "_model_mapping"),
    ("export.py", "_keep_in_fp32_modules_strict"),
    ("attention.py", "_supports_attention_backend"),
    ("attention.py", "_supports_sdpa"),
    ("attention.py", "_attn_implementation"),
    ("loading.py", "_keys_to_ignore_on_load_unexpected"),
    ("streams.py", "_ex_iterable"),
    ("streams.py", "_distributed"),
    ("objects.py", "_pipe_file"),
}
"""Names of Python, transformers, datasets and fsspec."""


def defined_names(file: Path) -> set[str]:
    """Private names that a file of ours defines: functions, classes, fields, and attributes that it sets on `self`."""
    nodes = nodes_of(file)
    given = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    given |= {
        n.attr
        for n in nodes
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and isinstance(n.value, ast.Name)
        if n.value.id == "self"
    }
    return given | {n.target.id for n in nodes if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


@cache
def torch_names() -> frozenset[str]:
    """Private names of torch's modules, tensors, optimizers, groups and stores, and of the functions beside them."""
    owners: list[object] = [torch, dist, dist.distributed_c10d, dist.ProcessGroup, dist.Store, dist.FileStore]
    owners += [torch.nn.Module(), torch.Tensor, torch.optim.Optimizer, torch.utils.data.DataLoader]
    return frozenset(name for owner in owners for name in dir(owner) if is_private(name))


def sources() -> list[Path]:
    return [file for file in sorted(PACKAGE.rglob("*.py")) if file not in COMPAT]


@cache
def lightning_names() -> frozenset[str]:
    """Every private attribute, method and class of Lightning, and of torchmetrics' Metric."""
    folder = Path(lightning.__path__[0])
    files = [*folder.glob("pytorch/**/*.py"), *folder.glob("fabric/**/*.py")]
    files.append(Path(str(inspect.getsourcefile(torchmetrics.Metric))))
    given = re.compile(r"(?:def |class |self\.)(_[a-zA-Z]\w*)")
    return frozenset(name for file in files for name in given.findall(file.read_text()))


@cache
def inherited(file: Path) -> frozenset[str]:
    """Private names that the classes of a file have from Lightning."""
    module = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
    classes = [node.name for node in nodes_of(file) if isinstance(node, ast.ClassDef) and node.bases]
    if not classes or "lightning.pytorch" not in file.read_text():
        return frozenset()
    found_names = set[str]()
    for name in classes:
        owner = getattr(importlib.import_module(module), name, None)
        for base in owner.__mro__ if isinstance(owner, type) else ():
            if base.__module__.startswith("lightning."):
                path = inspect.getsourcefile(base)
                assert path is not None
                body = next(n for n in nodes_of(Path(path)) if isinstance(n, ast.ClassDef) and n.name == base.__name__)
                found_names |= {n.name for n in ast.walk(body) if isinstance(n, ast.FunctionDef)}
                found_names |= assigned_in(Path(path), base.__name__)
    return frozenset(name for name in found_names if is_private(name))


def test_collectives_of_torch_are_told_from_what_builds_groups() -> None:
    waits = (dist.all_reduce, dist.all_to_all_single, dist.barrier, dist.broadcast, dist.recv)
    builds = (dist.new_group, dist.init_process_group, dist.destroy_process_group)
    told = {f.__name__: private_torch.is_collective(inspect.unwrap(f).__code__) for f in (*waits, *builds)}
    assert told == {f.__name__: f in waits for f in (*waits, *builds)}, gone(
        "torch.distributed: the local `work` of its collectives"
    )
