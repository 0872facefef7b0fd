"""What a gradient meets on its way back: gates that leave the values alone and act on the gradient."""

from gradgate._names import suggest_names
from gradgate.gates._adaptive import AdaptiveClip as AdaptiveClip
from gradgate.gates._assertion import check as check
from gradgate.gates._functions import clip_grad as clip_grad
from gradgate.gates._functions import finite_grad as finite_grad
from gradgate.gates._functions import gate as gate
from gradgate.gates._functions import reverse_grad as reverse_grad
from gradgate.gates._functions import scale_grad as scale_grad
from gradgate.gates._functions import straight_through as straight_through
from gradgate.gates._modules import ClipGrad as ClipGrad
from gradgate.gates._modules import FiniteGrad as FiniteGrad
from gradgate.gates._modules import Gate as Gate
from gradgate.gates._modules import ReverseGrad as ReverseGrad
from gradgate.gates._modules import ScaleGrad as ScaleGrad
from gradgate.gates._rules import GateMeter as GateMeter

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
