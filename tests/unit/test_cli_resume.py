"""What a command changes about the run that it goes on with."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, SequentialLR
from torch.utils.data import DataLoader

from moe_lightning import GPTModule
from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.callbacks.latest_checkpoint import LatestCheckpoint
from moe_lightning.checkpoint.agent_handle import AgentStatus
from moe_lightning.checkpoint.files import write_file
from moe_lightning.checkpoint.storage import place_of
from moe_lightning.cli import train, training
from moe_lightning.cli.resume import changes, check_changes, config_of, effect, goes_on
from moe_lightning.cli.run_directory import RunDirectory
from moe_lightning.cli.training import ResumedEarlyStopping, ResumedWithOverrides, RunRecord
from moe_lightning.elastic.worker import Interrupted
from moe_lightning.errors import ConfigurationError
from moe_lightning.models.gpt_module import OptimizerConfig, WarmupAndDecay
from tests.distributed.training import TINY, RandomTokens, quiet, quiet_trainer

FORMER: dict[str, Any] = {
    "run_dir": "/old/outputs/x",
    "resume": True,
    "model": {
        "_target_": "moe_lightning.models.gpt.GPTConfig",
        "d_model": 64,
        "dropout": 0.0,
        "router": {"top_k": 2, "noisy_top_k": False, "forced": None},
    },
    "data": {"source": "a.txt", "tokenizer": "bytes", "num_workers": 0, "seed": 1},
    "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]},
    "trainer": {"max_steps": 10, "default_root_dir": "/old/outputs/x"},
    "seed": 1,
}


def _with(**leaves: Any) -> dict[str, Any]:
    given = {key: dict(value) if isinstance(value, dict) else value for key, value in FORMER.items()}
    given["model"]["router"] = dict(given["model"]["router"])
    for key, value in leaves.items():
        *groups, name = key.split("__")
        node = given
        for group in groups:
            node = node[group]
        node[name] = value
    return given


def test_nothing_differs() -> None:
    assert changes(FORMER, _with(resume="x.ckpt")) == []
    assert effect([]) == ""


def test_a_moved_run_is_the_same_run() -> None:
    assert changes(FORMER, _with(run_dir="/new/x", trainer__default_root_dir="/new/x")) == []


def test_what_takes_effect_is_told() -> None:
    found = changes(FORMER, _with(trainer__max_steps=20, model__dropout=0.1, data__num_workers=2))
    check_changes(found, overrides=False)
    assert effect(found) == "; changed: model.dropout 0.0 -> 0.1, data.num_workers 0 -> 2, trainer.max_steps 10 -> 20"


@pytest.mark.parametrize(
    ("key", "value"),
    [("optimizer__lr", 1e-4), ("optimizer__betas", [0.9, 0.99]), ("data__source", "b.txt"), ("seed", 2)],
)
def test_what_must_be_asked_for(key: str, value: Any) -> None:
    found = changes(FORMER, _with(**{key: value}))
    with pytest.raises(
        ConfigurationError, match=r"other settings: .* -> .*; give resume_overrides=true .*resume=false"
    ):
        check_changes(found, overrides=False)
    check_changes(found, overrides=True)


@pytest.mark.parametrize(
    ("model", "option"),
    [
        ("models.gpt.GPTConfig", "router.top_k"),
        ("models.gpt.GPTConfig", "router.jitter"),
        ("models.gpt.GPTConfig", "router.forced.kind"),
        ("models.swin.SwinConfig", "drop_path_rate"),
        ("models.huggingface.module.HuggingFaceConfig", "router.z_loss_coef"),
    ],
)
def test_options_that_leave_the_trained_function_may_change(model: str, option: str) -> None:
    def config(value: int) -> dict[str, Any]:
        node: Any = value
        for name in reversed(option.split(".")):
            node = {name: node}
        return {"model": {"_target_": f"moe_lightning.{model}", **node}}

    (change,) = changes(config(1), config(2))
    check_changes([change], overrides=False)
    assert change.key == f"model.{option}"


@pytest.mark.parametrize(
    ("key", "value"), [("model__d_model", 32), ("model__router__noisy_top_k", True), ("data__tokenizer", "bpe:512")]
)
def test_what_cannot_change(key: str, value: Any) -> None:
    found = changes(FORMER, _with(**{key: value}))
    told = r"has another shape or meaning: .* -> .*; leave it as it was, "
    with pytest.raises(ConfigurationError, match=rf"of this run {told}give this run another run_name, or start over"):
        check_changes(found, overrides=True)
    with pytest.raises(ConfigurationError, match=rf"^the checkpoint {told}or name another checkpoint$"):
        check_changes(found, overrides=True, is_named=True)


def _pretrained(place: str | None, tokenizer: str, target: str = "huggingface.module.HuggingFaceConfig") -> Any:
    return {
        "model": {"_target_": f"moe_lightning.models.{target}", "pretrained": place},
        "data": {"tokenizer": tokenizer},
    }


def test_an_original_model_may_have_moved() -> None:
    former, given = (_pretrained(place, f"{place}/tokenizer.json") for place in ("/old/olmoe", "ORG/olmoe"))
    found = changes(former, given)
    assert [str(change) for change in found] == ["model.pretrained '/old/olmoe' -> 'ORG/olmoe'"]
    with pytest.raises(ConfigurationError, match=r"other settings: model.pretrained .*give resume_overrides=true"):
        check_changes(found, overrides=False)
    check_changes(found, overrides=True)


@pytest.mark.parametrize(
    ("former", "given"),
    [
        (_pretrained(None, "bytes", "swin.SwinConfig"), _pretrained("/new", "bytes", "swin.SwinConfig")),
        (_pretrained("/old", "/old/tokenizer.json"), _pretrained("/old", "/new/tokenizer.json")),
        (_pretrained("/old", "/my/tokenizer.json"), _pretrained("/new", "/new/tokenizer.json")),
    ],
)
def test_what_belongs_to_an_original_model_does_not_change(former: Any, given: Any) -> None:
    with pytest.raises(ConfigurationError, match="another shape or meaning"):
        check_changes(changes(former, given), overrides=True)


@pytest.mark.parametrize("nothing", [None, {}])
@pytest.mark.parametrize("key", ["overrides", "adapter", "upcycling"])
@pytest.mark.parametrize("is_dropped", [False, True])
def test_what_was_empty_cannot_change_either(key: str, nothing: Any, is_dropped: bool) -> None:
    target = "moe_lightning.models.huggingface.module.HuggingFaceConfig"
    values = [{"model": {"_target_": target, key: value}} for value in (nothing, {"kind": "lora"})]
    (change,) = changes(*(reversed(values) if is_dropped else values))
    assert change.key == f"model.{key}"
    with pytest.raises(ConfigurationError, match=r"another shape or meaning: model\..* -> .*; leave it as it was"):
        check_changes([change], overrides=True)


def _resumed(schedule: Any, **options: Any) -> tuple[Any, ResumedWithOverrides, Any]:
    """A trainer whose optimizer and scheduler have been restored from step 5, the callback, and the group's values."""
    states, optimizer, scheduler = [], None, None
    for given in ({"lr": 1.0, "weight_decay": 0.3}, options):
        optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], **given)
        scheduler = schedule(optimizer)
        states.append((optimizer, scheduler))
    for _ in range(5):
        states[0][0].step()
        states[0][1].step()
    config = SimpleNamespace(scheduler=scheduler)
    trainer = SimpleNamespace(optimizers=[optimizer], lr_scheduler_configs=[config])
    callback = ResumedWithOverrides()
    callback.on_fit_start(trainer, None)
    for new, former in zip(states[1], states[0], strict=True):
        new.load_state_dict(former.state_dict())
    return trainer, callback, states[0][0].param_groups[0]


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: CosineAnnealingLR(optimizer, 10),
        lambda optimizer: OneCycleLR(optimizer, 0.5, 10),
        lambda optimizer: SequentialLR(
            optimizer, [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 7)], [3]
        ),
    ],
    ids=["cosine", "one cycle", "sequence"],
)
def test_other_schedulers_continue_from_their_own_rate(schedule: Any) -> None:
    trainer, callback, saved = _resumed(schedule, lr=0.1, weight_decay=0.0)
    with pytest.warns(UserWarning, match=r"leaves learning rate, betas and momentum to \w+, which continues with"):
        callback.on_train_start(trainer, None)
    callback.on_train_batch_start(trainer, None, None, 0)
    (group,) = trainer.optimizers[0].param_groups
    assert [group[name] for name in ("lr", "betas")] == [saved[name] for name in ("lr", "betas")]
    assert group["weight_decay"] == 0.0


