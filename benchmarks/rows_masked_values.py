"""masked.mode against torch.mode and scipy; apply_rows, apply_where and safe_* against what one writes without them."""

from __future__ import annotations

import scipy.stats
import torch

import gradgate as gg
from benchmarks.harness import Row
from gradgate import masked

# --- mode ---------------------------------------------------------------------------------------------------------


def votes(shape, dim, dtype=torch.uint8):
    """Labels of several voters for each pixel; one of them is "ignore"."""

    def candidates():
        x = torch.randint(0, 21, shape).to(dtype)
        x[torch.rand(shape) < 0.2] = 255
        return {
            "torch.mode, excludes nothing": lambda: torch.mode(x, dim),
            "masked.mode": lambda: masked.mode(x, dim, exclude=255, empty=0),
            "masked.mode, excludes nothing": lambda: masked.mode(x, dim),
        }

    return candidates


def rows(make, exclude, *, scipy_too=True, dim=-1):
    """Long slices of values."""

    def candidates():
        x = make()
        missing = torch.isnan(x) if exclude != exclude else x == exclude
        hidden = torch.where(missing, torch.nan, x.double()).numpy()
        # What torch.mode takes for rows that give the right answer, whoever makes them: NaN puts its sort out of order,
        # and the same number in the place of all that is left out would win.
        alone = 2 * x.nan_to_num(0).abs().amax() + torch.arange(1, x.shape[dim] + 1)
        filled = torch.where(missing, alone.to(x.dtype), x)
        found = {
            "torch.mode, excludes nothing": lambda: torch.mode(x, dim),
            "masked.mode": lambda: masked.mode(x, dim, exclude=exclude, empty=0),
            "masked.mode, excludes nothing": lambda: masked.mode(x, dim),
            "torch.mode of rows filled before": lambda: torch.mode(filled, dim),
        }
        if scipy_too:
            found["scipy, nan omitted"] = lambda: scipy.stats.mode(hidden, axis=dim, nan_policy="omit")
        return found

    return candidates


def labels():
    """Classes of 2000 samples by 100 voters, some of them without an answer."""
    x = torch.randint(0, 21, (2000, 100))
    x[torch.rand(x.shape) < 0.2] = -100
    return x


def floats(dtype=torch.float32):
    """Measurements of one digit, some of them missing."""
    x = torch.randn(2000, 100, dtype=dtype).round(decimals=1)
    x[torch.rand(x.shape) < 0.2] = torch.nan
    return x


def mode_row(title, candidates, at_most, *, scipy_too=False):
    """Make a row for masked.mode."""
    peers = ("scipy, nan omitted",) if scipy_too else ()
    return Row("masked", title, candidates, "masked.mode", "torch.mode, excludes nothing", at_most, peers=peers)


# --- whole rows -----------------------------------------------------------------------------------------------------


