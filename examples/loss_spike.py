"""Train a small language model on text with a few ruinous batches, and end where the clean run ends.

The script generates the text: sentences of a small grammar. In three batches a broken pipeline sets the weight of the
samples to 300 instead of 1: everything is finite, the logged loss looks normal, and the update ruins the weights.
Skipping a batch whose loss is high comes too late, because that update is done by then. Clipping by the history of the
norm (as in ZClip) limits the damage, but changes the run. `gg.Rewind` goes back before the update, repeats the innocent
batches, and leaves the suspects out.

Run it: python examples/loss_spike.py        (no data, no network; some seconds)
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

import gradgate as gg

STEPS, ROWS, LENGTH, POISONED = 160, 16, 16, range(100, 103)
WORDS = [["the", "a"], ["old", "small", "red"], ["fox", "dog", "hen"], ["sees", "likes"], ["it", "them"], ["."]]
TOKENS = {word: number for number, word in enumerate(sorted({word for slot in WORDS for word in slot}))}
Batch = tuple[int, torch.Tensor, float]
logging.getLogger("gradgate").setLevel(logging.ERROR)  # it logs each rewind


class Model(nn.Module):
    """One layer of a transformer over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(len(TOKENS), 32), nn.Embedding(LENGTH, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, len(TOKENS))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the next tokens."""
        x = self.tokens(text[:, :-1]) + self.places.weight
        out = self.head(self.layer(x, src_mask=self.mask, is_causal=True))
        return F.cross_entropy(out.flatten(0, 1), text[:, 1:].flatten())


def stream() -> list[Batch]:
    """Make batches of text: their number, the tokens, and the weight, which is 1 unless the pipeline is broken."""
    generator = torch.Generator().manual_seed(0)

    def line() -> Iterator[int]:
        while True:
            for slot in WORDS:
                yield TOKENS[slot[int(torch.randint(len(slot), (), generator=generator))]]

    batches = []
    for step in range(STEPS + 20):
        rows = [[token for _, token in zip(range(LENGTH + 1), line(), strict=False)] for _ in range(ROWS)]
        batches.append((step, torch.tensor(rows), 300.0 if step in POISONED else 1.0))
    return batches


def train(batches: list[Batch], remedy: str = "") -> tuple[Model, list[float], gg.Rewind]:
    """Train with one of the remedies; return the model, the losses as they came, and the rewinds."""
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    rewind = gg.Rewind(model, optimizer, scheduler, every=25)
    losses: list[float] = []
    norms: deque[float] = deque(maxlen=50)
    for _, text, weight in rewind.batches(batches) if remedy == "rewind" else batches:
        optimizer.zero_grad()
        loss = model(text)
        losses.append(loss.item())
        if remedy == "skip" and len(losses) > 20 and losses[-1] > 3 * sorted(losses[-21:-1])[10]:
            continue  # a loop that checks the loss of this step
        (loss * weight).backward()
        if remedy == "clip":
            usual = sorted(norms)[len(norms) // 2] if len(norms) > 20 else float("inf")
            norms.append(min(float(nn.utils.clip_grad_norm_(model.parameters(), 1.5 * usual)), 1.5 * usual))
        optimizer.step()
        scheduler.step()
        if remedy == "rewind":
            rewind.observe(loss)
    return model, losses, rewind


def plot(losses: list[float], width: int = 60) -> str:
    """Draw losses as a line of blocks, on a logarithmic scale from 0.3 to 300."""
    size = len(losses) / width
    tops = [max(losses[int(at * size) : int((at + 1) * size)], default=0.0) for at in range(width)]
    heights = [(torch.tensor(top).nan_to_num(300.0).clamp(0.3, 300.0) / 0.3).log10() / 3 for top in tops]
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(height * 8))] for height in heights)


def main() -> int:
    """Compare the remedies; 1 if the rewound run does not end where the clean one ends."""
    batches = stream()
    held_out = torch.cat([text for _, text, _ in batches[STEPS:]])
    del batches[STEPS:]
    print(f"batches {POISONED.start} to {POISONED.stop - 1} of {STEPS} are poisoned; the loss on other text:")
    final = {}
    for remedy in ("plain", "skip", "clip", "rewind"):
        model, losses, rewind = train(batches, remedy)
        with torch.no_grad():
            final[remedy] = model.eval()(held_out).item()
        shown = f"{final[remedy]:.3f}" if final[remedy] < 100 else "diverged"
        print(f"{remedy:16}{shown:>10}\n{plot(losses)}")
    (rewound,) = rewind.rewinds
    clean, _, _ = train([batch for batch in batches if batch[0] not in rewound.skipped])
    same = all(map(torch.equal, model.state_dict().values(), clean.state_dict().values()))
    print(f"went back to step {rewound.to_step}, without steps {', '.join(map(str, rewound.skipped))}")
    print(f"the weights are those of the clean run, bit for bit: {'yes' if same else 'no'}")
    worse = min(final[remedy] for remedy in ("plain", "skip"))
    return 0 if same and rewound.exact and final["rewind"] < worse else 1


if __name__ == "__main__":
    sys.exit(main())