def test_a_group_that_a_callback_has_added_is_left_alone() -> None:
    def schedule(optimizer: Any) -> WarmupAndDecay:
        return WarmupAndDecay(optimizer, OptimizerConfig(warmup_steps=0, decay="cosine", min_lr_ratio=0.0), 10)

    trainer, callback, _ = _resumed(schedule, lr=0.1)
    callback.on_train_start(trainer, None)
    optimizer, (config,) = trainer.optimizers[0], trainer.lr_scheduler_configs
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.4})
    rates = []
    for _ in range(3):
        callback.on_train_batch_start(trainer, None, None, 0)
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        config.scheduler.step()
    shares = [(1 + math.cos(math.pi * step / 10)) / 2 for step in (5, 6, 7)]
    assert [own for own, _ in rates] == pytest.approx([0.1 * share for share in shares])
    assert [added for _, added in rates] == pytest.approx([0.4, *(0.4 * share for share in shares[1:])])


def test_the_configuration_beside_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-1.ckpt"
    assert config_of(checkpoint) is None
    (tmp_path / "config.yaml").write_text("run_dir: here\n")
    assert config_of(checkpoint) == {"run_dir": "here"}
    (tmp_path / "checkpoints").mkdir()
    for of_others in ("- seed\n", "seed: 3\ndata: /mnt/books\n", "a: &a {lr: 1}\nb: *a\n"):
        (tmp_path / "checkpoints" / "config.yaml").write_text(of_others)
        assert config_of(checkpoint) == {"run_dir": "here"}
    (tmp_path / "config.yaml").write_text("seed: [3\n")
    with pytest.raises(ConfigurationError, match=r"config\.yaml cannot be read"):
        config_of(checkpoint)


