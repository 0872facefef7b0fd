"""What a guard counts over a run, so that it can be told, saved and resumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
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

    def after_step(self, size: int, *, bad: bool, incidents: Sequence[Incident] = ()) -> Tally:
        """Give the counts after a step; these stay as they are, so that a step is counted in one assignment."""
        return replace(
            self.after_incidents(incidents),
            steps=self.steps + 1,
            samples=self.samples + size,
            bad_steps=self.bad_steps + bad,
            in_a_row=self.in_a_row + 1 if bad else 0,
        )

    def after_incidents(self, incidents: Sequence[Incident]) -> Tally:
        """Give the counts with what was dropped, and with what was not because it did not come again."""
        if not incidents:
            return self
        causes = Counter(incident.cause for incident in incidents if not incident.transient)
        dropped = causes.total()
        return replace(
            self,
            dropped=self.dropped + dropped,
            transient=self.transient + len(incidents) - dropped,
            causes=dict(Counter(self.causes) + causes),
        )

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
