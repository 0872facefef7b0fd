"""Values left out, in value and in gradient.

Every function takes `keep=` (a boolean mask, True takes part) and `exclude=` (a value or values that do not). What is
kept gives the value and the gradient that it would give if the rest had never been there; what is left out gets a
gradient of exactly 0, also when it is NaN or infinite, and also when the gradient that arrives there is.
"""

from gradgate.masked._apply import apply_rows, apply_where
from gradgate.masked._extremes import amax, amin, argmax, argmin
from gradgate.masked._impute import impute
from gradgate.masked._mode import mode
from gradgate.masked._normalization import batch_norm, layer_norm
from gradgate.masked._norms import norm, normalize
from gradgate.masked._quantiles import median, quantile
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
from gradgate.masked._softmax import log_softmax, logsumexp, softmax
from gradgate.masked._spread import std, var
from gradgate.masked._sums import count, cumsum, mean, prod, sum
from gradgate.masked._valid import valid

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