def _run(folder: Path, *, began: Any, steps: Sequence[int] = (4,)) -> RunDirectory:
    """A run that has trained from what `resume` said."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"run_dir": str(folder), "resume": began}))
    for step in steps:
        write_file({"global_step": step}, folder / f"checkpoints/step-{step:07d}.ckpt")
    return RunDirectory(folder)


def _goes_on(directory: RunDirectory, resume: Any, task: str = "train") -> bool:
    return goes_on({"run_dir": str(directory.path), "resume": resume, "task": task})


def test_a_repeated_command_goes_on_from_the_checkpoints_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A named checkpoint is where the run began; later ones of another beginning would be taken for the newest."""
    monkeypatch.chdir(tmp_path)
    _run(tmp_path / "first", began=True, steps=(4, 8))
    start = "first/checkpoints/step-0000004.ckpt"
    assert not _goes_on(RunDirectory(tmp_path / "new"), start)
    assert _goes_on(_run(tmp_path / "second", began=start), start)
    assert not _goes_on(RunDirectory(tmp_path / "second"), start, task="validate")
    newest = "first/checkpoints/step-0000008.ckpt"
    assert not _goes_on(RunDirectory(tmp_path / "first"), newest), "it is where the run is"
    for other in ("first", "third"):
        _run(tmp_path / "third", began="other.ckpt") if other == "third" else None
        with pytest.raises(ConfigurationError, match=f"{other} has .* and did not begin at resume={start}: leave that"):
            _goes_on(RunDirectory(tmp_path / other), start)
    with pytest.raises(ConfigurationError, match=r"resume=none\.ckpt does not exist"):
        _goes_on(RunDirectory(tmp_path / "third"), "none.ckpt")


