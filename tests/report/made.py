"""Ledgers, diagnoses and texts to make pages of."""

import random

from gradgate.records import Incident

HOSTILE = [
    "<script>document.title='owned'</script>",
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "\"><svg onload=document.title='owned'>",
    "javascript:document.title='owned'",
    "<!--<script>",
    "{{constructor.constructor('return 1')()}}",
    "<a href='https://example.org'>here</a>",
    "\u202egnp.exe\u202c \u0000\u0007\u001b[31m",
    "\ud800 lone surrogate",
    "日本語 🙂 עברית",
    "line one\nline two\ttab",
    "a" * 5000,
]


class MemoryBook:
    """A ledger of incidents in memory: what the page asks for, and nothing else."""

    def __init__(self, incidents, payloads=None, bad=()):
        self._incidents = list(incidents)
        self._payloads = payloads or {}
        self._bad = set(bad)

    def incidents(self, *, limit=None, newest_first=False):
        found = self._incidents[::-1] if newest_first else self._incidents
        return found[:limit]

    def stats(self):
        return type("Counts", (), {"incidents": len(self._incidents)})

    def runs(self):
        return []

    def bad_ids(self):
        return self._bad

    def payload_of(self, incident_id):
        return self._payloads.get(incident_id)


def many(number):
    """Incidents as a long training leaves them: every sample and every message is another one."""
    chance = random.Random(0)
    return [
        Incident(
            id=f"{chance.getrandbits(128):032x}",
            run="long",
            step=place // 3,
            epoch=place // 20_000,
            sample_id=f"train/{chance.randrange(1000):03}/img_{place * 7919 % number:06}.png",
            row=place % 64,
            stage=("forward", "loss", "backward", "load")[place % 4],
            cause=("exception", "non-finite loss", "non-finite gradient")[place % 3],
            exception_type="builtins.ValueError" if place % 3 == 0 else None,
            message=f"expected 3 channels, got {place % 7} in record {chance.randrange(10**6)}",
            where=f"train.py:{place % 50}",
            module="encoder.layer1.0.conv1",
            loss=chance.random(),
            grad_norm=chance.random(),
            transient=place % 50 == 0,
            time=1.7e9 + place * 0.7 + chance.random() / 2,
            details={"batch": 64, "tests": place % 9},
        )
        for place in range(number)
    ]


def module(name, kind, parameters=0, norm=None, state="ok", frozen=0):
    """A module of the graph of a diagnosis."""
    return {
        "name": name,
        "kind": kind,
        "calls": 1,
        "parameters": parameters,
        "frozen": frozen,
        "gradient_norm": norm,
        "state": state,
    }


def edge(start, end, norm, cut=None, nonfinite=False):
    """A way of data between two modules."""
    return {"from": start, "to": end, "gradient_norm": norm, "cut": cut, "nonfinite": nonfinite}


CUT = {"code": "GG101", "where": "train.py:31", "source": "h = encoder(x).detach()"}
FINDING = {
    "code": "GG101",
    "severity": "warning",
    "title": "aux.weight gets no gradient: cut at `encoder(x).detach()`",
    "where": "train.py:31",
    "source": "h = encoder(x).detach()",
    "module": "aux",
    "reason": "detach() gives a tensor without history.",
    "fix": "h = encoder(x)",
    "samples": [3, 17],
    "also": ["train.py:9"],
    "consequences": [],
}


def diagnosis(**more):
    """A step in which something of everything happened."""
    modules = [
        module("", "Net"),
        module("stem", "Conv2d", 432, None, "frozen", 432),
        module("encoder", "Sequential"),
        module("encoder.0", "Linear", 64, 0.5),
        module("encoder.1", "Linear", 64, "nan", "nonfinite"),
        module("aux", "Linear", 64, None, "no_gradient"),
        module("head", "Linear", 64, 0.02),
    ]
    edges = [
        edge(-1, 1, None),
        edge(1, 3, 0.001),
        edge(3, 4, 0.5),
        edge(4, 5, None, CUT),
        edge(4, 6, "nan", None, True),
        edge(6, -2, 2.0, None, True),
        edge(5, -2, 1.0),
    ]
    layers = [
        {
            "name": f"{one['name']}.weight",
            "module": place,
            "shape": [8, 8],
            "gradient_norm": one["gradient_norm"],
            "weight_norm": 1.5,
            "learns": one["state"] != "frozen",
        }
        for place, one in enumerate(modules)
        if one["parameters"]
    ]
    told = {"version": 1, "healthy": False, "exception": None, "findings": [FINDING], "layers": layers}
    return {**told, "graph": {"modules": modules, "edges": edges, "nonfinite_path": [4, 6, -2]}, **more}


def large_diagnosis(blocks):
    """A model of four stages with so many blocks each of six modules."""
    modules, edges, last = [module("", "Net")], [], -1
    for stage in range(4):
        modules.append(module(f"stage{stage}", "Stage"))
        for block in range(blocks):
            modules.append(module(f"stage{stage}.{block}", "Block"))
            entry = last
            for part in range(6):
                modules.append(module(f"stage{stage}.{block}.{part}", "Conv2d", 9, 10.0 ** -(part % 4)))
                edges.append(edge(last, len(modules) - 1, 10.0 ** -(part % 4)))
                last = len(modules) - 1
            edges.append(edge(entry, last, 1.0))
    edges.append(edge(last, -2, 1.0))
    layers = [
        {
            "name": f"{one['name']}.weight",
            "module": place,
            "shape": [3, 3],
            "gradient_norm": one["gradient_norm"],
            "weight_norm": 1.0,
            "learns": True,
        }
        for place, one in enumerate(modules)
        if one["parameters"]
    ]
    return {
        "version": 1,
        "healthy": True,
        "exception": None,
        "findings": [],
        "graph": {"modules": modules, "edges": edges, "nonfinite_path": []},
        "layers": layers,
    }
