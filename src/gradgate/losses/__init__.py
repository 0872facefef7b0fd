"""The right denominator, and losses that a few bad values cannot dominate.

A loss is divided by what took part in it - not by the size of the batch, not by the number of micro-batches or ranks -
and what is left out is not evaluated at all, so that it can hurt neither value nor gradient.
"""

from gradgate._names import suggest_names
from gradgate.losses._denominator import ExactMean, reduce
from gradgate.losses._masked_loss import masked_loss
from gradgate.losses._outliers import inliers, record_decisions, trimmed
from gradgate.losses._robust import (
    adaptive,
    barron,
    cauchy,
    charbonnier,
    geman_mcclure,
    huber,
    robust_weights,
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
