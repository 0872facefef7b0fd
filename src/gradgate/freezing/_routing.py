"""Which loss trains which part: `route`, the conflict between losses, and its resolution."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, permutations
from typing import Any, Literal

import torch
from torch import nn

from gradgate._checks import wrong_type, wrong_value
from gradgate._names import describe, listed, nearest
from gradgate._text import user_level
from gradgate._torch_distributed import Replica, shard_roots
from gradgate._torch_private import as_written
from gradgate.errors import ArgumentTypeError, ArgumentValueError, GradgateWarning
from gradgate.freezing._layers import Selector, bare, select, wording


@dataclass(frozen=True, slots=True)
class Conflict:
    """How two losses agree about one layer.

    Attributes:
        layer: The name of the module.
        losses: The two losses.
        cosine: The cosine of the angle between their gradients: 1 where they agree, negative where a step for one
            undoes some of the other's, 0 where one of them is 0.
    """

    layer: str
    losses: tuple[str, str]
    cosine: float


class Routing:
    """What `route` did.

    Attributes:
        trains: The parameters that each loss trains.
        unrouted: The trainable parameters that are in no route; they got no gradient.
        backwards: How many backward passes it took.
    """

    def __init__(self, trains: dict[str, tuple[str, ...]], unrouted: tuple[str, ...]) -> None:
        self.trains, self.unrouted = trains, unrouted
        self.backwards = 0
        self._cosines: list[tuple[str, tuple[str, str], torch.Tensor]] = []

    @cached_property
    def conflicts(self) -> list[Conflict]:
        """The cosine for each layer and each pair of losses that train it; empty unless it was measured."""
        # Computed with the gradients and read here, so that no step waits for a device.
        return [Conflict(layer, pair, float(cosine)) for layer, pair, cosine in self._cosines]

    def __repr__(self) -> str:
        parts = [f"{name}: {len(names)} parameters" for name, names in self.trains.items()]
        if self.unrouted:
            parts.append(f"in no route: {listed(self.unrouted)}")
        if self._cosines:
            worst = min(self.conflicts, key=lambda one: one.cosine)
            parts.append(f"lowest cosine {worst.cosine:.2g}, {' and '.join(worst.losses)} in {worst.layer or 'model'}")
        return f"Routing({'; '.join(parts)})"


def route(
    routes: Mapping[Selector, Sequence[str]],
    losses: Mapping[str, torch.Tensor],
    model: nn.Module,
    *,
    measure: bool = False,
    resolve: Literal["pcgrad"] | None = None,
    retain_graph: bool = False,
) -> Routing:
    """Run backward so that each part of a model learns from the losses that it is routed to, and from no other.

    It replaces `loss.backward()`. Losses that train the same parameters share one backward pass, unless their gradients
    are measured or resolved. A loss reaches the encoder through a head that it does not train.

    Args:
        routes: For each part, as a selector of `freeze`, the names of the losses that train it. Parts may overlap; one
            with an empty list gets no gradient.
        losses: The losses by name, each one number; multiply them by their weights before.
        model: The model.
        measure: Whether to measure the conflict: the cosine of each pair of losses in each layer they share.
        resolve: "pcgrad" takes out of each loss's gradient what opposes another loss (Yu et al. 2020, "Gradient
            Surgery"), in the order of the losses instead of a random one. It measures the conflict too, before.
        retain_graph: Whether to keep the graph for another backward.

    Returns:
        What trains what, and the measured conflict.

    Raises:
        NothingMatchedError: A selector matches no parameter.
        ArgumentTypeError: A loss is not a tensor of one number.
        ArgumentValueError: An unknown loss, one in no route or without a graph, or a model in DDP or FSDP2.

    Examples:
        >>> model = torch.nn.ModuleDict({"encoder": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 1)})
        >>> code = model["encoder"](torch.ones(1, 2))
        >>> losses = {"class": model["head"](code).sum(), "size": code.square().sum()}
        >>> gg.route({"encoder.*": ["size"], "head.*": ["class"]}, losses, model)
        Routing(class: 2 parameters; size: 2 parameters)
    """
    inner = bare(model, "route")
    _check(model, routes, losses, resolve)
    learning = {as_written(name): one for name, one in inner.named_parameters() if one.requires_grad}
    routing = _routing(inner, routes, losses, learning)
    separate = measure or resolve is not None
    passes: dict[object, tuple[list[str], tuple[str, ...]]] = {}  # the losses and the parameters of each
    for loss, names in routing.trains.items():
        if names:
            passes.setdefault(loss if separate else names, ([], names))[0].append(loss)
    before = {name: one.grad for name, one in learning.items()}
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    try:
        for together, names in passes.values():
            parameters = [learning[name] for name in names]
            for parameter in parameters if separate else ():
                parameter.grad = None
            routing.backwards += 1
            keep = retain_graph or routing.backwards < len(passes)
            torch.autograd.backward([losses[loss] for loss in together], inputs=parameters, retain_graph=keep)
            got = {name: parameter.grad for name, parameter in zip(names, parameters, strict=True)}
            gradients[together[0]] = {name: gradient for name, gradient in got.items() if gradient is not None}
    finally:  # also after an error
        for name, parameter in learning.items() if separate else ():
            parameter.grad = before[name]
    if separate:
        with torch.no_grad():
            routing._cosines = _cosines(gradients, list(learning))
            if resolve:
                _resolve(gradients, routing.trains, list(learning))
            for own in gradients.values():
                for name, gradient in own.items():
                    _accumulate(learning[name], gradient)
    return routing


def _accumulate(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    old = parameter.grad
    in_place = old is not None and old.layout is gradient.layout
    parameter.grad = gradient if old is None else old.add_(gradient) if in_place else old + gradient


def _routing(
    model: nn.Module,
    routes: Mapping[Selector, Sequence[str]],
    losses: Mapping[str, torch.Tensor],
    learning: dict[str, nn.Parameter],
) -> Routing:
    allowed: dict[str, set[str]] = {loss: set() for loss in losses}
    routed: set[str] = set()
    for selector, names in routes.items():
        chosen = select(model, (selector,), "route")
        routed.update(chosen)
        for loss in (names,) if isinstance(names, str) else names:
            if loss not in losses:
                what = f"route(): {wording(selector)} is routed to {loss!r}, which is no loss."
                why = f"the losses are {listed([repr(name) for name in losses])}."
                raise ArgumentValueError(what, why=why, fix="".join(map(repr, nearest(loss, losses, 1))))
            allowed[loss].update(chosen)
    if idle := [loss for loss in losses if not allowed[loss]]:
        why = "it would train nothing."
        fix = f'{{"*": {idle}}}   # or leave it out of the losses'
        raise ArgumentValueError(f"route(): {listed([repr(loss) for loss in idle])} is in no route.", why=why, fix=fix)
    trains = {loss: tuple(name for name in learning if name in allowed[loss]) for loss in losses}
    if cut := [loss for loss, names in trains.items() if names and not losses[loss].requires_grad]:
        why = "something on the way to it was detached or computed without recording."
        fix = f"print(gg.diagnose(lambda: losses[{cut[0]!r}], model=model))"
        raise ArgumentValueError(f"route(): the loss {cut[0]!r} has no graph.", why=why, fix=fix)
    unrouted = tuple(name for name in learning if name not in routed)
    if unrouted:
        warnings.warn(
            f"route(): {listed(unrouted)} of {type(model).__name__} is in no route and gets no gradient; an empty list "
            "of losses says that this is meant.",
            GradgateWarning,
            stacklevel=user_level(),
        )
    return Routing(trains, unrouted)


def _check(model: nn.Module, routes: Any, losses: Any, resolve: Any) -> None:
    for name, given in (("routes", routes), ("losses", losses)):
        if not isinstance(given, Mapping):
            why = "losses have names, and each part of the model a list of these names."
            fix = 'gg.route({"encoder.*": ["reconstruction"]}, {"reconstruction": loss}, model)'
            raise wrong_type(given, name, "route", why, fix)
    for name, loss in losses.items():
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            why = "a gradient is that of one number."
            fix = f"{{{name!r}: loss.mean()}}" if isinstance(loss, torch.Tensor) else ""
            raise ArgumentTypeError(f"route(): the loss {name!r} is {describe(loss)}.", why=why, fix=fix)
    if resolve not in (None, "pcgrad"):
        why = 'a conflict is resolved by "pcgrad" or not at all.'
        raise wrong_value(resolve, "resolve", "route", why, 'resolve="pcgrad"')
    if any(isinstance(part, Replica) for part in model.modules()) or shard_roots(model):
        why = "they reduce gradients in the one backward that they expect after a forward."
        fix = "with ddp.no_sync(): ...   # forward, and route() with ddp.module; then all_reduce each gradient"
        raise ArgumentValueError("route(): the model is inside DistributedDataParallel or FSDP2.", why=why, fix=fix)


def _dot(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], names: Sequence[str]) -> torch.Tensor:
    shared = [(one[name], other[name]) for name in names if name in one and name in other]
    products = [(a * b).sum(dtype=torch.promote_types(a.dtype, torch.float32)) for a, b in shared]
    return torch.stack(products).sum() if products else torch.zeros(())


def _cosines(
    gradients: dict[str, dict[str, torch.Tensor]], learning: list[str]
) -> list[tuple[str, tuple[str, str], torch.Tensor]]:
    found = []
    layers: dict[str, list[str]] = {}
    for name in learning:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    for layer, names in layers.items():
        for one, other in combinations(gradients, 2):
            a, b = gradients[one], gradients[other]
            if shared := [name for name in names if name in a and name in b]:
                lengths = _dot(a, a, shared).sqrt() * _dot(b, b, shared).sqrt()
                found.append((layer, (one, other), torch.where(lengths == 0, 0, _dot(a, b, shared) / lengths)))
    return found


def _resolve(
    gradients: dict[str, dict[str, torch.Tensor]], trains: dict[str, tuple[str, ...]], learning: list[str]
) -> None:
    """Project each gradient onto the normal plane of those that it opposes, as they were before."""
    regions: dict[tuple[str, ...], list[str]] = {}
    for name in learning:
        if among := tuple(loss for loss in gradients if name in trains[loss]):
            regions.setdefault(among, []).append(name)
    original = {loss: dict(own) for loss, own in gradients.items()}
    for among, names in regions.items():
        for one, other in permutations(among, 2):
            own, opposed = gradients[one], original[other]
            squared, against = _dot(opposed, opposed, names), _dot(own, opposed, names).clamp(max=0)
            factor = torch.where(squared == 0, 0, against / squared)
            for name in names:
                if name in opposed:
                    part = opposed[name] * factor.to(opposed[name].dtype)
                    own[name] = own[name] - part if name in own else -part