def model_step(width, hidden, batch, fraction):
    """A training step of a model, on the kept rows only or on all of them with the others masked away."""

    def candidates():
        model = torch.nn.Sequential(
            torch.nn.Linear(width, hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(hidden, hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(hidden, width),
        )
        x = torch.randn(batch, width)
        keep = torch.zeros(batch, dtype=torch.bool)
        keep[torch.randperm(batch)[: round(batch * fraction)]] = True
        column = keep.unsqueeze(1)

        def step(compute):
            model.zero_grad()
            compute().square().sum().backward()

        def by_hand():
            index = keep.nonzero().view(-1)
            return torch.zeros(batch, width).index_copy_(0, index, model(x.index_select(0, index)))

        return {
            "all rows, then where": lambda: step(lambda: torch.where(column, model(x), 0.0)),
            "apply_rows": lambda: step(lambda: gg.apply_rows(keep, x, model)),
            "limit: the same by hand, without a check": lambda: step(by_hand),
        }

    return candidates


def rows_row(size, fraction, at_most):
    """Make a row for apply_rows."""
    title = f"apply_rows, step of an MLP {size[0]}-{size[1]}, {size[2]} rows, {fraction:.0%} kept"
    return Row(
        "masked",
        title,
        model_step(*size, fraction),
        "apply_rows",
        "all rows, then where",
        at_most,
        peers=("all rows, then where",),
    )


# --- elements ---------------------------------------------------------------------------------------------------------


def elements(fraction, expensive):
    """One branch of a where, forward and backward."""

    def candidates():
        x = torch.randn(1_000_000).abs() + 0.1
        keep = torch.rand(x.shape) < fraction
        x[~keep] *= -1
        x.requires_grad_()
        fn = torch.special.digamma if expensive else torch.log

        def run(compute):
            x.grad = None
            compute().sum().backward()

        return {
            "where of where, everything": lambda: run(lambda: torch.where(keep, fn(torch.where(keep, x, 1.0)), 0.0)),
            "apply_where": lambda: run(lambda: gg.apply_where(keep, x, fn)),
        }

    return candidates


def safe(name, plain, ours, *shapes):
    """Make a row for a safe operation against the plain one."""

    def candidates():
        inputs = [(torch.rand(shape) + 0.1).requires_grad_() for shape in shapes]

        def run(fn):
            torch.autograd.grad(fn(*inputs).sum(), inputs)

        return {name: lambda: run(plain), "safe": lambda: run(ours)}

    return Row("masked", f"{ours.__name__}, 1e6, forward and backward", candidates, "safe", name)


# --- windows, keys, and what goes along a row -------------------------------------------------------------------------


def _masked_image(channels=16):
    x, keep = torch.randn(8, channels, 64, 64), torch.rand(8, 1, 64, 64) < 0.7
    return torch.where(keep, x, torch.nan).requires_grad_(), keep.expand(8, channels, 64, 64)


def cumprod():
    """Running products of rows."""
    keep = torch.rand(MILLION) < 0.7
    x = torch.where(keep, torch.rand(MILLION) + 0.5, torch.nan).requires_grad_()
    return {
        "by hand": lambda: torch.where(keep, x, 1).cumprod(-1),
        "masked": lambda: masked.cumprod(x, -1, keep=keep),
    }, x


def avg_pool():
    """Means of windows of 2 x 2."""
    x, keep = _masked_image()
    pool = torch.nn.functional.avg_pool2d
    return {
        "by hand": lambda: pool(torch.where(keep, x, 0), 2) / pool(keep.to(x.dtype), 2).clamp(min=1e-9),
        "masked": lambda: masked.avg_pool(x, 2, keep=keep, empty=0),
    }, x


def max_pool():
    """Largest of windows of 2 x 2."""
    x, keep = _masked_image()
    return {
        "by hand": lambda: torch.nn.functional.max_pool2d(torch.where(keep, x, -torch.inf), 2),
        "masked": lambda: masked.max_pool(x, 2, keep=keep, empty=-torch.inf),
    }, x


def conv():
    """A partial convolution, 16 to 16 channels, 3 x 3."""
    x, keep = _masked_image()
    weight = torch.randn(16, 16, 3, 3)
    ones = torch.ones(1, 16, 3, 3)
    plain = torch.nn.functional.conv2d

    def by_hand():
        number = plain(keep.to(x.dtype), ones, padding=1)
        found = plain(torch.where(keep, x, 0), weight, padding=1)
        return torch.where(number == 0, 0, found * (144 / number.clamp(min=1)))

    return {"by hand": by_hand, "masked": lambda: masked.conv(x, weight, padding=1, keep=keep)}, x


def attention():
    """Heads of 128 keys, of which each sample has some; a sample without any would be NaN by hand."""
    x = torch.randn(8, 4, 128, 32, requires_grad=True)
    keep = (torch.arange(128) < torch.randint(1, 129, (8, 1)))[:, None, None, :]
    plain = torch.nn.functional.scaled_dot_product_attention
    return {
        "by hand": lambda: plain(x, x, x, attn_mask=keep),
        "masked": lambda: masked.attention(x, x, x, keep=keep),
    }, x


def by_hand_row(make, title):
    """Make a row for a function against the same composed by hand, forward and backward."""

    def candidates():
        functions, x = make()

        def step(fn):
            arriving = torch.ones_like(fn())
            return lambda: torch.autograd.grad(fn(), x, arriving)

        return {name: step(fn) for name, fn in functions.items()}

    return Row(
        "masked",
        f"{title}, forward and backward",
        candidates,
        "masked",
        "by hand",
        peers=("by hand",),
        rounds=7,
        seconds=1.0,
    )


MILLION = (1000, 1000)
MLP = {"small": (64, 128, 64), "middle": (128, 512, 1024), "large": (256, 1024, 4096)}

ROWS = [
    mode_row("mode, votes (8, 256, 256) dim 0 uint8", votes((8, 256, 256), 0), 0.15),
    mode_row("mode, votes (8, 256, 256) dim 0 int64", votes((8, 256, 256), 0, torch.int64), 0.15),
    mode_row("mode, votes (5, 512, 512) dim 0 uint8", votes((5, 512, 512), 0), 0.15),
    mode_row("mode, votes (16, 256, 256) dim 0 uint8", votes((16, 256, 256), 0), 0.15),
    mode_row("mode, votes (4, 5, 128, 128) dim 1 uint8", votes((4, 5, 128, 128), 1), 0.15),
    mode_row("mode, votes (100000, 5) dim 1 int64", votes((100_000, 5), 1, torch.int64), 0.15),
    mode_row("mode, votes (8, 256, 256) dim 0 float32", votes((8, 256, 256), 0, torch.float32), None),
    mode_row("mode, label rows 2000 x 100 int64", rows(labels, -100), 0.15, scipy_too=True),
    mode_row(
        "mode, labels 1e5 uint8",
        rows(lambda: torch.randint(0, 256, (100_000,), dtype=torch.uint8), 255),
        0.15,
        scipy_too=True,
    ),
    mode_row(
        "mode, wide rows 2000 x 100 int64", rows(lambda: torch.randint(0, 10**9, (2000, 100)), 5, scipy_too=False), 0.8
    ),
    mode_row(
        "mode, wide rows 2000 x 100 int64, 50 values",
        rows(lambda: torch.randint(0, 50, (2000, 100)) * 10**7, 0, scipy_too=False),
        0.8,
    ),
    mode_row("mode, rows 2000 x 100 float32, NaN left out", rows(floats, torch.nan, scipy_too=False), 0.8),
    mode_row(
        "mode, rows 2000 x 100 float64, NaN left out",
        rows(lambda: floats(torch.float64), torch.nan, scipy_too=False),
        0.8,
    ),
    mode_row(
        "mode, wide 1e6 int64, 50 values",
        rows(lambda: torch.randint(0, 50, (1_000_000,)) * 2 * 10**7, 0),
        0.8,
        scipy_too=True,
    ),
    mode_row("mode, wide 1e6 int64", rows(lambda: torch.randint(0, 10**9, (1_000_000,)), 0, scipy_too=False), 0.8),
    *[rows_row(MLP["large"], fraction, fraction + 0.08) for fraction in (0.05, 0.25, 0.5, 0.75)],
    *[rows_row(MLP["large"], fraction, 1.1) for fraction in (0.95, 1.0)],
    *[rows_row(MLP["middle"], fraction, fraction + 0.08) for fraction in (0.25, 0.75)],
    *[rows_row(MLP["small"], fraction, 1.1) for fraction in (0.25, 0.95, 1.0)],
    *[
        Row(
            "masked",
            f"apply_where, {'digamma' if expensive else 'log'} of 1e6, {fraction:.0%} kept, forward and backward",
            elements(fraction, expensive),
            "apply_where",
            "where of where, everything",
            peers=("where of where, everything",),
        )
        for fraction, expensive in ((0.05, False), (0.7, False), (0.05, True), (0.7, True))
    ],
    by_hand_row(cumprod, "cumprod of rows, 1000 x 1000"),
    by_hand_row(avg_pool, "avg_pool 2 x 2 of 8 x 16 x 64 x 64"),
    by_hand_row(max_pool, "max_pool 2 x 2 of 8 x 16 x 64 x 64"),
    by_hand_row(conv, "conv 3 x 3 of 8 x 16 x 64 x 64"),
    by_hand_row(attention, "attention, 8 x 4 heads, 128 keys, padded"),
    safe("x / y", torch.div, masked.safe_divide, MILLION, MILLION),
    safe("sqrt", torch.sqrt, masked.safe_sqrt, MILLION),
    safe("x / norm", lambda x: x / x.norm(dim=-1, keepdim=True), masked.safe_normalize, MILLION),
]