@pytest.mark.parametrize("began", [False, "first/checkpoints/step-0000004.ckpt"])
def test_the_first_command_goes_on_after_one_that_left_resume_out(
    began: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    _run(tmp_path / "first", began=True)
    second = _run(tmp_path / "second", began=began)
    second.record({"run_dir": str(second.path), "resume": True})
    assert _goes_on(second, began)


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_a_restart_does_not_start_over_again(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, earlier = _run(tmp_path / "mine", began=False), _run(tmp_path / "earlier", began=True)
    assert [_goes_on(directory, False) for directory in (mine, earlier)] == [False, False]
    monkeypatch.setenv(variable, "0")
    assert [_goes_on(directory, False) for directory in (mine, earlier)] == [False, False]
    monkeypatch.setenv(variable, "1")
    assert [_goes_on(directory, False) for directory in (mine, earlier)] == [True, False]


def _until_no_progress(folder: Path, *, patience: int, start: Path | None = None) -> int:
    judge = EarlyStopping("val/loss", min_delta=9.0, patience=patience)
    callbacks = [judge, ResumedEarlyStopping(True), LatestCheckpoint(folder, every_n_train_steps=100)]
    trainer = quiet_trainer(callbacks=callbacks, max_epochs=4, val_check_interval=2, enable_checkpointing=True)
    training, validation = (DataLoader(RandomTokens(96), batch_size=12) for _ in range(2))
    trainer.fit(GPTModule(TINY), training, validation, ckpt_path=start)
    return trainer.global_step


def test_a_run_that_early_stopping_has_ended_trains_on_with_more_patience_only(tmp_path: Path) -> None:
    assert _until_no_progress(tmp_path, patience=1) == 4
    saved = tmp_path / "step-0000004.ckpt"
    with pytest.warns(UserWarning, match="EarlyStopping has ended this run after step 4: to train on, raise"):
        assert _until_no_progress(tmp_path, patience=1, start=saved) == 4
    assert _until_no_progress(tmp_path, patience=2, start=saved) == 6


def test_early_stopping_ends_only_its_own_run_and_says_what_helps() -> None:
    judge = EarlyStopping("val/loss", patience=3)

    def resumed(start: bool | str, **state: Any) -> tuple[bool, bool]:
        trainer: Any = SimpleNamespace(
            callbacks=[judge], state=SimpleNamespace(fn=TrainerFn.FITTING), ckpt_path="a.ckpt", should_stop=False
        )
        saved = {"global_step": 4, "callbacks": {judge.state_key: {"wait_count": 0, "patience": 1, **state}}}
        ResumedEarlyStopping(start).on_load_checkpoint(trainer, GPTModule(TINY), saved)
        return trainer.should_stop, judge.state_key in saved["callbacks"]

    assert resumed(True) == (False, True), "Lightning before 2.6 saves no reason"
    assert resumed("a.ckpt", wait_count=3) == (False, False), "another run begins there"
    with pytest.warns(UserWarning, match="to train on, leave EarlyStopping out"):
        assert resumed(True, stopping_reason=EarlyStoppingReason.STOPPING_THRESHOLD.value)[0]


def test_what_starts_over_does_not_read_the_former_run(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", began=False)
    run.config.write_bytes(b"a: \xff")
    assert not _goes_on(run, False)


@pytest.mark.parametrize("resume", [True, False])
def test_what_a_command_already_says_is_no_advice(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart resumes under resume=false too."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run = _run(tmp_path / "run", began=resume)
    config = {"run_dir": str(run.path), "resume": resume, "task": "train", "resume_overrides": False, "callbacks": {}}
    state = train._prepare(run, config, is_first=True)[1]
    finished = train._finished(run, {**config, "trainer": {"max_steps": 4}})
    assert "resuming after step 4 (" in state
    assert "has finished its 4 steps: give this run another run_name" in finished
    assert ["resume=false" in said for said in (state, finished)] == [resume, resume]


def test_a_finished_run_is_not_one_of_other_settings(tmp_path: Path) -> None:
    """Else a search would take its metrics for those of the command."""
    run = _run(tmp_path / "run", began=True)
    former = {"run_dir": str(run.path), "resume": True, "task": "train", "optimizer": {"lr": 1e-3}}
    given = {**former, "resume_overrides": False, "trainer": {"max_steps": 4}}
    run.config.write_text(yaml.safe_dump(former))
    assert train._finished(run, given)
    with pytest.raises(ConfigurationError, match=r"trained with other settings: optimizer.lr 0.001 -> 0.1"):
        train._finished(run, {**given, "optimizer": {"lr": 1e-1}})
    with pytest.raises(ConfigurationError, match=r"none left for other settings; changed: optimizer.lr 0.001 -> 0.1"):
        train._finished(run, {**given, "optimizer": {"lr": 1e-1}, "resume_overrides": True})
    with pytest.raises(ConfigurationError, match=r"4 steps, and trainer.max_steps=3 asks for fewer: give this run"):
        train._finished(run, {**given, "trainer": {"max_steps": 3}})
    passed = {**former, "resume_overrides": False, "trainer": {"max_steps": 3}}  # by the second optimizer of a batch
    run.config.write_text(yaml.safe_dump(passed))
    assert "has finished its 4 steps: give" in train._finished(run, passed)


@pytest.mark.parametrize(("starts_over", "how"), [(False, ""), (True, " with resume=true")])
def test_what_an_interrupted_command_does_next(starts_over: bool, how: str, tmp_path: Path) -> None:
    told = train._outlook(_run(tmp_path / "run", began=True), starts_over=starts_over)
    assert told.endswith(f"step-0000004.ckpt is saved, and the same command{how} resumes after step 4")


def test_a_configuration_that_is_damaged_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ConfigurationError, match=r"config.yaml cannot be read \(invalid start byte\): fix it"):
        config_of(tmp_path / "checkpoints" / "last.ckpt")


ALIASES = "run_dir: here\na0: &a0 [1]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 8)}]\n" for level in range(1, 12)
)


@pytest.mark.parametrize("text", [ALIASES, f"a: {'[' * 2000}{']' * 2000}"])
def test_a_configuration_that_unfolds_without_end_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=r"config.yaml cannot be read \(no plain YAML\): fix it"):
        config_of(tmp_path / "checkpoints" / "last.ckpt")


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"router": {"top_k": 1, "aux_loss_coef": 0.5}}, None),
        ({"init_std": 0.5}, None),
        (
            {"router": {"scale": 2.0}},
            r"has another shape or meaning: model.router.scale 1.0 -> 2.0; .* or name another checkpoint",
        ),
    ],
    ids=str,
)
def test_a_checkpoint_away_from_its_run_is_compared_with_the_model(
    options: dict[str, Any], refusal: str | None, tmp_path: Path
) -> None:
    quiet()
    data = DataLoader(RandomTokens(16), batch_size=8)
    trainer = quiet_trainer(max_steps=1)
    trainer.fit(GPTModule(TINY), data)
    trainer.save_checkpoint(tmp_path / "copy.ckpt")
    config = {"model": {"_target_": "moe_lightning.models.gpt.GPTConfig"}, "resume": "a", "resume_overrides": False}
    record = RunRecord(RunDirectory(tmp_path), config)
    trainer, module = quiet_trainer(max_steps=2, callbacks=[record]), GPTModule({**TINY, **options})
    with nullcontext() if refusal is None else pytest.raises(ConfigurationError, match=refusal):
        trainer.fit(module, data, ckpt_path=tmp_path / "copy.ckpt", weights_only=True)


