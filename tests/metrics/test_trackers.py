"""Trackers take what the run gives, or are told of once; they never hold it up."""

import json
import math
import threading
import time

import pytest

from tunix.config import TrainingConfig
from tunix.errors import ConfigError
from tunix.metrics import trackers
from tunix.metrics.trackers import TrackerThread
from tunix.training import run_folder
from tunix.training.run_folder import RunFolder


class Recorder:
    def __init__(self):
        self.rows, self.failed = [], None

    def append(self, step, metrics):
        self.rows.append((step, dict(metrics)))

    def close(self, failed):
        self.failed = failed


class Failing(Recorder):
    def append(self, step, metrics):
        raise SystemExit("no\n such project")


class Hanging(Recorder):
    def append(self, step, metrics):
        threading.Event().wait()


def opened(folder, names=("wandb",), **more):
    config = TrainingConfig(model="m", tensorboard=False, trackers=list(names))
    return RunFolder.open(folder, "sft", config, **more)


@pytest.fixture
def use(monkeypatch):
    """Let a run folder open some other tracker, with patience of 0.3 s."""

    def use(tracker):
        def thread(name, open_tracker):
            return TrackerThread(name, lambda: tracker, silence=0.3)

        monkeypatch.setattr(trackers, "check_installed", lambda names: None)
        monkeypatch.setattr(run_folder, "check_installed", lambda names: None)
        monkeypatch.setattr(run_folder, "TrackerThread", thread)
        return tracker

    return use


def test_a_tracker_gets_the_finite_numbers_in_order_and_the_end(tmp_path, use):
    recorder = use(Recorder())

    def fail():
        with opened(tmp_path) as folder:
            for step in (1, 2):
                folder.append_metrics({"step": step, "loss": step / 2, "n": math.nan, "text": "a"})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert recorder.rows == [(1, {"loss": 0.5}), (2, {"loss": 1.0})]
    assert recorder.failed is True


@pytest.mark.parametrize(
    ("tracker", "said"),
    [
        (Failing(), "no more metrics go to wandb: SystemExit: no such project"),
        (Hanging(), "no more metrics go to wandb: no answer for 0.3 s"),
    ],
)
def test_a_useless_tracker_is_told_once_and_left_alone(tmp_path, use, tracker, said):
    use(tracker)
    folder, heard = opened(tmp_path), []
    folder.warn = heard.append
    folder.append_metrics({"step": 1, "loss": 1.0})
    time.sleep(0.5)
    started = time.monotonic()
    for step in range(2, 2000):  # more than its queue holds
        folder.append_metrics({"step": step, "loss": 1.0})
    folder.close()
    assert time.monotonic() - started < 5
    assert heard == [said]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1999


@pytest.mark.parametrize("tracker", [Failing(), Hanging()])
def test_a_fault_in_the_last_row_is_told_at_the_end(tmp_path, use, tracker):
    use(tracker)
    folder, heard = opened(tmp_path), []
    folder.warn = heard.append
    folder.append_metrics({"step": 1, "loss": 1.0})
    folder.close()
    assert len(heard) == 1


def test_one_that_cannot_be_opened_is_a_fault():
    def refuse():
        raise ConnectionError("no network")

    thread = TrackerThread("mlflow", refuse)
    thread.close(failed=False)
    assert thread.fault() == "ConnectionError: no network"


def test_a_queue_that_runs_over_is_a_fault():
    thread = TrackerThread("mlflow", Hanging)
    for step in range(trackers.QUEUED + 2):
        thread.append(step, {})
    assert thread.fault() == "Full: "
    started = time.monotonic()
    thread.close(failed=False)
    assert time.monotonic() - started < 5


def test_a_missing_library_is_refused_before_there_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"trackers: 'mlflow'.*pip install 'tunix\[tracking\]'"):
        opened(tmp_path / "r", ["mlflow"])
    assert not (tmp_path / "r").exists()


@pytest.fixture
def two_runs(tmp_path, monkeypatch):
    """Log two steps, then resume and repeat the second, as after a kill."""

    def play(name, *variables):
        for variable in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI", *variables):
            monkeypatch.delenv(variable, raising=False)
        heard = []
        for resume, steps in ((False, (1, 2)), (True, (2, 3))):
            with opened(tmp_path / "r", [name], resume=resume) as folder:
                folder.warn = heard.append
                for step in steps:
                    folder.append_metrics({"step": step, "reward/format:<a>.*": step / 4})
        assert heard == []
        return tmp_path / "r", (tmp_path / "r" / f"{name}_id.txt").read_text()

    return play


def test_wandb_goes_on_with_its_run(two_runs):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    folder, id = two_runs("wandb", "WANDB_DIR")
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{id}.wandb"] * 2
    rows, configs = [], {}
    for file in files:
        store = DataStore()
        store.open_for_scan(str(file))
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {i.key or ".".join(i.nested_key): i for i in record.history.item}
            if items:
                logged = {name: json.loads(item.value_json) for name, item in items.items()}
                rows.append((logged["step"], logged["reward/format:<a>.*"]))
            for item in record.run.config.update:
                configs[item.key] = json.loads(item.value_json)
            if record.HasField("run"):
                assert (record.run.run_id, record.run.display_name) == (id, "r")
    assert rows == [(1, 0.25), (2, 0.5), (2, 0.5), (3, 0.75)]
    assert configs["model"] == "m"


def test_mlflow_goes_on_with_its_run(two_runs):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow.tracking import MlflowClient

    folder, id = two_runs("mlflow", "MLFLOW_EXPERIMENT_NAME")
    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    found = client.get_run(id)
    assert (found.info.run_name, found.info.status) == ("r", "FINISHED")
    assert found.data.params["model"] == "m"
    history = client.get_metric_history(id, "reward/format:_a_._")
    assert [(m.step, m.value) for m in history] == [(1, 0.25), (2, 0.5), (2, 0.5), (3, 0.75)]
    (experiment,) = client.search_experiments(filter_string="name = 'tunix'")
    assert len(client.search_runs([experiment.experiment_id])) == 1
