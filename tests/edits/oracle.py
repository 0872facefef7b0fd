"""The slow, obvious edit: one element after the other, in the order of the index, as plain Python."""

import torch

NAMES = ("set", "add", "subtract", "multiply", "divide", "power", "min", "max")


def edit(x, index, name, value):
    """Edit a list of 0-dim tensors element by element; autograd sees nothing but single numbers.

    `min` and `max` collect the candidates of a place first and share the gradient evenly, as promised.
    """
    places = torch.arange(x.numel()).reshape(x.shape)[index]
    values = torch.as_tensor(value, dtype=x.dtype).expand(places.shape).reshape(-1)
    new = list(x.reshape(-1).unbind()) if x.numel() else []
    candidates = {}
    for place, v in zip(places.reshape(-1).tolist(), values.unbind() if values.numel() else [], strict=True):
        candidates.setdefault(place, []).append(v)
    for place, several in candidates.items():
        new[place] = _combine(name, new[place], several)
    return torch.stack(new).reshape(x.shape) if new else x.clone()


def _combine(name, old, several):
    if name == "set":
        return several[-1]
    if name in ("min", "max"):
        return getattr(torch.stack([old, *several]), f"a{name}")()
    if name == "power":
        exponent = several[0]
        for v in several[1:]:
            exponent = exponent * v
        return old**exponent
    rule = {"add": torch.add, "subtract": torch.sub, "multiply": torch.mul, "divide": torch.div}[name]
    for v in several:
        old = rule(old, v)
    return old