@pytest.mark.parametrize("fn", [TrainerFn.FITTING, TrainerFn.VALIDATING])
def test_a_validation_does_not_go_on_with_other_settings(fn: TrainerFn, tmp_path: Path) -> None:
    """The original model may lie elsewhere; what the weights mean is compared all the same."""
    target = {"_target_": "moe_lightning.models.huggingface.module.HuggingFaceConfig"}
    record = RunRecord(RunDirectory(tmp_path), {"model": target, "resume": True, "resume_overrides": False})
    trainer: Any = SimpleNamespace(state=SimpleNamespace(fn=fn))

    def load(**given: Any) -> None:
        former = {"pretrained": "/a/base", "overrides": {"num_experts_per_tok": 2}}
        module: Any = SimpleNamespace(hparams={"config": former | given})
        record.on_load_checkpoint(trainer, module, {"hyper_parameters": {"config": former}})

    is_refused = pytest.raises(ConfigurationError, match=r"other settings: model.pretrained '/a/base' -> ")
    with is_refused if fn == TrainerFn.FITTING else nullcontext():
        load(pretrained="/b/base")
    cure = "give this run another run_name" if fn == TrainerFn.FITTING else "or name another checkpoint"
    with pytest.raises(ConfigurationError, match=f"another shape or meaning: .*, {cure}"):
        load(overrides={"num_experts_per_tok": 1})


