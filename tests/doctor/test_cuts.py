"""Parameters without a gradient, and the line that is to blame."""

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradgate as gg
from tests.doctor import library
from tests.doctor.programs import X, check_faulty, faulty, healthy, silence, two


class Detaching(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        h = self.encoder(x)
        h = h.relu().detach()  # HERE
        return self.head(h)


@faulty("GG101")
def detach():
    m = two()

    def step():
        h = m.encoder(X).detach()  # HERE
        return m.head(h).mean()

    return step, m


@faulty("GG101")
def detach_in_place():
    m = two()

    def step():
        h = m.encoder(X)
        h.detach_()  # HERE
        return m.head(h).mean()

    return step, m


@faulty("GG101")
def data():
    m = two()

    def step():
        return m.head(m.encoder(X).data).mean()  # HERE

    return step, m


@faulty("GG101")
def no_grad_block():
    m = two()

    def step():
        with torch.no_grad():  # HERE
            h = m.encoder(X)  # ALSO
        return m.head(h).mean()

    return step, m


@faulty("GG101")
def no_grad_decorator():
    m = two()

    @torch.no_grad()  # HERE
    def features(x):
        return m.encoder(x)  # ALSO

    return lambda: m.head(features(X)).mean(), m


@faulty("GG101")
def set_grad_enabled_block():
    m = two()

    def step():
        with torch.set_grad_enabled(False):  # HERE
            h = m.encoder(X)
        return m.head(h).mean()

    return step, m


@faulty("GG101")
def set_grad_enabled_statement():
    m = two()

    def step():
        torch.set_grad_enabled(False)  # HERE
        h = m.encoder(X)
        torch.set_grad_enabled(True)
        return m.head(h).mean()

    return step, m


@faulty("GG101")
def inference_mode():
    m = two()

    def step():
        with torch.inference_mode():  # HERE
            h = m.encoder(X)
        return m.head(h.clone()).mean()

    return step, m


@faulty("GG101")
def item():
    m = two()

    def step():
        scale = m.encoder(X).mean().item()  # HERE
        return (m.head(X) * scale).mean()

    return step, m


@faulty("GG101")
def python_float():
    m = two()

    def step():
        with silence():
            scale = float(m.encoder(X).mean())  # HERE
        return (m.head(X) * scale).mean()

    return step, m


@faulty("GG101")
def tolist():
    m = two()

    def step():
        h = torch.tensor([row.tolist() for row in m.encoder(X)])  # HERE
        return m.head(h).mean()

    return step, m


@faulty("GG101")
def numpy_and_back():
    m = two()

    def step():
        h = np.tanh(m.encoder(X).detach().numpy())  # HERE
        return m.head(torch.from_numpy(h)).mean()

    return step, m


@faulty("GG101")
def tensor_of_a_tensor():
    m = two()

    def step():
        h = m.encoder(X)
        with silence():
            h = torch.tensor(h)  # HERE
        return m.head(h).mean()

    return step, m


@faulty("GG101")
def argmax():
    m = two()

    def step():
        best = m.encoder(X).argmax(dim=1, keepdim=True)  # HERE
        return m.head(best.float().expand(6, 4)).mean()

    return step, m


@faulty("GG101")
def comparison():
    m = two()

    def step():
        return m.head((m.encoder(X) > 0).float()).mean()  # HERE

    return step, m


@faulty("GG101")
def integer_cast():
    m = two()

    def step():
        h = m.encoder(X)
        return m.head((h * 10).long().float()).mean()  # HERE

    return step, m


@faulty("GG101")
def reentrant_checkpoint():
    m = two()
    m.head = nn.Linear(4, 1)

    def step():
        with silence():
            h = checkpoint(m.encoder, X, use_reentrant=True)  # HERE
        return m.head(h).mean()

    return step, m


@faulty("GG101")
def in_a_module():
    return (lambda: m(X).mean()), (m := Detaching())


in_a_module.__wrapped__ = Detaching


@faulty("GG101")
def in_a_loop():
    m = two()

    def step():
        h = X
        for _ in range(3):
            h = m.encoder(h)
            h = h.detach()  # HERE
        return m.head(h).mean()

    return step, m


@faulty("GG101")
def into_a_buffer():
    m = two()

    def step():
        h = torch.zeros(6, 4)
        for i, row in enumerate(X):
            h[i] = m.encoder(row).detach()  # HERE
        return m.head(h).mean()

    return step, m


@faulty("GG101")
def in_a_list():
    m = two()

    def step():
        parts = [m.encoder(row).detach() for row in X]  # HERE
        return m.head(torch.stack(parts)).mean()

    return step, m


@faulty("GG101")
def in_library_code():
    m = two()
    return lambda: m.head(library.normalise(m.encoder(X))).mean(), m


in_library_code.__wrapped__ = library.normalise


@faulty("GG101")
def a_leaf_made_of_it():
    m = two()

    def step():
        h = m.encoder(X).detach().requires_grad_()  # HERE
        return m.head(h).mean()

    return step, m


@faulty("GG101")
def zeros_in_place_of_none():
    m = two()
    m.encoder(X).mean().backward()
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad(set_to_none=False)
        m.head(m.encoder(X).detach()).mean().backward()  # HERE

    return step, m


@healthy("GG101", "GG103", "GG201")
def logging_with_item():
    m = two()
    log = []

    def step():
        h = m.encoder(X)
        log.append((h.detach().norm().item(), h.mean().item(), h.tolist(), h.detach().numpy()))
        return m.head(h).mean()

    return step, m


@healthy("GG101", "GG105")
def a_stopped_branch_beside_a_live_one():
    m = two()

    def step():
        h = m.encoder(X)
        return (m.head(h) - m.head(h).detach() * 0.5).pow(2).mean() + (h > 0).float().mean() * h.argmax()

    return step, m


@healthy("GG101", "GG102")
def validation_inside_the_step():
    m = two()

    def step():
        with torch.no_grad():
            (m.head(m.encoder(X)) > 0).float().mean().item()
        return m.head(m.encoder(X)).mean()

    return step, m


def test_the_parameters_and_their_module_are_named():
    finding = check_faulty("GG101", detach)
    assert finding.title == "encoder.weight, encoder.bias get no gradient: cut at `m.encoder(X).detach()`"
    assert finding.module == "encoder"
    assert finding.severity == "error"
    assert finding.fix == "h = h          # without .detach()"


def test_only_the_cut_between_parameter_and_loss_counts():
    m = two()

    def step():
        m.encoder(X).detach().sum()
        return m.head(m.encoder(X)).mean()

    assert gg.diagnose(step, model=m).healthy


def test_several_operations_on_one_line_are_told_apart():
    m = two()
    finding = gg.diagnose(lambda: m.head(m.encoder(X).relu().detach().abs()).mean(), model=m).findings[0]
    assert "cut at `m.encoder(X).relu().detach()`" in finding.title


def test_autograd_grad_that_finds_nothing_is_explained():
    m = two()
    finding = gg.diagnose(
        lambda: torch.autograd.grad(m.head(m.encoder(X).detach()).mean(), [m.head.weight, m.encoder.weight]), model=m
    ).findings[0]
    assert finding.code == "GG101"
    assert finding.title.startswith("encoder.weight gets no gradient")
