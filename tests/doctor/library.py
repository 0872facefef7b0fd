"""Stands for code of a library that the user calls."""


def normalise(h):
    centred = h - h.mean()
    return centred.detach()  # HERE
