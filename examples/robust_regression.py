"""Fit a line through data with outliers and missing targets, and record which samples were left out.

The diabetes data of scikit-learn; in the training half one target in ten has lost its decimal point, and a few are NaN.
The mean square of everything is NaN; without the NaN, the outliers dominate it. `losses.tukey` ignores large
residuals, `keep=` removes the NaN from value and gradient, and the ledger lists what should be repaired.

Run it: python examples/robust_regression.py        (needs scikit-learn, no network; a few seconds)
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from sklearn.datasets import load_diabetes
from torch.nn import functional as F

import gradgate as gg
from gradgate import losses

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

x, y = (torch.from_numpy(part) for part in load_diabetes(return_X_y=True))
x, y = x / x.std(0), y / 100
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
train, test = order[:300], order[300:]
observed = y[train].clone()
observed[::10] *= 10  # the decimal point is lost
observed[5::50] = float("nan")
SCALE = 2.5  # larger residuals are ignored; normal ones are smaller


def fit(loss_fn: Loss, targets: torch.Tensor, start: torch.Tensor | None = None) -> torch.Tensor:
    """Fit weights and a constant with LBFGS."""
    weights = torch.zeros(x.shape[1] + 1, dtype=torch.float64) if start is None else start.clone()
    weights.requires_grad_()
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_fn(predict(weights, x[train]), targets)
        loss.backward()
        return loss

    optimizer.step(closure)
    return weights.detach()


def predict(weights: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return the line's answers."""
    return inputs @ weights[:-1] + weights[-1]


def without_nan(loss_fn: Loss) -> Loss:
    """Leave the missing answers out, as people do."""
    there = observed.isfinite()
    return lambda guess, targets: loss_fn(guess[there], targets[there])


def main() -> int:
    """Fit in five ways and compare on untouched data."""
    keep = observed.isfinite()

    def tukey(guess: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return losses.tukey(guess - targets, scale=SCALE, keep=keep)

    def cauchy(guess: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return losses.cauchy(guess - targets, keep=keep)

    robust_start = fit(cauchy, observed)  # tukey is flat far out, so it starts near
    fits = {
        "mse_loss": fit(F.mse_loss, observed),
        "mse_loss, NaN removed": fit(without_nan(F.mse_loss), observed),
        "huber_loss, NaN removed": fit(without_nan(F.huber_loss), observed),
        "losses.tukey, keep=": fit(tukey, observed, robust_start),
        "mse_loss, clean data": fit(F.mse_loss, y[train]),
    }
    error = {name: (predict(weights, x[test]) - y[test]).abs().mean().item() for name, weights in fits.items()}
    print(f"{'':28}mean error on untouched data")
    for name, value in error.items():
        print(f"{name:28}{value * 100:28.2f}")

    residual = observed - predict(fits["losses.tukey, keep="], x[train])
    weights = losses.robust_weights(losses.tukey, residual.nan_to_num(), scale=SCALE)
    with tempfile.TemporaryDirectory() as folder:
        ledger = gg.Ledger(Path(folder) / "fit.ledger")
        losses.record_decisions(ledger, keep=keep & (weights > 0), ids=train.tolist())
        doubted = {int(name) for name in ledger.bad_ids()}
        ledger.close()
    broken = {*train[::10].tolist(), *train[5::50].tolist()}
    print(
        f"{len(doubted)} answers in the ledger; {len(broken & doubted)} of the {len(broken)} broken ones are among them"
    )

    ours, clean = error["losses.tukey, keep="], error["mse_loss, clean data"]
    better = all(ours < error[name] for name in ("mse_loss, NaN removed", "huber_loss, NaN removed"))
    return 0 if better and ours < 1.05 * clean and error["mse_loss"] != error["mse_loss"] else 1


if __name__ == "__main__":
    sys.exit(main())
