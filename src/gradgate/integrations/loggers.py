"""Where the counters of a guard go: `Guard(log=tensorboard(writer))`, and the same for Weights & Biases and MLflow.

Each function returns what `Guard(log=...)` takes: `log(tag, value, step)`. The tags are `gradgate/kept`,
`gradgate/dropped`, `gradgate/dropped_total`, and after a step with bad samples `gradgate/bad_steps`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from gradgate._names import describe
from gradgate.errors import ArgumentTypeError
from gradgate.guard._guard import Log

__all__ = ["tensorboard", "wandb", "mlflow"]


def tensorboard(writer: Any) -> Log:
    """Log the counters of a guard as scalars of TensorBoard.

    Args:
        writer: A `torch.utils.tensorboard.SummaryWriter`, or anything with `add_scalar(tag, value, step)`.

    Returns:
        What `Guard(log=...)` takes.

    Raises:
        ArgumentTypeError: The writer has no `add_scalar`.

    Examples:
        >>> class Writer:
        ...     def add_scalar(self, tag, value, step):
        ...         print(step, tag, value)
        >>> model = torch.nn.Linear(3, 1)
        >>> guard = gg.Guard(model, log=tensorboard(Writer()))
        >>> result = guard.backward(torch.ones(8, 3), lambda x: model(x).square().mean())
        0 gradgate/kept 8
        0 gradgate/dropped 0
        0 gradgate/dropped_total 0
    """
    log: Log = _method(writer, "add_scalar", "tensorboard(writer)", "torch.utils.tensorboard.SummaryWriter()")
    return log


def wandb(run: Any = None) -> Log:
    """Log the counters of a guard to a run of Weights & Biases, against the axis `gradgate/step`.

    They join the row that your next `run.log(...)` writes, so that its own steps stay as they are: of several steps of
    the guard in one row, the last counts.

    Args:
        run: What `wandb.init(...)` returned; by default, the active one.

    Returns:
        What `Guard(log=...)` takes.

    Raises:
        ArgumentTypeError: The run has no `log`, or there is none.

    Examples:
        >>> class Run:
        ...     def define_metric(self, name, step_metric=None):
        ...         print(name, "over", step_metric)
        ...     def log(self, data, commit=True):
        ...         print(data, commit)
        >>> log = wandb(Run())
        gradgate/* over gradgate/step
        >>> log("gradgate/dropped", 1, 70)
        {'gradgate/dropped': 1, 'gradgate/step': 70} False
    """
    run = import_module("wandb").run if run is None else run
    write = _method(run, "log", "wandb(run)", "wandb.init()")
    run.define_metric("gradgate/*", step_metric="gradgate/step")

    def log(tag: str, value: float, step: int) -> None:
        write({tag: value, "gradgate/step": step}, commit=False)

    return log


def mlflow(client: Any = None, run_id: str | None = None) -> Log:
    """Log the counters of a guard as metrics of MLflow, each when it changes.

    A metric is a line in a file, or a request: a counter that stays as it is costs neither.

    Args:
        client: An `mlflow.MlflowClient()`; by default, the module `mlflow` itself, which logs to the active run.
        run_id: The run that the client logs to.

    Returns:
        What `Guard(log=...)` takes.

    Raises:
        ArgumentTypeError: The client has no `log_metric`.

    Examples:
        >>> class Client:
        ...     def log_metric(self, run_id, key, value, step):
        ...         print(run_id, key, value, step)
        >>> log = mlflow(Client(), "a1")
        >>> for step, dropped in enumerate([0, 0, 1]):
        ...     log("gradgate/dropped_total", dropped, step)
        a1 gradgate/dropped_total 0 0
        a1 gradgate/dropped_total 1 2
    """
    client = import_module("mlflow") if client is None else client
    write = _method(client, "log_metric", "mlflow(client)", "mlflow.MlflowClient(), run_id")
    of_run = () if run_id is None else (run_id,)
    last: dict[str, float] = {}

    def log(tag: str, value: float, step: int) -> None:
        if last.get(tag) != value:
            write(*of_run, tag, value, step=step)
            last[tag] = value

    return log


def _method(owner: Any, name: str, call: str, example: str) -> Any:
    """Return the method that a logger writes with."""
    if callable(method := getattr(owner, name, None)):
        return method
    function = call.partition("(")[0]
    what, why = f"{call}: it is {describe(owner)}, without `{name}`.", f"the counters are written with `{name}`."
    raise ArgumentTypeError(what, why=why, fix=f"gg.Guard(model, log={function}({example}))")
