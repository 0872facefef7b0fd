"""State the law of the guard for many random cases: `python -m tests.guard [how many] [first seed]`."""

import sys
from collections import Counter

import torch

from tests.guard.cases import check


def main(count=20_000, first=0):
    torch.set_num_threads(1)
    causes = Counter()
    for seed in range(first, first + count):
        causes.update(f"{incident.stage}: {incident.cause}" for incident in check(seed).dropped)
        if (seed - first + 1) % 1000 == 0:
            print(f"{seed - first + 1} cases hold", flush=True)
    for cause, number in causes.most_common():
        print(f"{number:7} {cause}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
