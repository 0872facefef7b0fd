"""The counters of a guard, as TensorBoard, Weights & Biases and MLflow have them."""

import pytest
import torch

import gradgate as gg
from gradgate.errors import ArgumentTypeError
from gradgate.integrations import loggers

STEPS, BAD = 4, 2


def train(log, after=lambda: None):
    """Make four steps, the third with a bad sample."""
    model = torch.nn.Linear(2, 1)
    guard = gg.Guard(model, log=log)
    for step in range(STEPS):
        x = torch.ones(4, 2)
        if step == BAD:
            x[1] = float("nan")
        guard.backward(x, lambda x: model(x).square().mean())
        after()


def test_tensorboard_has_every_step(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        train(loggers.tensorboard(writer))
    events = EventAccumulator(str(tmp_path)).Reload()
    written = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert written == {
        "gradgate/kept": [(0, 4), (1, 4), (2, 3), (3, 4)],
        "gradgate/dropped": [(0, 0), (1, 0), (2, 1), (3, 0)],
        "gradgate/dropped_total": [(0, 0), (1, 0), (2, 1), (3, 1)],
        "gradgate/bad_steps": [(2, 1)],
    }


@pytest.mark.slow
def test_wandb_joins_the_rows_of_the_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(_disable_stats=True)) as run:
        rows = []
        train(loggers.wandb(), lambda: (run.log({"loss": 1.0}), rows.append(dict(run.summary))))
        assert run.step == STEPS, "one row for each of the user's own"
    assert [row["gradgate/dropped_total"] for row in rows] == [0, 0, 1, 1]
    assert [row["gradgate/step"] for row in rows] == [0, 1, 2, 3]


@pytest.mark.slow
def test_mlflow_has_every_change(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny has no other
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "runs").as_uri())
    run = client.create_run(client.create_experiment("guarded")).info.run_id
    train(loggers.mlflow(client, run))
    metrics = client.get_run(run).data.metrics
    assert metrics == {"gradgate/kept": 4, "gradgate/dropped": 0, "gradgate/dropped_total": 1, "gradgate/bad_steps": 1}
    history = client.get_metric_history(run, "gradgate/dropped")
    assert [(metric.step, metric.value) for metric in history] == [(0, 0), (2, 1), (3, 0)]


@pytest.mark.parametrize(("make", "fix"), [(loggers.tensorboard, "SummaryWriter()"), (loggers.wandb, "wandb.init()")])
def test_what_cannot_log_is_refused(make, fix):
    with pytest.raises(ArgumentTypeError) as refused:
        make(3)
    assert f"it is the int 3, without `{'log' if 'wandb' in fix else 'add_scalar'}`" in str(refused.value)
    assert fix in str(refused.value)
