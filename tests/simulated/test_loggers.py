"""Laws of the loggers, with the real libraries offline: what is read back is what the log says, each step once."""

import contextlib
import csv
import dataclasses
import io
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fourfold as ff
from fourfold.callbacks import CSV, MLflow, TensorBoard, Trackio, WandB
from fourfold.trainer.callbacks.logged_run import LoggedRun, step_metrics
from fourfold.words.callback import StepEvent
from fourfold.words.errors import SettingError
from tests.callback_runs import BrokenOffError, make_task, train, train_in_two

Points = dict[str, list[tuple[int, float]]]
"""By name: (step, value) of every point, in the order in which they were logged."""


def logged_points(folder: Path) -> Points:
    """What metrics.jsonl says."""
    points: Points = {}
    for line in map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines()):
        if "lr" in line:
            points.setdefault("train/loss", []).append((line["step"], line["loss"]))
            points.setdefault("train/lr", []).append((line["step"], line["lr"]))
        elif "valid" in line and "step" in line:
            points.setdefault("valid/loss", []).append((line["step"], line["valid"]["loss"]))
    assert [step for step, _ in points["train/loss"]] == list(range(1, 9))
    return points


def read_tensorboard(folder: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "run" / "tensorboard")).Reload()
    return {name: [(each.step, each.value) for each in events.Scalars(name)] for name in events.Tags()["scalars"]}


def read_wandb(folder: Path) -> Points:
    """The points of all offline runs, which `wandb sync` would upload: they must have one id."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    Record: Any = vars(wandb_internal_pb2)["Record"]  # made when the module is imported
    wandb.teardown()  # its own process may still write
    points: Points = {}
    files = sorted((folder / "run" / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    assert len({path.name for path in files}) == 1
    for content in (data for path in files for data in records(path.read_bytes())):
        record = Record.FromString(content)
        items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for name, value in items.items():
            if not name.startswith("_"):
                points.setdefault(name, []).append((int(items["_step"]), value))
    return points


def records(content: bytes) -> Iterator[bytes]:
    """The records of a file of W&B, which has the format of LevelDB's log behind seven bytes."""
    position, record = 7, b""
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def read_mlflow(folder: Path) -> Points:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"file://{folder / 'mlflow'}")
    experiment = client.get_experiment_by_name("fourfold")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["batch_size"] == "8"
    assert run.data.params["plan.dp"] == "1"
    names = run.data.metrics
    return {name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)] for name in names}


def read_trackio(folder: Path) -> Points:
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("fourfold")
    points: Points = {}
    for row in SQLiteStorage.get_logs("fourfold", name):
        for key in row.keys() - {"step", "timestamp"}:
            points.setdefault(key, []).append((row["step"], row[key]))
    return points


def read_csv(folder: Path) -> Points:
    points: Points = {}
    for name, prefix in (("metrics.csv", "train"), ("validation.csv", "valid")):
        with (folder / "run" / name).open(newline="") as file:
            for row in csv.DictReader(file):
                for key in row.keys() - {"step"}:
                    points.setdefault(f"{prefix}/{key}", []).append((int(row["step"]), float(row[key] or "nan")))
    return points


READERS = {
    "csv": read_csv,
    "mlflow": read_mlflow,
    "tensorboard": read_tensorboard,
    "trackio": read_trackio,
    "wandb": read_wandb,
}


def make_logger(name: str, folder: Path, **options: Any) -> ff.Callback:
    own: dict[str, Any] = {"mlflow": {"tracking_uri": f"file://{folder / 'mlflow'}"}, "wandb": {"mode": "offline"}}
    kinds: dict[str, Any] = {
        "csv": CSV,
        "mlflow": MLflow,
        "tensorboard": TensorBoard,
        "trackio": Trackio,
        "wandb": WandB,
    }
    return kinds[name](**own.get(name, {}), **options)


@pytest.fixture(autouse=True)
def _stay_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the libraries write by themselves goes to the test's folder, and nothing to a network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database takes seconds to make
    if "trackio.utils" in sys.modules:  # it reads its variable once
        for module in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    yield
    if sys.modules.get("wandb") is not None:
        sys.modules["wandb"].teardown()


@pytest.mark.parametrize("name", READERS)
def test_a_run_that_resumes_from_an_older_checkpoint_is_one_run_with_each_step_once(name, tmp_path, capfd):
    train_in_two(tmp_path, lambda: [make_logger(name, tmp_path)])
    got, expected = READERS[name](tmp_path), logged_points(tmp_path)
    for key, points in expected.items():
        assert [step for step, _ in got[key]] == [step for step, _ in points], key
        assert [value for _, value in got[key]] == pytest.approx([value for _, value in points], rel=1e-6), key
    rates = next(points for key, points in got.items() if key.endswith("_per_second"))
    assert len(rates) == 8
    assert all(value > 0 for _, value in rates)
    assert not (tmp_path / "run" / "faults.jsonl").exists()


SERVICES = ["mlflow", "tensorboard", "trackio", "wandb"]


