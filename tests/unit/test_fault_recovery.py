"""What FaultRecovery refuses where an elastic launcher started the ranks."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from moe_lightning.callbacks.fault_recovery import COLUMNS, FaultRecovery, log_table, table_row
from moe_lightning.callbacks.loggers import QuietWandbLogger
from moe_lightning.errors import ConfigurationError
from moe_lightning.strategies.elastic_worlds import ElasticWorlds
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy
from moe_lightning.strategies.worlds import RecoveryReport


@pytest.mark.parametrize(
    ("automatic", "reload_every", "words"),
    [
        (False, 0, "manual optimization .*: use automatic optimization"),
        (True, 2, "reload_dataloaders_every_n_epochs=2 makes loaders anew .*: set it to 0"),
    ],
)
def test_fits_that_cannot_go_back_are_refused(
    automatic: bool, reload_every: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = ExpertParallelStrategy()
    monkeypatch.setattr(strategy, "elastic", object.__new__(ElasticWorlds))
    trainer: Any = SimpleNamespace(strategy=strategy, reload_dataloaders_every_n_epochs=reload_every)
    module: Any = SimpleNamespace(automatic_optimization=automatic)
    with pytest.raises(ConfigurationError, match=words):
        FaultRecovery().on_fit_start(trainer, module)


def test_a_run_without_an_elastic_launcher_is_told_so() -> None:
    """By a warning: moe-train silences Lightning's notes."""
    strategy = ExpertParallelStrategy(replicas=2)
    trainer: Any = SimpleNamespace(strategy=strategy)
    with pytest.warns(UserWarning, match="no elastic launcher started these ranks, so a fault ends the run"):
        FaultRecovery(min_replicas=1).setup(trainer, None, "fit")  # type: ignore[arg-type]


def test_recovery_promises_replicas_and_leaves_what_the_user_chose() -> None:
    for options, replicas in ({}, 1), ({"replicas": 3}, 3), ({"placement": [[1]]}, None):
        strategy = ExpertParallelStrategy(**options)
        strategy.worlds.allow_changes()
        chosen, trainer = strategy.placing, SimpleNamespace(strategy=strategy)
        FaultRecovery(min_replicas=2).setup(trainer, None, "fit")  # type: ignore[arg-type]
        assert strategy.placing == replace(chosen, replicas=replicas, promised_replicas=2)
        assert chosen.promised_replicas == 1
    with pytest.raises(ConfigurationError, match="ep_size=2 cuts the ranks into groups"):
        ExpertParallelStrategy(ep_size=2).promise_replicas(2)


def report(step: int, *lost: int) -> RecoveryReport:
    return RecoveryReport(
        reason=f"ranks {lost} were killed",
        step=step,
        steps_lost=0,
        lost_ranks=lost,
        ranks_before=4,
        ranks_after=4 - len(lost),
        restored="8 experts from replicas, 0 stale",
        stale_experts=0,
        min_replicas=2,
        began_at=0.0,
        seconds={"total": 0.4321},
    )


def test_recoveries_are_rows_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    tables: list[Any] = []
    wandb_logger = QuietWandbLogger(save_dir=str(tmp_path), offline=True)
    monkeypatch.setattr(wandb_logger, "log_metrics", lambda metrics, step: tables.append((metrics, step)))
    loggers = [CSVLogger(tmp_path, version=0), wandb_logger]
    log_table(loggers, [report(5, 1)])
    log_table(loggers, [report(5, 1), report(9, 0, 2)])
    rows = list(csv.DictReader((Path(loggers[0].log_dir) / "recoveries.csv").open()))  # type: ignore[arg-type]
    assert [(row["step"], row["lost_ranks"], row["ranks_after"], row["total_s"]) for row in rows] == [
        ("5", "1", "3", "0.432"),
        ("9", "0 2", "2", "0.432"),
    ]
    assert rows[0]["began_at"] == "1970-01-01T00:00:00.000+00:00"
    (first, _), (second, step) = tables
    assert step == 9
    assert first["recovery/table"].columns == list(COLUMNS)
    assert second["recovery/table"].data == [table_row(report(5, 1)), table_row(report(9, 0, 2))]


def test_the_rank_that_died_is_a_metric(capsys: pytest.CaptureFixture[str]) -> None:
    logged: dict[int, dict[str, float]] = {}
    logger: Any = SimpleNamespace(log_metrics=lambda metrics, step: logged.setdefault(step, metrics))
    trainer: Any = SimpleNamespace(loggers=[logger], is_global_zero=True, progress_bar_callback=None)
    recovery = FaultRecovery()
    for each in (report(5, 3, 2), report(7)):
        recovery.on_recovered(trainer, None, each)  # type: ignore[arg-type]
    assert logged[5]["recovery/lost_rank"] == 3
    assert "recovery/lost_rank" not in logged[7], "nobody was lost where ranks only joined"
    assert "ranks (3, 2) were killed at step 5: 2 ranks continue" in capsys.readouterr().out
