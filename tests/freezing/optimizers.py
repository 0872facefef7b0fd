"""Every optimizer of torch.optim by introspection, in every way of running that its signature offers."""

import inspect
from dataclasses import dataclass

import torch

# Settings that make an optimizer as dangerous as it can be: decay, momentum, and whatever else moves without gradient.
HARSH = {
    "SGD": [
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.5},
    ],
    "Adam": [{"weight_decay": 0.1}, {"weight_decay": 0.1, "amsgrad": True}],
    "AdamW": [{"weight_decay": 0.1}, {"weight_decay": 0.1, "amsgrad": True}],
    "RMSprop": [{"weight_decay": 0.1, "momentum": 0.9, "centered": True}],
    "NAdam": [{"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RAdam": [{"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "ASGD": [{"weight_decay": 0.1, "lambd": 0.1, "t0": 1}],
    "LBFGS": [{"max_iter": 3}, {"max_iter": 3, "line_search_fn": "strong_wolfe"}],
    "Rprop": [{}],
    "SparseAdam": [{}],
    "Muon": [{"weight_decay": 0.1}],
}
TRAININGS = ("foreach", "fused", "capturable", "maximize")


def classes():
    """Give every optimizer class that torch.optim has, whatever the version."""
    found = (getattr(torch.optim, name) for name in sorted(dir(torch.optim)))
    return [
        c
        for c in found
        if isinstance(c, type) and issubclass(c, torch.optim.Optimizer) and c is not torch.optim.Optimizer
    ]


@dataclass(frozen=True)
class Recipe:
    """One optimizer, ready to be built."""

    kind: type
    options: tuple
    way: str = "plain"

    @property
    def name(self):
        told = {key: value for key, value in self.options if key not in (*TRAININGS, "lr", "max_iter")}
        return f"{self.kind.__name__}({', '.join(f'{k}={v}' for k, v in told.items())})"

    def build(self, parameters):
        return self.kind(parameters, **dict(self.options))

    @property
    def sparse(self):
        return self.kind is torch.optim.SparseAdam

    @property
    def closure(self):
        return self.kind is torch.optim.LBFGS


def recipes():
    """Give every optimizer x its harsh settings x the ways that its signature has."""
    found = []
    for kind in classes():
        arguments = inspect.signature(kind.__init__).parameters
        default = [{"weight_decay": 0.1} if "weight_decay" in arguments else {}]
        for settings in HARSH.get(kind.__name__, default):
            options = {"lr": 0.05, **settings}
            found.append(Recipe(kind, tuple(options.items())))
            if settings is HARSH.get(kind.__name__, default)[0]:
                found += [
                    Recipe(kind, tuple({**options, way: True}.items()), way) for way in TRAININGS if way in arguments
                ]
    return found


def runs_here(recipe):
    """Tell whether torch itself can take a step so on this machine; capturable ones need an accelerator."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = recipe.build([weight])

    def closure():
        optimizer.zero_grad()
        loss = (weight * weight).sum()
        loss.backward()
        if recipe.sparse:
            weight.grad = weight.grad.to_sparse()
        return loss

    closure()
    try:
        optimizer.step(closure) if recipe.closure else optimizer.step()
    except (RuntimeError, AssertionError) as reason:
        return str(reason)
    return True
