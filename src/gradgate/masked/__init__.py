"""Values left out, in value and in gradient.

Every function takes `keep=` (a boolean mask, True takes part; or several, or a function of x) and `exclude=` (a value
or values that do not). The kept elements have the value and the gradient that they would have if the rest had never
been there; a left-out element gets a gradient of exactly 0, even if it or the gradient that arrives there is NaN or
infinite.
"""

from gradgate._names import suggest_names
from gradgate.masked._apply import apply_rows, apply_where
from gradgate.masked._impute import impute
from gradgate.masked._normalization import batch_norm, layer_norm, log_softmax, logsumexp, softmax
from gradgate.masked._order import amax, amin, argmax, argmin, cummax, cummin, median, mode, quantile
from gradgate.masked._reductions import count, cumprod, cumsum, mean, norm, normalize, prod, std, sum, var
from gradgate.masked._safe import (
    safe_acos,
    safe_asin,
    safe_divide,
    safe_log,
    safe_norm,
    safe_normalize,
    safe_pow,
    safe_sqrt,
)
from gradgate.masked._slices import valid
from gradgate.masked._statistics import corrcoef, cov, histogram
from gradgate.masked._windows import attention, avg_pool, conv, max_pool

__all__ = [
    "valid",
    "count",
    "sum",
    "prod",
    "mean",
    "var",
    "std",
    "amin",
    "amax",
    "argmin",
    "argmax",
    "median",
    "quantile",
    "mode",
    "norm",
    "logsumexp",
    "softmax",
    "log_softmax",
    "normalize",
    "cumsum",
    "cumprod",
    "cummax",
    "cummin",
    "histogram",
    "cov",
    "corrcoef",
    "avg_pool",
    "max_pool",
    "conv",
    "attention",
    "batch_norm",
    "layer_norm",
    "impute",
    "apply_where",
    "apply_rows",
    "safe_divide",
    "safe_log",
    "safe_sqrt",
    "safe_pow",
    "safe_norm",
    "safe_normalize",
    "safe_acos",
    "safe_asin",
]

suggest_names(__name__)
