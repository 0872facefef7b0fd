"""The right denominator, and losses that a few bad values cannot dominate."""

from gradgate._names import suggest_names
from gradgate.losses._denominator import ExactMean, reduce
from gradgate.losses._masked_loss import masked_loss
from gradgate.losses._robust import (
    adaptive,
    barron,
    cauchy,
    charbonnier,
    geman_mcclure,
    huber,
    inliers,
    record_decisions,
    robust_weights,
    trimmed,
    tukey,
    welsch,
)

__all__ = [
    "reduce",
    "masked_loss",
    "ExactMean",
    "inliers",
    "trimmed",
    "huber",
    "cauchy",
    "welsch",
    "geman_mcclure",
    "tukey",
    "charbonnier",
    "barron",
    "adaptive",
    "robust_weights",
    "record_decisions",
]

suggest_names(__name__)
