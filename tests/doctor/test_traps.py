"""The `where` trap: before it bites, and when it has."""

import torch
from torch import nn

import gradgate as gg
from tests.doctor.programs import X, faulty, healthy, two


def positive():
    """A model whose features stay away from the edge, so that nothing has happened yet."""
    m = two()
    nn.init.constant_(m.encoder.bias, 5.0)
    return m


def at_the_edge():
    """A model whose features are exactly zero in places."""
    m = two()
    with torch.no_grad():
        m.encoder.weight.zero_()
        m.encoder.bias.copy_(torch.tensor([0.0, 1.0, 2.0, -1.0]))
    return m


@faulty("GG501")
def where_sqrt():
    m = positive()

    def step():
        h = m.encoder(X)
        return m.head(torch.where(h > 0, h.sqrt(), torch.zeros(()))).mean()  # HERE

    return step, m


@faulty("GG501")
def where_division_in_a_module():
    class Ratio(nn.Module):
        def forward(self, x):
            zero = x == 0
            return torch.where(zero, torch.zeros_like(x), 1 / x)  # HERE

    m = nn.Sequential(nn.Linear(4, 4), Ratio(), nn.Linear(4, 1))
    nn.init.constant_(m[0].bias, 5.0)
    return lambda: m(X).mean(), m


@faulty("GG501")
def masked_fill_log():
    m = positive()

    def step():
        h = m.encoder(X)
        y = torch.log(h).masked_fill(h <= 0, 0.0)  # HERE
        return m.head(y).mean()

    return step, m


@faulty("GG501")
def indexed_assignment():
    m = positive()

    def step():
        h = m.encoder(X)
        y = X / h
        y[h == 0] = 0.0  # HERE
        return m.head(y).mean()

    return step, m


@faulty("GG501")
def where_on_the_result():
    m = positive()

    def step():
        y = m.encoder(X).log()
        return m.head(torch.where(torch.isfinite(y), y, torch.zeros(()))).mean()  # HERE

    return step, m


@faulty("GG501")
def where_exp():
    m = positive()

    def step():
        h = m.encoder(X)
        return m.head(torch.where(h > 0, h, torch.exp(h) - 1)).mean()  # HERE

    return step, m


@faulty("GG502")
def where_sqrt_at_zero():
    m = at_the_edge()

    def step():
        h = m.encoder(X)
        y = h.sqrt()  # HERE
        return m.head(torch.where(h > 0, y, torch.zeros(()))).mean()  # ALSO

    return step, m


@faulty("GG502")
def selected_after_log():
    m = at_the_edge()

    def step():
        logs = m.encoder(X).log()  # HERE
        return m.head(logs[:, 1:3].repeat(1, 2)).mean() + logs[:, 1].mean()

    return step, nn.ModuleDict({"encoder": m.encoder})


@faulty("GG502")
def nan_to_num_after_division():
    m = at_the_edge()

    def step():
        y = X / m.encoder(X)  # HERE
        return m.head(torch.nan_to_num(y, posinf=0.0, neginf=0.0)).mean()  # ALSO

    return step, m


@healthy("GG501", "GG502")
def both_sides_guarded():
    m = at_the_edge()

    def step():
        h = m.encoder(X)
        keep = h > 0
        safe = torch.where(keep, h, torch.ones(()))
        return m.head(torch.where(keep, safe.sqrt(), torch.zeros(()))).mean()

    return step, m


@healthy("GG501", "GG502")
def apply_where_instead():
    m = at_the_edge()

    def step():
        h = m.encoder(X)
        return m.head(gg.apply_where(h > 0, (h,), torch.sqrt)).mean()

    return step, m


@healthy("GG501")
def a_where_without_risk():
    m = positive()

    def step():
        h = m.encoder(X)
        return m.head(torch.where(h > 0, h * 2, h.tanh())).mean()

    return step, m


@healthy("GG501")
def a_guard_far_from_the_edge():
    m = positive()

    def step():
        h = m.encoder(X)
        return m.head(torch.where(h > 5, h.log(), h)).mean()

    return step, m


@healthy("GG501")
def clamped_before():
    m = at_the_edge()

    def step():
        h = m.encoder(X)
        return m.head(torch.where(h > 0, h.clamp(min=1e-6).sqrt(), torch.zeros(()))).mean()

    return step, m


@healthy("GG502")
def data_without_gradient():
    m = two()

    def step():
        x = torch.where(X > 0, X.clamp(min=0).sqrt(), X)
        return m.head(m.encoder(x)).mean()

    return step, m
