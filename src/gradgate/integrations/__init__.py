"""The guard where people train: one module for each framework, the only one that imports it.

`gradgate.integrations.transformers`, `.lightning`, `.accelerate` and `.loggers` are imported by name. Nothing else in
the library imports them, and no package of theirs is a requirement: `pip install "gradgate[frameworks]"` has all.
"""
