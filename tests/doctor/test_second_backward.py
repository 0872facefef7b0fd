"""A graph that is walked twice."""

import torch

from tests.doctor.programs import X, faulty, healthy, two


@faulty("GG701")
def the_same_loss_twice():
    m = two()

    def step():
        loss = m.head(m.encoder(X)).mean()  # HERE
        loss.backward()
        loss.backward()

    return step, m


@faulty("GG701")
def two_losses_of_one_encoder():
    m = two()

    def step():
        h = torch.tanh(m.encoder(X))  # HERE
        m.head(h).mean().backward()
        h.pow(2).mean().backward()

    return step, m


@faulty("GG701")
def a_hidden_state_in_a_loop():
    m = two()

    def step():
        h = torch.zeros(6, 4)
        for _ in range(2):
            h = torch.tanh(m.encoder(X) + h)  # HERE
            m.head(h).mean().backward()  # ALSO

    return step, m


@faulty("GG701")
def a_hidden_state_from_before():
    m = two()
    state = {"h": torch.tanh(m.encoder(X))}
    state["h"].mean().backward()

    def step():
        state["h"] = torch.tanh(m.encoder(X) + state["h"])  # HERE
        m.head(state["h"]).mean().backward()

    return step, m


@healthy("GG701")
def retained():
    m = two()

    def step():
        loss = m.head(m.encoder(X)).mean()
        loss.backward(retain_graph=True)
        loss.backward()

    return step, m


@healthy("GG701")
def a_detached_state():
    m = two()

    def step():
        h = torch.zeros(6, 4)
        for _ in range(3):
            h = torch.tanh(m.encoder(X) + h.detach())
            m.head(h).mean().backward()

    return step, m


@healthy("GG701")
def several_forwards():
    m = two()

    def step():
        for scale in (1.0, 2.0):
            m.head(m.encoder(X * scale)).mean().backward()

    return step, m
