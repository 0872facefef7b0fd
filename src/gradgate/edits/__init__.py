"""Change values, keep autograd: `at(x)[idx].set(v)` gives a new tensor, and gradients reach x and v."""

from gradgate._names import suggest_names
from gradgate.edits._at import At, Selection, at

__all__ = ["at", "At", "Selection"]

suggest_names(__name__)
