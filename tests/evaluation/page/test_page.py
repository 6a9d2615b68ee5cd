"""The page holds every figure, escapes every name, and loads nothing from anywhere."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from html.parser import HTMLParser

import pytest

from kvfold.errors import EvaluationError
from kvfold.evaluation.cost import CostSettings, write_cost
from kvfold.evaluation.page.charts import DOT, apart, nice_steps, pareto_front, quality_plot
from kvfold.evaluation.page.html import render_page
from kvfold.evaluation.page.markdown import render_markdown
from kvfold.evaluation.page.runs import leaves, read_run
from kvfold.evaluation.page.table import cost_tables
from kvfold.evaluation.runner import PLAIN
from kvfold.evaluation.suite import Suite, run_suite
from kvfold.plan import Plan

from ..suite_tasks import NextTokenTask

PLAN = Plan.from_dict(
    {"anchors": 2, "window": 4, "depth": [{"method": "csa2", "source": 3, "readers": [4, 5]}]}
)
HOSTILE = "<script>alert('x')</script>|`*\" & https://evil.example/"
VOID = {"meta", "link", "br"}


@pytest.fixture(scope="module")
def folder(tiny_model, bare_addon, tmp_path_factory):
    """A finished run of three subjects and two tasks, with cost; one subject's name is hostile."""
    made = tmp_path_factory.mktemp("run")
    model = tiny_model("llama")
    candidates = {
        HOSTILE: bare_addon(model, PLAN),
        "wide": bare_addon(model, PLAN.replace(window=12)),
    }
    tasks = (NextTokenTask("needle", items=16), NextTokenTask("other", items=8))
    run_suite(Suite(model, None, candidates, tasks, config={"model": HOSTILE}), made)
    settings = CostSettings(lengths=(64, 256), speed_lengths=(16,), decode_tokens=2, repeats=1)
    write_cost(made, model, candidates, settings)
    return made


@pytest.fixture(scope="module")
def page(folder):
    return render_page([read_run(folder)])


