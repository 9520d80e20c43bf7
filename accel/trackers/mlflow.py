"""MLflow: a store in files or a database, or a tracking server.

Source: https://mlflow.org/docs/latest/ml/tracking/tracking-api/
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.logging import get_logger
from accel.machine import env
from accel.machine.errors import ConfigError
from accel.trackers.base import LibraryTracker, Values, flatten, numbered, on_main_process

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = get_logger(__name__)
BATCH = 100  # MLflow's most parameters in a call
# Set here: another tracker's `logging_dir` takes their place, unlike that of a user's own choice.
OWN_STORES: set[str] = set()


class MLflowTracker(LibraryTracker):
    """Logs to a run of MLflow.

    The store is that of `MLFLOW_TRACKING_URI` or `mlflow.set_tracking_uri`, else in `logging_dir`.
    The variables `MLFLOW_EXPERIMENT_NAME`, `MLFLOW_RUN_ID`, `MLFLOW_TAGS` and `MLFLOW_NESTED_RUN`
    override the arguments.

    Args:
        experiment_name: MLflow's default experiment, if None.
        logging_dir: folder of the store: the database ``mlflow.db``, and ``mlartifacts``; None:
            MLflow's own default, in the working directory.
        run_id: of a run to continue.
        tags: by name, or the same as JSON.
        nested_run: whether the run is a child of the active one.
        run_name: of a new run.
        description: of the run.
    """

    name = "mlflow"
    id_path = "info.run_id"
    alias = "active_run"

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: Mapping[str, object] | str | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__(run_name)
        self.experiment_name = env.read("MLFLOW_EXPERIMENT_NAME") or experiment_name
        self.logging_dir = logging_dir
        tags = env.read("MLFLOW_TAGS") or tags
        nested = env.optional_flag("MLFLOW_NESTED_RUN")
        self._arguments = {
            "run_id": env.read("MLFLOW_RUN_ID") or run_id,
            "tags": json.loads(tags) if isinstance(tags, str) else tags,
            "nested": nested_run if nested is None else nested,
            "run_name": run_name,
            "description": description,
        }

    def _open(self) -> object:
        import mlflow

        artifacts = None
        chosen = mlflow.is_tracking_uri_set() and mlflow.get_tracking_uri() not in OWN_STORES
        if self.logging_dir is not None and not chosen:
            folder = Path(self.logging_dir).expanduser().absolute()
            folder.mkdir(parents=True, exist_ok=True)
            store = f"sqlite:///{folder / 'mlflow.db'}"
            OWN_STORES.add(store)
            mlflow.set_tracking_uri(store)
            artifacts = (folder / "mlartifacts").as_uri()
        self._client = mlflow.MlflowClient()
        experiment = self._experiment(self._client, artifacts)
        try:
            return mlflow.start_run(experiment_id=experiment, **self._arguments)
        except mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            raise ConfigError.of(
                f"mlflow run_id={self._arguments['run_id']!r}",
                f"the store {mlflow.get_tracking_uri()} has no such run",
                "Choose its store with MLFLOW_TRACKING_URI, or start a new run with "
                "init_kwargs={'mlflow': {'run_id': None}}.",
            ) from error

    def _experiment(self, client: MlflowClient, artifacts: str | None) -> str | None:
        """Return the id of the experiment, created if there is none; None: MLflow's default."""
        if self.experiment_name is None:
            return None
        found = client.get_experiment_by_name(self.experiment_name)
        if found is not None:
            return str(found.experiment_id)
        return str(client.create_experiment(self.experiment_name, artifacts))

    def _close(self, run: Any) -> None:
        import mlflow

        status = "FAILED" if self.failed else "FINISHED"
        active = mlflow.active_run()
        if active is not None and active.info.run_id == run.info.run_id:
            mlflow.end_run(status)
        else:  # the script has started another since
            self._client.set_terminated(run.info.run_id, status)

    @on_main_process
    def discard(self) -> None:
        """Close the run; delete it, if it is new and has no metrics."""
        run = self._run
        self.finish()
        if run is not None and self._arguments["run_id"] is None:
            run_id = run.info.run_id
            if not self._client.get_run(run_id).data.metrics:
                self._client.delete_run(run_id)

    @classmethod
    def resume_arguments(cls, run_id: str) -> dict[str, object]:
        """Return the arguments that continue a run."""
        return {"run_id": run_id}

    def _configure(self, values: dict[str, Any]) -> None:
        """Record hyper-parameters as text, nested ones under ``outer/inner``.

        MLflow keeps the first value of a parameter: where a resumed run has another, the tag
        ``resumed/<name>`` tells it. Values that are too long for MLflow are skipped.
        """
        import mlflow
        from mlflow.entities import Param
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

        run_id = self.tracker.info.run_id
        known = self._client.get_run(run_id).data.params
        texts = {name: str(value) for name, value in flatten(values).items()}
        params = []
        for name, text in texts.items():
            if len(text) > MAX_PARAM_VAL_LENGTH:
                logger.warning(
                    "mlflow: the parameter %s is too long (%d): skipped.", name, len(text)
                )
            elif name not in known:
                params.append(Param(name, text))
            elif known[name] != text:
                mlflow.set_tag(f"resumed/{name}", text)
        for start in range(0, len(params), BATCH):
            self._client.log_batch(run_id, params=params[start : start + BATCH])

    def _write(self, values: Values, step: int | None, **kwargs: Any) -> None:
        import mlflow

        run_id = self.tracker.info.run_id
        if values.numbers:
            mlflow.log_metrics(values.numbers, step=step, run_id=run_id, **kwargs)
        for name, text in values.texts.items():
            self._client.set_tag(run_id, name, text)
        for name, found in values.images.items():
            for key, image in numbered(name, found, "/"):
                self._client.log_image(run_id, image, key=key, step=step, **kwargs)

    @on_main_process
    def log_figure(self, figure: object, artifact_file: str, **save_kwargs: object) -> None:
        """Save a figure as an artifact.

        Args:
            figure: of matplotlib or plotly.
            artifact_file: path below the run's artifacts: "plots/loss.png".
            save_kwargs: for the figure's own save function.
        """
        run_id = self.tracker.info.run_id
        self._client.log_figure(run_id, figure, artifact_file, save_kwargs=save_kwargs or None)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Copy a file, or a folder, into the run's artifacts.

        Args:
            local_path: the file.
            artifact_path: folder below the run's artifacts.
        """
        self._client.log_artifact(self.tracker.info.run_id, local_path, artifact_path)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Copy the files of a folder into the run's artifacts.

        Args:
            local_dir: the folder.
            artifact_path: folder below the run's artifacts.
        """
        self._client.log_artifacts(self.tracker.info.run_id, local_dir, artifact_path)
