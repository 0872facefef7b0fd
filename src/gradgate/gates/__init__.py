"""What a gradient meets on its way back: gates that leave the values alone and act on the gradient."""

from gradgate._names import suggest_names
from gradgate.gates._adaptive import AdaptiveClip
from gradgate.gates._assertion import check
from gradgate.gates._functions import (
    ClipGrad,
    FiniteGrad,
    Gate,
    ReverseGrad,
    ScaleGrad,
    clip_grad,
    finite_grad,
    gate,
    reverse_grad,
    scale_grad,
    straight_through,
)
from gradgate.gates._rules import GateMeter

__all__ = [
    "gate",
    "scale_grad",
    "reverse_grad",
    "clip_grad",
    "finite_grad",
    "straight_through",
    "check",
    "GateMeter",
    "Gate",
    "ScaleGrad",
    "ReverseGrad",
    "ClipGrad",
    "FiniteGrad",
    "AdaptiveClip",
]

suggest_names(__name__)
