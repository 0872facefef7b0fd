"""The ledger: what was dropped, why, and again."""
