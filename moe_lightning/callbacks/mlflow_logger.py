"""MLflow's records of a run: one MLflow run for a directory, however often it is started."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import MLFlowLogger
from typing_extensions import override

from moe_lightning.config import validated
from moe_lightning.errors import ConfigurationError
from moe_lightning.user_errors import missing_for_logger, one_line

_RUN_ID = "mlflow_run_id"
_NOWHERE = "http://nowhere.invalid"  # nothing asks there
_LONGEST = 250  # characters of a value


@validated
class MLflow(MLFlowLogger):
    """Lightning's MLFlowLogger whose run goes on when the training does. MLflow keeps the first value of a parameter;
    what a resumed run changes becomes a tag.

    Args:
        save_dir: the run directory, which keeps the id of the MLflow run.
        tracking_uri: of a server or a database, such as sqlite:///mlflow.db.
        experiment_name, run_name: what MLflow shows.
        tags: to find the run by.

    Raises:
        ConfigurationError: MLflow or what its databases need is not installed.
    """

    def __init__(
        self,
        save_dir: str | Path,
        *,
        tracking_uri: str = "sqlite:///mlflow.db",
        experiment_name: str = "moe-lightning",
        run_name: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        needed = ["mlflow", *(["sqlalchemy", "alembic"] if tracking_uri.startswith("sqlite:") else [])]
        missing = [name for name in needed if find_spec(name) is None]
        if missing:
            raise missing_for_logger("mlflow", missing[0])
        self._file = Path(save_dir) / _RUN_ID
        self._arguments: dict[str, Any] = {
            "experiment_name": experiment_name,
            "run_name": run_name,
            "tracking_uri": tracking_uri,
            "tags": dict(tags or {}),
        }
        self._is_open = False
        super().__init__(tracking_uri=_NOWHERE)
        for name in ("mlflow", "lightning.pytorch.loggers.mlflow"):
            logging.getLogger(name).setLevel(logging.ERROR)  # of tables and experiments that they make

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> Any:
        """MLflow's client; only the rank that logs opens the database, which several would make at once.

        Raises:
            ConfigurationError: MLflow cannot keep its records there.
        """
        if self._is_open:
            return super().experiment
        from mlflow.exceptions import MlflowException

        self._is_open = True
        run_id = self._file.read_text().strip() if self._file.is_file() else None
        try:
            super().__init__(**self._arguments, run_id=run_id)
            return super().experiment  # opens it
        except MlflowException as error:
            raise ConfigurationError(
                f"MLflow keeps no records at tracking_uri={self._arguments['tracking_uri']!r} "
                f"({one_line(error).split('. ')[0]}); give sqlite:///FILE.db or the address of a server"
            ) from error

    @override
    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Log what is new; as tags where the run has another value."""
        given = {name: text[:_LONGEST] for name, text in _leaves(params)}
        run_id = self.run_id
        assert run_id is not None
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(f"{run_id}\n")
        known = self.experiment.get_run(run_id).data.params
        for name in sorted(given.keys() & known.keys()):
            if known[name] != given[name]:
                self.experiment.set_tag(run_id, f"resumed/{name}", given[name])
        super().log_hyperparams({name: text for name, text in given.items() if name not in known})


def _leaves(params: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The values of nested mappings by their paths, as texts."""
    if isinstance(params, Namespace):
        params = vars(params)
    if isinstance(params, Mapping):
        for key, value in params.items():
            yield from _leaves(value, f"{name}/{key}" if name else str(key))
    else:
        yield name, str(params)
