"""What a guard counts over a run, so that it can be told, saved and resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from gradgate.errors import ArgumentValueError
from gradgate.guard._result import Summary
from gradgate.records import Incident

__all__ = ["Tally"]


@dataclass(slots=True)
class Tally:
    """The counts of a run.

    Attributes:
        steps: Steps made.
        samples: Samples they had.
        bad_steps: Steps with bad samples.
        in_a_row: Bad steps since the last good one.
        dropped: Samples dropped.
        transient: Faults that did not come again.
        causes: Samples dropped, by cause.
    """

    steps: int = 0
    samples: int = 0
    bad_steps: int = 0
    in_a_row: int = 0
    dropped: int = 0
    transient: int = 0
    causes: dict[str, int] = field(default_factory=dict)

    def add_step(self, size: int, *, bad: bool) -> None:
        """Count a step."""
        self.steps += 1
        self.samples += size
        if bad:
            self.bad_steps += 1
        else:
            self.in_a_row = 0

    def add_incidents(self, incidents: Sequence[Incident]) -> None:
        """Count what was dropped, and what was not because it did not come again."""
        for incident in incidents:
            if incident.transient:
                self.transient += 1
            else:
                self.dropped += 1
                self.causes[incident.cause] = self.causes.get(incident.cause, 0) + 1

    def summary(self) -> Summary:
        """Give the counts for people."""
        return Summary(
            steps=self.steps,
            samples=self.samples,
            bad_steps=self.bad_steps,
            dropped=self.dropped,
            transient=self.transient,
            causes=dict(self.causes),
        )

    def state_dict(self) -> dict[str, Any]:
        """Give the counts as plain values."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Tally:
        """Make the counts again.

        Args:
            state: What `state_dict` gave.

        Raises:
            ArgumentValueError: It is something else.
        """
        expected = {entry.name for entry in fields(cls)}
        if set(state) != expected:
            raise ArgumentValueError(
                f"Guard.load_state_dict(): the entries are {sorted(map(str, state))}.",
                why=f"the state of a guard has the entries {sorted(expected)}.",
                fix='guard.load_state_dict(checkpoint["guard"])   # saved as guard.state_dict()',
            )
        return cls(**{**state, "causes": dict(state["causes"])})
