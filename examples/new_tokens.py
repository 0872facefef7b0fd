"""Teach a language model new words: only their rows of the embedding learn.

A small model of words, with the embedding tied to its output, has learned descriptions of data sets; now its vocabulary
gets two new words. The usual recipe zeroes the gradient of the old rows in a hook, but AdamW's weight decay still moves
them, so the model gets worse on the old text. `gg.train_rows` leaves them bit-identical, and the optimizer keeps state
for two rows instead of the whole table.

Run it: python examples/new_tokens.py        (needs scikit-learn, no network; a few seconds)
"""

from __future__ import annotations

import copy
import re
import sys

import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine
from torch import nn
from torch.nn import functional as F

import gradgate as gg

NEW = {"tumor": "neoplasm", "wine": "vintage"}  # the new words replace these

loaders = (load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine)
words = [word for load in loaders for word in re.findall(r"[a-z]+", load().DESCR.lower())]
known = sorted(set(words))
vocabulary = {word: number for number, word in enumerate([*known, *NEW.values()])}
new_rows = [vocabulary[word] for word in NEW.values()]
old_text = torch.tensor([vocabulary[word] for word in words])
sentences = [words[i - 8 : i + 8] for i, word in enumerate(words) if word in NEW and i >= 8]
new_text = torch.tensor([vocabulary[NEW.get(word, word)] for sentence in sentences for word in sentence])


class Language(nn.Module):
    """Guess the next word from the two before it; input and output share their table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(vocabulary), 48)
        self.mix = nn.Sequential(nn.Linear(96, 48), nn.Tanh())
        self.out = nn.Linear(48, len(vocabulary), bias=False)
        self.out.weight = self.embed.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the text's words."""
        pairs = torch.stack([text[:-2], text[1:-1]], dim=1)
        return F.cross_entropy(self.out(self.mix(self.embed(pairs).flatten(1))), text[2:])


def train(model: Language, text: torch.Tensor, steps: int, **settings: float) -> torch.optim.Optimizer:
    """Read the text again and again."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **settings)
    for _ in range(steps):
        optimizer.zero_grad()
        model(text).backward()
        optimizer.step()
    return optimizer


def main() -> int:
    """Learn the new words by the recipe and by `train_rows`."""
    torch.manual_seed(0)
    start = Language()
    train(start, old_text, 40, lr=1e-2)
    table = start.embed.weight.detach()
    is_old = torch.ones(len(vocabulary), 1)
    is_old[new_rows] = 0

    def report(name: str, model: Language, state: int) -> tuple[float, float]:
        moved = ((model.embed.weight - table) * is_old).abs().max().item()
        with torch.no_grad():
            old_loss, new_loss = model(old_text).item(), model(new_text).item()
        print(f"{name:18}{moved:18.2g}{old_loss:16.3f}{new_loss:16.3f}{state:20,}")
        return moved, new_loss

    print(f"{'':18}{'old rows moved':>18}{'old text':>16}{'new text':>16}{'optimizer state':>20}")
    _, start_loss = report("before", start, 0)

    hooked = copy.deepcopy(start)
    hooked.mix.requires_grad_(False)
    hooked.embed.weight.register_hook(lambda gradient: gradient * (1 - is_old))
    optimizer = train(hooked, new_text, 100, lr=3e-2, weight_decay=0.1)
    state = sum(value.numel() for entry in optimizer.state.values() for value in entry.values())
    hook_moved, _ = report("gradient hook", hooked, state)

    ours = copy.deepcopy(start)
    gg.freeze(ours, "mix.*")
    rows = gg.train_rows(ours.embed, rows=new_rows)  # finds the tied layer by itself
    optimizer = train(ours, new_text, 100, lr=3e-2, weight_decay=0.1)
    small = sum(value.numel() for entry in optimizer.state.values() for value in entry.values())
    moved, loss = report("gg.train_rows", ours, small)
    rows.verify()  # raises, with the first element, if an old row had moved
    rows.merge()  # the plain parameter again

    return 0 if moved == 0 and hook_moved > 0 and loss < start_loss and small * 100 < state else 1


if __name__ == "__main__":
    sys.exit(main())
