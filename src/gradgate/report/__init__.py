"""What happened, on one page: self-contained, offline, readable without torch."""

from __future__ import annotations

from gradgate._names import suggest_names
from gradgate.report._columns import Book
from gradgate.report._page import LiveView, render_page, write_page

__all__ = ["Book", "LiveView", "render_page", "write_page"]

suggest_names(__name__)
