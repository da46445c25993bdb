"""Writes the page of a report: one HTML file that loads nothing else.

Input: a document; output: HTML.  `page.html`, `page.css` and the scripts are combined with the data, as JSON, from
which the scripts build the page.  Text of the program is only ever set as text; on top of that, the page's content
security policy runs no script but these.

    layout.py, views.py   the graphs, laid out
    figures.js            sums, groups, formats; elements.js: tables, links
    kernels.js, code.js   a kernel beside the lines of the program and its artefacts
    graph.js, camera.js   the graphs, with pan and zoom
    refusals.js, passes.js, memory.js, plots.js, certificate.js, finding.js, main.js
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Mapping
from importlib.resources import files
from string import Template

from fusion.inspect.document.structure import Artefact, Document
from fusion.inspect.page.views import views_of

SCRIPTS = (
    *("figures", "elements", "code", "kernels", "refusals", "passes", "camera", "graph", "memory", "plots"),
    *("certificate", "finding", "main"),
)
"""The scripts, in order: the last one starts."""

FRAME_HEIGHT = 720
"""The height of the page in a notebook, in pixels."""


def page_of(document: Document) -> str:
    """Return the page of a document, as HTML."""
    script = "\n".join(_text(f"{name}.js") for name in SCRIPTS)
    style = _text("page.css")
    data = {"report": _packed(document), "views": [views_of(graph) for graph in document["graphs"]]}
    policy = f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'"
    parts = {"policy": html.escape(policy, quote=False), "style": style, "script": script, "data": _json(data)}
    return Template(_text("page.html")).substitute(parts)


def frame_of(page: str) -> str:
    """Return a frame that holds a page, so that neither changes how the other looks."""
    return f'<iframe srcdoc="{html.escape(page)}" style="width: 100%; height: {FRAME_HEIGHT}px; border: 0"></iframe>'


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _json(data: object) -> str:
    """Return JSON that may stand in HTML: no character in it ends or begins an element.

    >>> _json({"name": "</script>"})
    '{"name":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _packed(document: Document) -> Mapping[str, object]:
    """Return a document whose artefacts are compressed: they are most of it, and few of them are looked at."""
    kernels = [{**kernel, "artefacts": [*map(_pack, kernel["artefacts"])]} for kernel in document["kernels"]]
    return {**document, "kernels": kernels}


def _pack(artefact: Artefact) -> Mapping[str, str]:
    content = json.dumps({"text": artefact["text"], "lines": artefact["lines"]}, separators=(",", ":"))
    packed = base64.b64encode(gzip.compress(content.encode(), mtime=0)).decode()
    return {"stage": artefact["stage"], "packed": packed}


__all__ = ["frame_of", "page_of"]
