"""Gradients that are there and do nothing: zero, vanishing, exploding."""

import torch
from torch import nn

import gradgate as gg
from tests.doctor.programs import X, faulty, healthy, two


def through(function):
    """A step in which a function stands between encoder and head."""
    m = two()
    return lambda: m.head(function(m.encoder(X))).mean(), m


@faulty("GG301")
def rounding():
    m = two()

    def step():
        return m.head(m.encoder(X).round()).mean()  # HERE

    return step, m


@faulty("GG301")
def signs():
    m = two()

    def step():
        h = m.encoder(X)
        h = torch.sign(h)  # HERE
        return m.head(h).mean()

    return step, m


@faulty("GG301")
def quantised_in_a_loop():
    m = two()

    def step():
        h = X
        for _ in range(2):
            h = torch.floor(m.encoder(h) * 4) / 4  # HERE
        return m.head(h).mean()

    return step, m


@faulty("GG302")
def a_dead_relu():
    m = two()
    nn.init.constant_(m.encoder.bias, -100)

    def step():
        return m.head(torch.relu(m.encoder(X))).mean()  # HERE

    return step, m


@faulty("GG302")
def a_dead_module():
    m = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    nn.init.constant_(m[0].bias, -100)
    return lambda: m(X).mean(), m


@faulty("GG302")
def dead_in_the_middle():
    m = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    nn.init.constant_(m[2].bias, -100)
    return lambda: m(X).pow(2).mean(), m


@faulty("GG303")
def a_saturated_sigmoid():
    m = two()

    def step():
        return m.head(torch.sigmoid(m.encoder(X) * 1e4 + 1e6)).mean()  # HERE

    return step, m


@faulty("GG303")
def a_saturated_tanh():
    m = two()
    nn.init.constant_(m.encoder.bias, 1e3)

    def step():
        return m.head(m.encoder(X).tanh()).mean()  # HERE

    return step, m


@faulty("GG303")
def clamped_everywhere():
    m = two()
    nn.init.constant_(m.encoder.bias, 1e3)

    def step():
        return m.head(m.encoder(X).clamp(0, 1)).mean()  # HERE

    return step, m


@faulty("GG304")
def a_loss_weight_of_zero():
    m = two()
    weight = 0.0

    def step():
        return m.head(X).mean() + (m.encoder(X).mean() * weight)  # HERE

    return step, m


@faulty("GG304")
def a_gate_that_is_shut():
    m = two()
    gate = torch.zeros(4)

    def step():
        h = m.encoder(X) * gate  # HERE
        return m.head(h).mean()

    return step, m


@faulty("GG304")
def a_matrix_of_zeros():
    m = two()
    mixing = torch.zeros(4, 4)

    def step():
        return m.head(m.encoder(X) @ mixing).mean()  # HERE

    return step, m


@faulty("GG305")
def a_mask_that_keeps_nothing():
    m = two()
    keep = torch.zeros(6, 4, dtype=torch.bool)

    def step():
        h = torch.where(keep, m.encoder(X), torch.zeros(()))  # HERE
        return m.head(h).mean()

    return step, m


@faulty("GG305")
def filled_everywhere():
    m = two()

    def step():
        h = m.encoder(X).masked_fill(X < 2, 0.0)  # HERE
        return m.head(h).mean()

    return step, m


@faulty("GG305")
def overwritten_by_a_mask():
    m = two()
    everything = torch.ones(6, 4, dtype=torch.bool)

    def step():
        h = m.encoder(X) * 1
        h[everything] = 0.0  # HERE
        return m.head(h).mean()

    return step, m


@faulty("GG306")
def a_deep_stack_of_sigmoids():
    torch.manual_seed(0)
    m = nn.Sequential(*[layer for _ in range(20) for layer in (nn.Linear(4, 4), nn.Sigmoid())], nn.Linear(4, 1))
    return lambda: m(X).mean(), m


@faulty("GG306")
def tiny_weights():
    m = nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)], nn.Linear(4, 1))
    for layer in m[:-1]:
        nn.init.constant_(layer.weight, 1e-3)
    return lambda: m(X).pow(2).mean(), m


@faulty("GG306")
def a_long_recurrence():
    m = nn.ModuleDict({"first": nn.Linear(4, 4), "again": nn.Linear(4, 4), "head": nn.Linear(4, 1)})
    nn.init.constant_(m.again.weight, 0.02)

    def step():
        h = m.first(X)
        for _ in range(10):
            h = torch.tanh(m.again(h))
        return m.head(h).mean()

    return step, m


@faulty("GG307")
def large_weights():
    m = nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)], nn.Linear(4, 1))
    for layer in m:
        nn.init.constant_(layer.weight, 50.0)
    return lambda: m(X).pow(2).mean(), m


@faulty("GG307")
def a_large_loss():
    m = two()
    return lambda: (m.head(m.encoder(X)) * 1e10).mean(), m


@faulty("GG307")
def an_unstable_recurrence():
    m = two()
    nn.init.constant_(m.encoder.weight, 3.0)

    def step():
        h = X
        for _ in range(8):
            h = m.encoder(h)
        return m.head(h).pow(2).mean()

    return step, m


@healthy("GG301")
def rounded_with_a_straight_through_gradient():
    m = two()
    return lambda: m.head(gg.straight_through((h := m.encoder(X)).round(), h)).mean(), m


@healthy("GG301", "GG305")
def a_mask_that_keeps_some():
    m = two()
    return lambda: m.head(torch.where(X > 0, m.encoder(X), X)).mean() + X.round().mean(), m


@healthy("GG302", "GG303")
def some_units_are_off():
    m = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    return lambda: m(X * 3).mean(), m


@healthy("GG302", "GG303", "GG305")
def one_dead_unit():
    m = two()
    m.encoder.bias.data[:1].fill_(-100)
    return lambda: m.head(torch.relu(m.encoder(X)).clamp(0, 10)).mean(), m


@healthy("GG304")
def low_rank_with_a_zero_start():
    class LoRA(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.zeros(2, 1))
            self.full = nn.Linear(4, 1)

        def forward(self, x):
            return self.full(x) + x @ self.a @ self.b

    m = LoRA()
    return lambda: m(X).mean(), m


@healthy("GG304")
def a_zero_initialised_residual():
    m = two()
    m.register_parameter("gamma", nn.Parameter(torch.zeros(1)))
    return lambda: m.head(X + m.gamma * m.encoder(X)).mean(), m


@healthy("GG306", "GG307")
def a_bias_before_batchnorm():
    m = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    return lambda: m(X).mean(), m


@healthy("GG306", "GG307")
def a_deep_residual_network():
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(20))

    def step():
        h = X
        for block in blocks:
            h = h + block(h)
        return h.mean()

    return step, blocks


@faulty("GG307")
def a_gradient_whose_square_is_no_number():
    m = two().double()
    return lambda: (m.head(m.encoder(X.double())) * 1e200).mean(), m
