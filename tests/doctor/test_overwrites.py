"""In-place writes: who saved, who overwrote, and who is not to blame."""

import gc
import weakref

import pytest
import torch
from torch import nn

import gradgate as gg
from tests.doctor import programs
from tests.doctor.programs import X, check_faulty, faulty, healthy, two


@faulty("GG601")
def augmented_assignment():
    m = two()

    def step():
        h = torch.sigmoid(m.encoder(X))  # ALSO
        skip = h
        h += 1.0  # HERE
        return (m.head(h) * skip).sum()

    return step, m


@faulty("GG601")
def an_element_set():
    m = two()

    def step():
        h = m.encoder(X).exp()  # ALSO
        h[0] = 0.0  # HERE
        return m.head(h).mean()

    return step, m


@faulty("GG601")
def through_a_view():
    m = two()

    def step():
        h = m.encoder(X).tanh()  # ALSO
        column = h[:, 1:3]
        column.mul_(2)  # HERE
        return m.head(h).mean()

    return step, m


@faulty("GG601")
def in_a_loop():
    m = two()

    def step():
        h = torch.zeros(6, 4)
        for i in range(4):
            h[:, i] = m.encoder(h)[:, i]  # HERE
        return m.head(h).mean()

    return step, m


@faulty("GG601")
def an_out_argument():
    m = two()
    buffer = torch.zeros(6, 4)

    def step():
        h = m.encoder(X) * buffer  # ALSO
        torch.add(buffer, 1.0, out=buffer)  # HERE
        return m.head(h).mean()

    return step, m


@faulty("GG601")
def a_list_of_tensors():
    m = two()

    def step():
        h = m.encoder(X).exp()  # ALSO
        with torch.no_grad():
            torch._foreach_mul_([h], 2.0)  # HERE
        return m.head(h).mean()

    return step, m


@faulty("GG601")
def an_optimizer_step_too_early():
    m = two()
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    m.head(X).mean().backward()

    def step():
        loss = m.head(m.encoder(X)).mean()  # ALSO
        optimizer.step()  # HERE
        loss.backward()

    return step, m


@faulty("GG601")
def an_adam_step_too_early():
    m = two()
    optimizer = torch.optim.Adam(m.parameters(), lr=0.1, foreach=True)
    m.head(X).mean().backward()

    def step():
        loss = m.head(m.encoder(X)).mean()
        optimizer.step()  # HERE
        loss.backward()

    return step, m


@faulty("GG602")
def a_write_to_data():
    m = two()

    def step():
        h = torch.sigmoid(m.encoder(X))  # ALSO
        h.data.zero_()  # HERE
        return m.head(h).mean()

    return step, m


@faulty("GG602")
def a_clamp_of_the_weights():
    m = two()

    def step():
        h = m.encoder(X)
        loss = m.head(h.relu()).mean()  # ALSO
        m.head.weight.data.clamp_(-0.01, 0.01)  # HERE
        return loss

    return step, m


@faulty("GG602")
def a_slice_of_data_in_a_function():
    m = two()

    def censor(x):
        x.data[:, 0] = 0.0  # HERE

    def step():
        h = m.encoder(X).exp()  # ALSO
        censor(h)
        return m.head(h).mean()

    return step, m


@faulty("GG603")
def a_weight_set():
    m = two()

    def step():
        m.encoder.weight[0] = 1.0  # HERE
        return m.head(m.encoder(X)).mean()

    return step, m


@faulty("GG603")
def a_weight_added_to():
    m = two()

    def step():
        m.encoder.bias += 1.0  # HERE
        return m.head(m.encoder(X)).mean()

    return step, m


@faulty("GG603")
def a_leaf_zeroed():
    w = torch.ones(4, requires_grad=True)

    def step():
        w.zero_()  # HERE
        return (w * X).sum()

    return step


@faulty("GG604")
def one_of_several_views():
    m = two()

    def step():
        first, *_ = m.encoder(X).unbind(dim=1)
        first.mul_(2)  # HERE
        return first.mean()

    return step, m


@faulty("GG604")
def a_chunk():
    m = two()

    def step():
        left, right = m.encoder(X).chunk(2, dim=1)
        left += right  # HERE
        return left.mean()

    return step, m


@faulty("GG604")
def a_split():
    m = two()

    def step():
        parts = torch.split(m.encoder(X), 2, dim=0)
        parts[0].zero_()  # HERE
        return parts[0].mean()

    return step, m


@healthy("GG601", "GG602")
def inplace_relu_and_batchnorm_twice():
    m = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    return lambda: (m(X) + m(X * 2)).mean(), m


@healthy("GG602", "GG601")
def data_of_another_part():
    m = two()
    table = torch.zeros(4, 8)

    def step():
        left = table[:, :4]
        h = m.encoder(X) @ left.T
        table.data[:, 4:].fill_(1.0)
        return m.head(h + m.encoder(X)).mean()

    return step, m


@healthy("GG601")
def a_write_that_nobody_needs():
    m = two()

    def step():
        h = m.encoder(X)
        h += 1.0
        h[0] = h[0] * 2
        return m.head(h).mean()

    return step, m


@healthy("GG602")
def data_written_after_backward():
    m = two()

    def step():
        m.head(m.encoder(X)).mean().backward()
        m.head.weight.data.clamp_(-0.01, 0.01)

    return step, m


@healthy("GG603", "GG604")
def a_weight_set_inside_no_grad():
    m = two()

    def step():
        with torch.no_grad():
            m.encoder.weight[0] = 1.0
        return m.head(m.encoder(X)).mean()

    return step, m


@healthy("GG603", "GG604")
def a_functional_edit():
    m = two()
    return lambda: m.head(gg.at(m.encoder(X))[:, 0].set(0.0)).mean() + gg.at(m.head.weight)[0, 0].set(1.0).sum(), m


def test_both_lines_and_the_rewrite_are_told():
    finding = check_faulty("GG601", augmented_assignment)
    assert finding.title == "`h += 1.0` overwrites a tensor that backward still needs"
    assert "`torch.sigmoid(m.encoder(X))`" in finding.reason
    assert finding.fix == "h = h + value     # a new tensor"
    assert "gg.at" in check_faulty("GG601", an_element_set).fix


def test_the_error_of_torch_is_the_exception_of_the_diagnosis():
    diagnosis = programs.examine(augmented_assignment)
    assert isinstance(diagnosis.exception, RuntimeError)
    assert "has been modified by an inplace operation" in str(diagnosis.exception)


@pytest.mark.slow
def test_graphs_that_are_dropped_do_not_leak():
    m = two()
    with gg.trace(m):
        h = m.encoder(X).exp()
        alive = weakref.ref(h)
        del h
        gc.collect()
        assert alive() is None
