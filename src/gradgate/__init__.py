"""Decide, value by value, what your PyTorch model learns from - and keep training when some of the values are bad.

The root is lazy: a package, and with it torch, is loaded when one of its names is first used.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.2.0"

# Type checkers take this name for True; importing it from typing would be most of the cost of this import.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gradgate import doctor as doctor
    from gradgate import edits as edits
    from gradgate import freezing as freezing
    from gradgate import gates as gates
    from gradgate import guard as guard
    from gradgate import ledger as ledger
    from gradgate import loading as loading
    from gradgate import losses as losses
    from gradgate import masked as masked
    from gradgate import modes as modes
    from gradgate import replaying as replaying
    from gradgate import report as report
    from gradgate import rewind as rewind
    from gradgate import testing as testing
    from gradgate.doctor import Diagnosis as Diagnosis
    from gradgate.doctor import diagnose as diagnose
    from gradgate.doctor import trace as trace
    from gradgate.doctor import watch as watch
    from gradgate.edits import allow_overwrites as allow_overwrites
    from gradgate.edits import at as at
    from gradgate.errors import GradgateError as GradgateError
    from gradgate.errors import TooManyBadSamples as TooManyBadSamples
    from gradgate.freezing import FreezeSchedule as FreezeSchedule
    from gradgate.freezing import freeze as freeze
    from gradgate.freezing import pin as pin
    from gradgate.freezing import route as route
    from gradgate.freezing import train_only as train_only
    from gradgate.freezing import train_rows as train_rows
    from gradgate.freezing import trainable as trainable
    from gradgate.gates import AdaptiveClip as AdaptiveClip
    from gradgate.gates import ClipGrad as ClipGrad
    from gradgate.gates import FiniteGrad as FiniteGrad
    from gradgate.gates import Gate as Gate
    from gradgate.gates import GateMeter as GateMeter
    from gradgate.gates import ReverseGrad as ReverseGrad
    from gradgate.gates import ScaleGrad as ScaleGrad
    from gradgate.gates import check as check
    from gradgate.gates import clip_grad as clip_grad
    from gradgate.gates import finite_grad as finite_grad
    from gradgate.gates import gate as gate
    from gradgate.gates import reverse_grad as reverse_grad
    from gradgate.gates import scale_grad as scale_grad
    from gradgate.gates import straight_through as straight_through
    from gradgate.guard import Guard as Guard
    from gradgate.ledger import Ledger as Ledger
    from gradgate.loading import QuarantineSampler as QuarantineSampler
    from gradgate.loading import collate as collate
    from gradgate.loading import resilient as resilient
    from gradgate.loading import without as without
    from gradgate.masked import apply_rows as apply_rows
    from gradgate.masked import apply_where as apply_where
    from gradgate.modes import carry_mode as carry_mode
    from gradgate.modes import grad_mode as grad_mode
    from gradgate.records import Finding as Finding
    from gradgate.records import Incident as Incident
    from gradgate.replaying import replay as replay
    from gradgate.rewind import Rewind as Rewind

# The public names of each package; tests/test_contracts.py keeps this equal to the imports above.
_PACKAGES = {
    "doctor": "Diagnosis diagnose trace watch",
    "edits": "allow_overwrites at",
    "errors": "GradgateError TooManyBadSamples",
    "freezing": "FreezeSchedule freeze pin route train_only train_rows trainable",
    "gates": "AdaptiveClip ClipGrad FiniteGrad Gate GateMeter ReverseGrad ScaleGrad "
    "check clip_grad finite_grad gate reverse_grad scale_grad straight_through",
    "guard": "Guard",
    "ledger": "Ledger",
    "loading": "QuarantineSampler collate resilient without",
    "losses": "",
    "masked": "apply_rows apply_where",
    "modes": "carry_mode grad_mode",
    "records": "Finding Incident",
    "replaying": "replay",
    "report": "",
    "rewind": "Rewind",
    "testing": "",
}
_PACKAGE_OF = {name: package for package, names in _PACKAGES.items() for name in names.split()}

__all__ = ["__version__", *_PACKAGE_OF, *_PACKAGES]  # noqa: PLE0604 - all of them are text


def load_ipython_extension(ipython: Any) -> None:
    """Load what `%load_ext gradgate` brings: `%%doctor`, and incidents as tables."""
    import_module("gradgate.integrations.ipython").load(ipython)


def __getattr__(name: str) -> Any:
    if name in _PACKAGE_OF:
        value = getattr(import_module(f"gradgate.{_PACKAGE_OF[name]}"), name)
    elif name in _PACKAGES:
        value = import_module(f"gradgate.{name}")
    else:
        from difflib import get_close_matches  # Here, because `import gradgate` loads next to nothing.

        best = [] if name.startswith("_") else get_close_matches(name, __all__, n=1)
        guess = f"; did you mean {best[0]}?" if best else ""
        raise AttributeError(f"module 'gradgate' has no attribute {name!r}{guess}", name=name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
