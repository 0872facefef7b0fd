"""Is autograd recording? `grad_mode` switches it by a flag: as a call, a block or a decorator, and restores it.

How the parts fit: `_scope` is what users meet; `_lock` keeps a bare `torch.set_grad_enabled(...)` from changing a mode
that is in force; `_driving` runs generators and coroutines in a mode, step by step; `_tasks` binds a block that is held
over an `await` to its asyncio task.
"""

from gradgate.modes._scope import carry_mode, grad_mode

__all__ = ["carry_mode", "grad_mode"]
