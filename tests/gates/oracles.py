"""Each gate once more, slow and plain: the value by copying, the gradient by a Function that says what it does."""

import torch


class Plain(torch.autograd.Function):
    """A copy forward, `rule(gradient)` backward, in operations that autograd can differentiate again."""

    @staticmethod
    def forward(ctx, x, rule):
        ctx.rule = rule
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.rule(gradient), None


def gate(x, keep):
    keep = torch.as_tensor(keep)
    return Plain.apply(x, lambda g: torch.where(keep, g, torch.zeros_like(g)))


def scale_grad(x, factor):
    factor = torch.as_tensor(factor)
    return Plain.apply(x, lambda g: torch.where(factor == 0, torch.zeros_like(g), g * factor).to(g.dtype))


def reverse_grad(x, strength=1.0):
    return scale_grad(x, -torch.as_tensor(strength))


def clip_grad(x, *, max_norm=None, max_value=None, per_sample=False):
    def rule(g):
        if max_value is not None:
            g = torch.minimum(torch.maximum(g, torch.as_tensor(-max_value)), torch.as_tensor(max_value)).to(g.dtype)
        if max_norm is not None and per_sample:
            return torch.stack([shortened(row) for row in g]) if len(g) else g
        return shortened(g) if max_norm is not None else g

    def shortened(g):
        wide = g.to(torch.complex128 if g.is_complex() else torch.float64)
        norm = (wide.abs() ** 2).sum().sqrt()
        return (wide * (max_norm / norm)).to(g.dtype) if norm > max_norm and norm.isfinite() else g

    return Plain.apply(x, rule)


def finite_grad(x, fill_value=0.0):
    return Plain.apply(x, lambda g: torch.where(torch.isfinite(g), g, torch.full_like(g, fill_value)))


def straight_through(hard, soft):
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, soft):
            return hard.detach().clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    return Through.apply(soft)
