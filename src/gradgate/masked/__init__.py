"""Values left out, in value and in gradient.

Every function takes `keep=` (a boolean mask, True takes part) and `exclude=` (a value or values that do not). What is
kept gives the value and the gradient that it would give if the rest had never been there; what is left out gets a
gradient of exactly 0, also when it is NaN or infinite, and also when the gradient that arrives there is.
"""

from gradgate.masked._valid import valid

__all__ = ["valid"]
