"""The page's files as they are served: open to all, loading nothing from elsewhere."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

import httpx
import pytest

from kvfold.serving.page import PAGE_FILES


@pytest.mark.parametrize("path", PAGE_FILES)
def test_a_file_comes_with_its_type_and_a_strict_policy(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].split(";")[0] == PAGE_FILES[path].media_type
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = answer.headers["content-security-policy"].split("; ")
    rules = dict(rule.split(" ", 1) for rule in policy)
    assert rules["default-src"] == rules["base-uri"] == rules["frame-ancestors"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"


def test_every_file_of_the_folder_is_served() -> None:
    folder = files("kvfold.serving.page")
    there = {item.name for item in folder.iterdir() if item.is_file()} - {"__init__.py"}
    assert there == {file.name for file in PAGE_FILES.values()}


@pytest.mark.parametrize("path", PAGE_FILES)
def test_no_file_names_another_host_or_makes_markup_of_text(http: httpx.Client, path: str) -> None:
    text = http.get(path).text.replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"https?://|[\"'(]//", text)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text)


def test_the_page_is_open_where_keys_are_wanted_and_no_part_of_the_schema(
    serve: Any, lane: Any
) -> None:
    server = serve({"ced": lane("ced")}, keys=("secret",))
    with httpx.Client(base_url=server.url) as http:
        assert {http.get(path).status_code for path in PAGE_FILES} == {200}
        assert http.get("/page/../v1/models").status_code == 401
        assert http.get("/page/other.js").status_code == 401
        schema = http.get("/openapi.json", headers={"authorization": "Bearer secret"}).json()
        assert not set(PAGE_FILES) & set(schema["paths"])
