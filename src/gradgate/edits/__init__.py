"""Change values, keep autograd: `at(x)[idx].set(v)` gives a new tensor, and gradients reach x and v."""

from gradgate._names import suggest_names
from gradgate.edits._at import At, Selection, Tree, at
from gradgate.edits._in_place import State, allow_overwrites

__all__ = ["at", "At", "Selection", "Tree", "State", "allow_overwrites"]

suggest_names(__name__)
