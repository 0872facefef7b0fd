"""The doctor's words as one plain HTML page without scripts, fonts or links to anywhere."""

from __future__ import annotations

from html import escape
from typing import Any

__all__ = ["page_of"]

_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>gradgate doctor</title><style>
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1f2328}
article{border-left:.3rem solid #888;padding:.2rem 1rem;margin:1.2rem 0;background:#f6f8fa}
.error{border-color:#cf222e}.warning{border-color:#bf8700}.info{border-color:#0969da}
pre{background:#fff;border:1px solid #d0d7de;padding:.5rem;overflow-x:auto}h2{font-size:1.05rem}
</style></head><body><h1>gradgate doctor</h1>
"""


def page_of(diagnosis: dict[str, Any]) -> str:
    """Write a diagnosis as a page.

    Args:
        diagnosis: What `Diagnosis.to_dict` gives.

    Returns:
        The page.
    """
    parts = [_HEAD]
    if diagnosis["healthy"]:
        parts.append("<p><strong>healthy</strong>: nothing to say about this step.</p>")
    if diagnosis["exception"]:
        error = diagnosis["exception"]
        parts.append(f"<p>The step raised <code>{escape(error['type'])}: {escape(error['message'])}</code></p>")
    parts += [_article(finding) for finding in diagnosis["findings"]]
    return "".join(parts) + "</body></html>\n"


def _article(finding: dict[str, Any]) -> str:
    place = escape(finding["where"] or finding["module"] or "")
    module = f" in {escape(finding['module'])}" if finding["where"] and finding["module"] else ""
    parts = [
        f'<article class="{finding["severity"]}" id="{escape(finding["code"])}">',
        f"<h2>{finding['severity']} {escape(finding['code'])}: {escape(finding['title'])}</h2>",
        f"<p><code>{place}</code>{module}</p>" if place else "",
        f"<pre>{escape(finding['source'])}</pre>" if finding["source"] else "",
        f"<p>See also {', '.join(f'<code>{escape(p)}</code>' for p in finding['also'])}</p>" if finding["also"] else "",
        f"<p>Samples: {', '.join(map(str, finding['samples'][:100]))}</p>" if finding["samples"] else "",
        f"<p>{escape(finding['reason'])}</p>",
        f"<pre>{escape(finding['fix'])}</pre>" if finding["fix"] else "",
        "</article>\n",
    ]
    return "".join(parts)