def test_a_run_in_an_object_store_is_compared_with_its_recorded_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_lightning.checkpoint.directory.headings", lambda store: ["a checkpoint"])
    store = {"callbacks": {"partial_experts_checkpoint": {"dirpath": "s3://bucket/x"}}, "task": "train"}
    directory, options = RunDirectory(tmp_path), {"run_dir": str(tmp_path), "resume_overrides": False}
    directory.record({**FORMER, **store, **options})
    state = train._prepare(directory, {**FORMER, **store, **options}, is_first=True)
    assert state == (None, ", resuming from s3://bucket/x")
    with pytest.raises(ConfigurationError, match=r"optimizer\.lr 0\.001 -> 0\.0001; give resume_overrides=true"):
        train._prepare(directory, {**_with(optimizer__lr=1e-4), **store, **options}, is_first=True)


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_fit_end", "on_exception"])
@pytest.mark.parametrize("step", [2, 4, 8], ids=["before a damaged one", "in its place", "newest"])
def test_new_settings_are_recorded_once_a_checkpoint_has_them(tmp_path: Path, hook: str, step: int) -> None:
    """A command that is killed before leaves a checkpoint of the former ones."""
    directory, options = _run(tmp_path, began=True), {"run_dir": str(tmp_path), "task": "train", "callbacks": {}}
    former, given = ({**_with(optimizer__lr=lr), **options, "resume_overrides": False} for lr in (1e-3, 1e-4))
    trainer: Any = SimpleNamespace(is_global_zero=True, loggers=[], global_step=4)
    RunRecord(directory, former).on_train_start(trainer, GPTModule(TINY))
    record = RunRecord(directory, {**given, "resume_overrides": True})
    record.on_train_start(trainer, GPTModule(TINY))
    record.on_train_batch_start(trainer, GPTModule(TINY), None, 0)
    train._prepare(directory, former, is_first=True)
    with pytest.raises(ConfigurationError, match=r"optimizer\.lr 0\.001 -> 0\.0001; give resume_overrides=true"):
        train._prepare(directory, given, is_first=True)
    write_file({"global_step": step}, directory.checkpoints / f"step-000000{step}.ckpt")
    record.on_train_start(trainer, GPTModule(TINY))  # the world has changed since
    getattr(record, hook)(trainer, GPTModule(TINY), *([RuntimeError()] if hook == "on_exception" else []))
    train._prepare(directory, given, is_first=True)
    with pytest.raises(ConfigurationError, match=r"optimizer\.lr 0\.0001 -> 0\.001; give resume_overrides=true"):
        train._prepare(directory, former, is_first=True)