@pytest.mark.parametrize("name", SERVICES)
def test_every_so_many_steps_are_logged_besides_the_first(name, tmp_path, capfd):
    train(make_task(), tmp_path, make_logger(name, tmp_path, every=3), steps=8)
    got = READERS[name](tmp_path)
    assert [step for step, _ in got["train/loss"]] == [1, 3, 6]
    assert [step for step, _ in got["valid/loss"]] == [2, 4, 6, 8]
    with pytest.raises(SettingError, match="every = 0   need a whole number of at least 1"):
        make_logger(name, tmp_path, every=0)


@pytest.mark.parametrize("name", SERVICES)
def test_a_logger_without_its_library_is_refused_with_the_line_that_installs_it(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SettingError, match=rf"need the package {name}   try pip install {name}"):
        make_logger(name, tmp_path)


def test_mlflow_without_what_opens_its_store_is_refused_with_the_line_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    default = rf"sqlite:.*{tmp_path.name}/mlflow.db, and sqlalchemy not .* try pip install"
    with pytest.raises(SettingError, match=default):
        MLflow()
    with pytest.raises(SettingError, match="postgresql"):
        MLflow(tracking_uri="postgresql+psycopg2://host/name")
    MLflow(tracking_uri="http://host:5000")  # a server has a database of its own


def test_mlflow_writes_into_its_default_store(tmp_path, capfd, monkeypatch):
    from mlflow import MlflowClient

    train(make_task(), tmp_path, MLflow(), steps=2)
    assert (tmp_path / "mlflow.db").is_file()
    client = MlflowClient()
    experiment = client.get_experiment_by_name("fourfold")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert [each.step for each in client.get_metric_history(run.info.run_id, "train/loss")] == [1, 2]


def test_a_failed_run_is_marked_as_failed(tmp_path):
    from mlflow import MlflowClient

    with pytest.raises(BrokenOffError):
        train(make_task(breaks_at=17), tmp_path, make_logger("mlflow", tmp_path), steps=4)
    client = MlflowClient(tracking_uri=f"file://{tmp_path / 'mlflow'}")
    experiment = client.get_experiment_by_name("fourfold")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FAILED"


def test_no_step_is_taken_twice_whenever_a_process_is_killed(tmp_path):
    run = LoggedRun(tmp_path, "service", step=4)
    run.set_run("abc")
    assert not run.take_step(4)
    assert run.take_step(5)
    again = LoggedRun(tmp_path, "service", step=2)  # the first was never closed
    assert again.run_id == "abc"
    assert [step for step in range(3, 9) if again.take_step(step)] == [6, 7, 8]
    assert [step for step in range(3, 9) if again.take_evaluation(step)] == [5, 6, 7, 8]
    run.close()
    again.close()
    (tmp_path / "callbacks" / "service.json").write_text('{"run": 3')
    with pytest.raises(ValueError, match="is damaged"):
        LoggedRun(tmp_path, "service", step=0)


def test_a_table_has_empty_cells_for_what_was_not_measured_and_new_columns_for_what_comes_later(tmp_path):
    train(make_task(), tmp_path, CSV(), steps=2)
    table = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert table[0].startswith("step,loss,grad_norm,lr,samples,tokens")
    assert next(csv.DictReader(io.StringIO("\n".join(table))))["grad_norm"] == ""
    writer = CSV(str(tmp_path / "elsewhere"))
    start: Any = type("Start", (), {"folder": tmp_path, "step": 0})()
    writer.on_start(start)
    for step, metrics in ((1, {"loss": 1.0}), (2, {"loss": math.nan, "new": 2.0})):
        writer.on_evaluate(ff.callbacks.EvaluateEvent(step=step, metrics=metrics, is_best=False))
    assert (tmp_path / "elsewhere" / "validation.csv").read_text().split() == ["step,loss,new", "1,1.0,", "2,nan,2.0"]


def test_a_row_that_a_kill_has_cut_off_is_left_out(tmp_path):
    with contextlib.suppress(BrokenOffError):
        train(make_task(breaks_at=8 * 6 + 1), tmp_path, CSV(), steps=8)
    path = tmp_path / "run" / "metrics.csv"
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join(rows[:4]) + rows[4][:5])  # the row of step 4 is cut off
    train(make_task(), tmp_path, CSV(), steps=8)
    steps = [int(row["step"]) for row in csv.DictReader(path.open(newline=""))]
    assert steps == [1, 2, 3, 5, 6, 7, 8]


def test_the_loss_of_a_skipped_step_is_no_point():
    event = StepEvent(
        step=3, loss=1e28, grad_norm=math.inf, lr=0.1, samples=8, tokens=None, seconds=0.5, waiting_seconds=0.1,
        units_per_second=16.0, unit="samples", skipped=True,
    )  # fmt: skip
    assert step_metrics(event) == {"train/lr": 0.1, "train/samples_per_second": 16.0}
    trained = step_metrics(dataclasses.replace(event, loss=2.0, grad_norm=None, skipped=False))
    assert trained == {"train/lr": 0.1, "train/samples_per_second": 16.0, "train/loss": 2.0}