class Reader(HTMLParser):
    """Text, tags and attributes, as a browser would see them; fails where tags don't match."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.texts, self.attributes = [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def within(self, *tags):
        return {text for tag, text in self.texts if tag in tags}


def test_every_number_of_the_json_is_on_the_page(folder, page):
    cells = Reader(page).within("td")
    for name in ("metrics.json", "cost.json", "run.json"):
        every = list(leaves(json.loads((folder / name).read_text())))
        assert len(every) > 30
        for path, leaf in every:
            if isinstance(leaf, (int, float)):
                assert json.dumps(leaf) in cells, path


def test_hostile_names_stay_text(folder, page):
    read = Reader(page)
    assert read.tags.count("script") == 1
    assert "alert('x')" not in " ".join(read.within("script"))
    assert HOSTILE in {text.strip() for text in read.within("th")}
    assert not any(
        "alert" in (value or "") for name, value in read.attributes if name != "aria-label"
    )


@pytest.mark.parametrize(
    ("remark", "written"),
    [
        ("1. is not a list", r"1\. is not a list"),
        ("12) is not", r"12\) is not"),
        ("- is not", r"\- is not"),
        ("+ is not", r"\+ is not"),
        ("--- is no rule", r"\--- is no rule"),
        ("~~~ is no code", r"\~\~\~ is no code"),
        ("1.5 and 3 - 2", r"1\.5 and 3 - 2"),
    ],
)
def test_a_remark_stays_a_sentence_in_markdown_however_it_begins(remark, written):
    assert render_markdown([], [remark]) == f"{written}\n"


def test_a_long_name_makes_the_page_no_wider_than_a_narrow_window(folder, browser, tmp_path):
    run, name = read_run(folder), "w" * 132

    def renamed(data):
        return json.loads(json.dumps(data).replace('"wide"', f'"{name}"'))

    long = dataclasses.replace(
        run,
        metrics=renamed(run.metrics),
        cost=renamed(run.cost),
        described={},
        needles={name if key == "wide" else key: cells for key, cells in run.needles.items()},
    )
    (tmp_path / "page.html").write_text(render_page([long]))
    page = browser.new_page(viewport={"width": 320, "height": 800})
    page.goto((tmp_path / "page.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == 320


def test_nothing_is_loaded_from_outside(page):
    read = Reader(page)
    links = {
        value
        for name, value in read.attributes
        if name in ("src", "href", "srcset", "action", "data", "xlink:href")
    }
    assert all(link.startswith(("#", "data:")) for link in links)
    outside = re.compile(r"https?:|//\w|@import|url\(")
    assert not any(outside.search(text.split("//", 1)[0]) for text in read.within("style"))
    (script,) = read.within("script")
    assert not re.search(r"https?:|fetch\(|import\(|XMLHttp", script)
    policy = next(v for n, v in read.attributes if n == "content" and v.startswith("default-src"))
    assert policy.startswith("default-src 'none'")


def test_tables_pictures_and_the_needles_are_there(folder, page):
    read = Reader(page)
    assert read.tags.count("svg") == 4  # quality of two tasks, layers of two
    headings = read.within("th")
    assert {"subject", "depth", "add-on", "peak memory"} <= headings
    assert sum("--share:" in (value or "") for _, value in read.attributes) == 3 * 4
    assert "within noise" in page
    assert any(name == "class" and value == "front" for name, value in read.attributes)
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page


def test_bytes_are_given_at_the_length_that_is_nearest_to_what_items_read(folder):
    run = read_run(folder)
    assert run.lengths == {"needle": (24,) * 16, "other": (24,) * 8}
    assert run.sizes()[0] == 64
    long = dataclasses.replace(run, lengths={"needle": (24, 512, 512), "other": (200,)})
    assert long.sizes()[0] == 256
    assert dataclasses.replace(run, lengths={}).sizes()[0] == 256  # the middle
    assert "stored at 64 tokens" in Reader(render_page([run])).within("th")
    assert "bytes of one row at 64 tokens" in render_markdown([run])


def test_the_lengths_of_a_tasks_settings_are_known_without_answers(tiny_model, tmp_path):
    tasks = (
        NextTokenTask("t", items=3, lengths=[512, 1024]),
        NextTokenTask("turns", items=3, lengths=[192], turns=6),
        NextTokenTask("untold", items=3),
    )
    run_suite(Suite(tiny_model("llama"), None, {}, tasks), tmp_path)
    told = {"t": (512, 1024), "turns": (1152,)}
    assert read_run(tmp_path).lengths == told | {"untold": (24,) * 3}
    for answers in (tmp_path / "predictions").glob("*/*.jsonl"):
        answers.unlink()
    assert read_run(tmp_path).lengths == told


def test_no_plot_is_drawn_where_every_add_on_scores_as_the_plain_model(folder):
    run = read_run(folder)
    metrics = json.loads(json.dumps(run.metrics))
    assert run.unplotted == []
    for name in run.subjects[1:]:
        for figure in metrics["results"][name]["other"].values():
            figure["difference"]["verdict"] = "same"
    alike = dataclasses.replace(run, metrics=metrics)
    assert alike.unplotted == ["other"]
    read = Reader(render_page([alike]))
    assert read.tags.count("svg") == 4 - 1
    assert any(text.startswith("Not drawn: other.") for text in read.within("p"))
    assert "Not drawn" not in render_page([run])


def test_times_stand_with_their_dtype_and_threads(folder):
    run = read_run(folder)
    threads = run.cost["machine"]["torch_threads"]
    said = f"one row in float32, {threads} thread{'' if threads == 1 else 's'}"
    assert run.timed == said
    assert f"{said}, measured in turns on the machine above" in Reader(render_page([run])).within(
        "small"
    )
    assert said in str(cost_tables(run)[1].caption)
    assert dataclasses.replace(run, about={}, cost={}).timed == "one row"


def test_several_runs_stand_on_one_page(folder):
    run = read_run(folder)
    read = Reader(render_page([run, run]))
    assert {"#run-1", "#run-2"} <= {value for name, value in read.attributes if name == "href"}


def test_remarks_stand_at_the_top_as_plain_text(folder):
    remarks = ("Without <b>GSM8K</b>.", "Sized for two cores.")
    page = render_page([read_run(folder)], remarks)
    read = Reader(page)
    assert set(remarks) <= read.within("p") and page.index("two cores") < page.index("<main>")
    markdown = render_markdown([read_run(folder)], remarks)
    assert markdown.index("two cores") < markdown.index("###") and "<b>" not in markdown


def test_a_run_without_cost_needles_and_layers_has_a_page(tiny_model, tmp_path):
    task = NextTokenTask("plainer", items=3)
    task.summary = lambda _: {}
    run_suite(Suite(tiny_model("llama"), None, {}, (task,)), tmp_path)
    run = read_run(tmp_path)
    read = Reader(render_page([run]))
    assert "svg" not in read.tags
    assert "The cost of this run was not measured." in read.within("p")
    assert render_markdown([run]).count("| no compression |") == 1


def test_markdown_has_a_row_a_subject_and_where_it_comes_from(folder):
    made = render_markdown([read_run(folder)])
    rows = [line for line in made.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 3
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {6}
    assert "<script>" not in made
    assert "needle: acc" in rows[0] and "other: acc" in rows[0]
    assert "Items: needle 16, other 8" in made and "seed 0; commit" in made
    figure = json.loads((folder / "metrics.json").read_text())["results"]["wide"]["needle"]["acc"]
    assert f"{100 * figure['value']:.1f}%" in rows[-1]


def test_runs_of_one_model_are_told_apart_by_their_folders(folder):
    run = read_run(folder)
    one, other = (dataclasses.replace(run, folder=folder.parent / name) for name in ("r1", "r2"))
    far = dataclasses.replace(run, folder=folder.parent / "more" / "r2")
    for runs, named in (([one, other], ["r1", "r2"]), ([other, far], [other.folder, far.folder])):
        markdown, page = render_markdown(runs), Reader(render_page(runs))
        headings = [line for line in markdown.splitlines() if line.startswith("###")]
        for name, heading in zip(named, headings, strict=True):
            assert heading.replace("\\", "").startswith(f"### {name}: ")
            assert f"{name}: {HOSTILE}" in page.within("h2") & page.within("a")


def test_markdown_names_no_commit_where_there_is_none(folder):
    run = read_run(folder)
    wheel = dataclasses.replace(run, about={**run.about, "commit": None})
    assert "commit `" in render_markdown([run]) and "None" not in render_markdown([wheel])


def test_a_folder_without_a_finished_run_is_refused(tmp_path, folder):
    with pytest.raises(EvaluationError, match=r"has no metrics\.json"):
        read_run(tmp_path)
    (tmp_path / "metrics.json").write_text('{"format": 0}')
    with pytest.raises(EvaluationError, match="format 1"):
        read_run(tmp_path)
    (tmp_path / "metrics.json").write_text("{")
    with pytest.raises(EvaluationError, match="must be a JSON object"):
        read_run(tmp_path)


def test_the_front_is_what_nothing_smaller_beats():
    points = {PLAIN: (100, 0.9), "a": (50, 0.9), "b": (20, 0.5), "c": (30, 0.4), "d": (10, 0.5)}
    assert pareto_front(points, up=True) == ["d", "a"]
    assert pareto_front(points, up=False) == ["d", "c"]


def test_dots_of_one_size_do_not_cover_each_other():
    places = {str(n): (300.0, 100.0 + n) for n in range(6)} | {"alone": (100.0, 100.0)}
    found = apart(places)
    assert found["0"] == 300.0 and found["alone"] == 100.0
    middles = [(found[name], y) for name, (_, y) in places.items()]
    for n, one in enumerate(middles):
        assert all(math.dist(one, other) >= DOT for other in middles[:n])
        assert 54 <= one[0] <= 368


def test_dots_stand_within_the_picture_and_better_is_told():
    figure = {"value": 0.5, "interval": [0.4, 0.6], "kind": "accuracy", "better": "higher"}
    figures = {PLAIN: figure, "a": {**figure, "value": 0.45}}
    for sizes in ({PLAIN: 1e9, "a": 3.0}, {PLAIN: 5.0, "a": 5.0}, {PLAIN: 0.0, "a": 0.0}):
        plot = quality_plot("t", figures, sizes, 1024, {PLAIN: 0, "a": 1})
        assert all(54 <= dot.shown_x <= 368 and 14 <= dot.y <= 226 for dot in plot.dots)
        assert plot.x_ticks or sizes["a"] == 0
        assert plot.dots[0].y < plot.dots[1].y
        assert plot.note == "higher is better"
    unknown = {name: {**entry, "better": None} for name, entry in figures.items()}
    assert quality_plot("t", unknown, {PLAIN: 1, "a": 2}, 1, {PLAIN: 0, "a": 1}) is None


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.61, 0.64), (1e-9, 2e-9), (3, 4000)])
def test_ticks_are_round_and_within(low, high):
    steps = nice_steps(low, high)
    assert 3 <= len(steps) <= 7
    assert all(low * (1 - 1e-9) <= step <= high * (1 + 1e-9) for step in steps)