@pytest.mark.parametrize("is_closed", [False, True], ids=["between steps", "at the end"])
def test_new_settings_are_recorded_once_a_store_has_a_checkpoint_of_them(
    is_closed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = [place_of("s3://bucket/x/step-00000004")]
    monkeypatch.setattr(training, "headings", lambda store: [(place, "a manifest") for place in listed])
    partial: Any = PartialExpertsCheckpoint("s3://bucket/x")
    store = {"callbacks": {"partial_experts_checkpoint": {"dirpath": "s3://bucket/x"}}, "run_dir": str(tmp_path)}
    directory = RunDirectory(tmp_path)
    directory.record({**FORMER, **store})
    record = RunRecord(directory, {**_with(optimizer__lr=1e-4), **store, "resume_overrides": True})
    trainer: Any = SimpleNamespace(is_global_zero=True, loggers=[], callbacks=[record, partial])
    record.on_train_start(trainer, GPTModule(TINY))
    for committed, rate in ((None, 1e-3), (str(listed[0]), 1e-3), ("s3://bucket/x/step-00000008", 1e-4)):
        status = AgentStatus(committed_path=committed)
        partial.session = None if is_closed else SimpleNamespace(status=lambda status=status: status)
        partial.last_model_path = committed or ""
        record.on_train_batch_start(trainer, GPTModule(TINY), None, 0)
        assert yaml.safe_load(directory.config.read_text())["optimizer"]["lr"] == rate


@pytest.mark.parametrize(
    ("variable", "error", "is_put_back"),
    [
        ("SLURM_JOB_ID", Interrupted(signal.SIGTERM), False),
        ("TORCHELASTIC_RESTART_COUNT", RuntimeError("a crash"), False),
        ("SLURM_JOB_ID", ConfigurationError("refused"), True),
        ("SLURM_JOB_ID", Interrupted(signal.SIGINT), True),
        ("SLURM_JOB_ID", KeyboardInterrupt(), True),
        ("HOME", Interrupted(signal.SIGTERM), True),
    ],
)
def test_an_earlier_run_is_not_resumed_by_the_repetition_of_a_command_that_starts_over(
    variable: str,
    error: BaseException,
    is_put_back: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The earlier run began with resume=false, too, as the repeated command did."""
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "0")
    directory = _run(tmp_path / "run", began=False)
    directory.logs.mkdir()
    before, earlier = directory.traces(), directory.move_aside()
    directory.create()
    train._undo(directory, before, earlier, error, is_alone=True)
    assert directory.config.is_file() is is_put_back
    told = "is the earlier run again: this one has not trained" if is_put_back else "the earlier run stays in run.1"
    assert told in capsys.readouterr().out
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert is_put_back or not _goes_on(directory, False)


@pytest.mark.parametrize("is_moved", [True, False])
def test_a_refused_command_that_torchrun_repeats_does_not_resume_the_earlier_run(
    is_moved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have left the memory, or the disk have come, that was missing before."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    refusal = ConfigurationError("this run needs more memory")

    def check(config: object) -> None:
        if not is_moved:
            raise refusal

    monkeypatch.setattr(training, "check", check)
    directory = _run(tmp_path / "run", began=False)
    directory.create()
    config = {"run_dir": str(directory.path), "resume": False, "task": "train", "callbacks": {}}
    before, earlier = directory.traces(), None
    with nullcontext() if is_moved else pytest.raises(ConfigurationError):
        earlier = train._prepare(directory, config, is_first=True)[0]
        directory.create()
    train._undo(directory, before, earlier, refusal, is_alone=True)
    assert directory.config.is_file()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not _goes_on(directory, False)
    is_moved = True
    assert train._prepare(directory, config, is_first=True)[0] == tmp_path / "run.1"
