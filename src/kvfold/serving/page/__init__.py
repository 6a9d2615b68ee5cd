"""The page at `/`: the same question put to two models side by side, with what their caches take.

Its files are served as they lie here. The policy that goes with them lets a browser load nothing
from elsewhere, run no script but these, and ask no server but this one, so nothing that a model
says can become more than text.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from fastapi import FastAPI
from fastapi.responses import Response

ALLOWED = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
HEADERS = {
    "content-security-policy": "; ".join(" ".join(rule) for rule in ALLOWED.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    # Asked for again each time: another version may be served from the same address tomorrow.
    "cache-control": "no-cache",
}


@dataclass(frozen=True)
class PageFile:
    """A file of this folder and its media type."""

    name: str
    media_type: str


PAGE_FILES = {
    "/": PageFile("index.html", "text/html"),
    "/page/page.css": PageFile("page.css", "text/css"),
    "/page/page.js": PageFile("page.js", "text/javascript"),
    "/page/side.js": PageFile("side.js", "text/javascript"),
    "/page/figures.js": PageFile("figures.js", "text/javascript"),
    "/page/server.js": PageFile("server.js", "text/javascript"),
    "/page/icon.svg": PageFile("icon.svg", "image/svg+xml"),
}
"""By path. All are open where the server wants keys: a key is typed into the page."""


def add_page(app: FastAPI) -> None:
    """Serve the page and what it consists of."""
    for path, file in PAGE_FILES.items():
        _add_file(app, path, file)


def _add_file(app: FastAPI, path: str, file: PageFile) -> None:
    content = (files(__package__) / file.name).read_bytes()

    @app.get(path, include_in_schema=False)
    async def page_file() -> Response:
        return Response(content, media_type=file.media_type, headers=HEADERS)
