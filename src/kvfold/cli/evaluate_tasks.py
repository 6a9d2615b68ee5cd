"""`kvfold evaluate --tasks`: whole tasks into a run folder, with a table and a gate at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvfold.cli.options import WIDTH, console, load_addons, load_model, parse_lengths, say_plans
from kvfold.cli.suite_options import LENGTHS, SuiteOptions, names_in, parse_limits, parse_tokens

if TYPE_CHECKING:
    from rich.console import Console

    from kvfold.evaluation.cost import CostSettings
    from kvfold.evaluation.gate import Rule
    from kvfold.evaluation.page.runs import Run
    from kvfold.evaluation.peers.environment import PeerEnvironment
    from kvfold.evaluation.suite import Suite

NOT_KEPT = 1
"""Exit status where a rule of --fail-under is not kept; errors end with 2."""


def evaluate_tasks(options: SuiteOptions) -> None:
    """Answer, measure what it costs, show, and hold against the rules."""
    from kvfold.evaluation.cost import CostSettings
    from kvfold.evaluation.page.table import cost_tables, figures_table
    from kvfold.evaluation.suite import hold_run

    if options.out is None:
        raise typer.BadParameter("--tasks needs a run folder: name one with --out")
    rules = _checked(options)
    costs = CostSettings(
        lengths=parse_lengths(options.lengths or LENGTHS),
        speed_lengths=() if options.speed_lengths is None else parse_lengths(options.speed_lengths),
    )
    screen = console()
    with hold_run(options.out):
        run = _answered(screen, options, options.out, rules, costs)
        for table in (figures_table(run), *cost_tables(run)):
            screen.print(table)
        for note in run.notes:
            screen.print(f"- {note}", style="dim", highlight=False, markup=False)
        _write(screen, run, options.json_file)
        screen.print(f"Run: {options.out}", highlight=False, markup=False)
    hold_against(screen, rules, [run])


def _checked(options: SuiteOptions) -> tuple[Rule, ...]:
    """Raise what can be known to be wrong before anything is loaded; the rules of --fail-under."""
    from kvfold.evaluation.answer_files import check_reuse
    from kvfold.evaluation.gate import check_asked
    from kvfold.evaluation.runner import check_seed
    from kvfold.evaluation.tasks.registry import check_known
    from kvfold.evaluation.writable import check_writable

    if not options.fraction > 0:  # so that what is no number is refused as well
        raise typer.BadParameter("--fraction must be above 0, or there is nothing to answer")
    check_known(names_in(options.tasks))
    check_seed(options.seed)
    _check_peers(options)
    rules = _rules(options.fail_under)
    check_asked(rules, names_in(options.tasks))
    parse_limits(options.limit)
    parse_tokens(options.answer_tokens)
    if options.reuse is not None and not _holds(options.reuse, options.out):
        check_reuse(options.reuse)
    if options.json_file is not None:
        check_writable(options.json_file)
    return rules


def _holds(folder: Path, out: Path | None) -> bool:
    """Whether the run folder is below a folder, so that the run makes both."""
    return out is not None and out.resolve().is_relative_to(folder.resolve())


def _answered(
    screen: Console,
    options: SuiteOptions,
    folder: Path,
    rules: Sequence[Rule],
    costs: CostSettings,
) -> Run:
    """Answer and measure into a run folder that is held, and read what is there then."""
    from kvfold.evaluation.cost import read_cost, write_cost
    from kvfold.evaluation.gate import check_asked
    from kvfold.evaluation.page.runs import read_run
    from kvfold.evaluation.side_by_side import Helpers
    from kvfold.evaluation.suite import answer_suite

    read_cost(folder)  # a damaged one is told before the work
    suite = make_suite(options)
    check_asked(rules, names_in(options.tasks), suite.subjects, names_in(options.peers or ""))
    environment = _environment(screen, options)
    make = partial(make_suite, options, environment)
    if environment is not None:
        suite = _with_peers(suite, options, environment)
    say_plans(screen, suite.model, suite.candidates)
    with _bar(screen) as watcher:
        answer_suite(
            *(suite, folder),
            reuse=options.reuse,
            watcher=watcher,
            helpers=Helpers(options.jobs, make),
        )
        write_cost(
            *(folder, suite.model, suite.candidates, costs),
            seed=options.seed,
            peers=suite.peers,
            on_progress=watcher.measures,
            described_model=suite.described,
        )
    return read_run(folder)


def make_suite(options: SuiteOptions, environment: PeerEnvironment | None = None) -> Suite:
    """The suite that a command line asks for; every process that answers makes it for itself.

    environment: of the peers; None leaves them out, but checks whether they can be asked: making
    it may take minutes.
    """
    from kvfold.evaluation.candidates import with_plan
    from kvfold.evaluation.peers.peer import check_choices, check_model
    from kvfold.evaluation.peers.spec import check_likes, parse_peers
    from kvfold.evaluation.suite import Suite
    from kvfold.evaluation.tasks.registry import ANSWERED_FREELY, make_tasks, stored_name

    model, tokenizer = load_model(options.model, options.dtype, options.device)
    candidates = {
        name: with_plan(found, **options.changes)
        for name, found in load_addons(options.addons, model).items()
    }
    if options.peers is not None:
        check_model(model)
        check_likes(parse_peers(options.peers), list(candidates))
    limit, limits = parse_limits(options.limit)
    tasks = make_tasks(
        names_in(options.tasks),
        _settings(options, limit, tokenizer, model),
        limits,
        parse_tokens(options.answer_tokens),
        names_in(options.chat_template or ""),
    )
    skipped = names_in(options.peers_skip or "")
    of_peers = set(names_in(options.tasks)) - set(skipped)
    if options.peers is not None and not of_peers.isdisjoint(ANSWERED_FREELY):
        check_choices(model)
    suite = Suite(
        *(model, tokenizer, candidates, tasks, options.seed, options.config()),
        peers_skip=[stored_name(name) for name in skipped],
    )
    return suite if environment is None else _with_peers(suite, options, environment)


def _with_peers(suite: Suite, options: SuiteOptions, environment: PeerEnvironment) -> Suite:
    from kvfold.evaluation.peers.peer import make_peers
    from kvfold.evaluation.peers.spec import parse_peers

    specs = parse_peers(options.peers or "")
    peers = make_peers(specs, environment, options.model, suite.model, suite.candidates)
    return replace(suite, peers=peers)


def hold_against(screen: Console, rules: Sequence[Rule], runs: Sequence[Run]) -> None:
    """Show which rules are not kept; raises `typer.Exit` with status 1 if there are any."""
    from kvfold.evaluation.gate import check_rules
    from kvfold.evaluation.page.table import failures_table

    if not rules:
        return
    by_run = [check_rules(rules, run.metrics) for run in runs]
    checks = [check for some in by_run for check in some]
    failed = [check for check in checks if not check.passed]
    if not failed:
        screen.print(f"All {len(checks)} rules are kept.", style="green", highlight=False)
        return
    for run, some in zip(runs, by_run, strict=True):
        if all(check.passed for check in some):
            continue
        if len(runs) > 1:
            told = f"{run.folder}:"
            screen.print(told, style="bold", highlight=False, markup=False, soft_wrap=True)
        screen.print(failures_table(some))
    screen.print(f"{len(failed)} of {len(checks)} rules are not kept.", style="red")
    raise typer.Exit(NOT_KEPT)


class _BarWatcher:
    """Shows a run as a bar for each subject that is being asked, and prints what is said above."""

    def __init__(self, screen: Console, bar: Any, shown: Any) -> None:
        self.screen, self.bar, self.shown = screen, bar, shown
        self.rows: dict[str, Any] = {}

    def progress(self, subject: str, task: str, done: int, total: int) -> None:
        """So many of a pair's items are answered."""
        from kvfold.evaluation.tasks.registry import shown_name

        if subject not in self.rows:
            self.rows[subject] = self.bar.add_task(subject, rate="")
        self.bar.update(
            self.rows[subject],
            description=f"{_unmarked(subject)}: {_unmarked(shown_name(task))}",
            completed=done,
            total=total,
            visible=done < total,
        )

    def say(self, line: str) -> None:
        """Something that a user should know."""
        self.screen.print(line, style="dim", highlight=False, markup=False)

    def measures(self, what: str) -> None:
        """What of the cost is measured next."""
        self.bar.update(self.shown, description=what, completed=0, total=None, visible=True)


@contextmanager
def _bar(screen: Console) -> Iterator[_BarWatcher]:
    from kvfold.fitting.bar import progress_bar

    with progress_bar(shown=True, unit="items") as (bar, shown):
        yield _BarWatcher(screen, bar, shown)


def _check_peers(options: SuiteOptions) -> None:
    """What of the peers can be checked without a model; raises what is wrong."""
    from kvfold.evaluation.peers.spec import parse_peers

    if options.peers is not None:
        parse_peers(options.peers)
        return
    for name, value in (("env", options.peers_env), ("skip", options.peers_skip)):
        if value is not None:
            raise typer.BadParameter(f"--peers-{name} is for --peers; name some, or leave it")


def _environment(screen: Console, options: SuiteOptions) -> PeerEnvironment | None:
    """The peers' environment, None without peers; what pip says is shown while it works."""
    from kvfold.evaluation.peers.environment import peer_environment

    if options.peers is None:
        return None
    with screen.status("Looking into the peers' environment") as status:
        found = peer_environment(
            options.peers_env, lambda line: status.update(_unmarked(line[:WIDTH]))
        )
    told = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    screen.print(f"Peers run with {told}", style="dim", highlight=False, markup=False)
    return found


def _unmarked(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _rules(path: Path | None) -> tuple[Rule, ...]:
    from kvfold.evaluation.gate import read_rules

    return () if path is None else read_rules(path)


def _settings(options: SuiteOptions, limit: int | None, tokenizer: Any, model: Any) -> Any:
    from kvfold.anatomy import anatomy
    from kvfold.evaluation.tasks.settings import TaskSettings

    data = None if options.data is None else Path(options.data)
    if data is not None and not os.path.exists(data):  # a name too long is not there
        raise typer.BadParameter(
            f"with --tasks --data is a folder of data sets, or a task's own file; {str(data)!r} "
            "is not there"
        )
    return TaskSettings(
        data=data,
        fraction=options.fraction,
        limit=limit,
        seed=options.seed,
        batch=options.batch,
        lengths=() if options.lengths is None else parse_lengths(options.lengths),
        tokenizer=tokenizer,
        positions=anatomy(model).max_positions,
    )


def _write(screen: Console, run: Run, json_file: Path | None) -> None:
    from kvfold.evaluation.report import write_json

    if json_file is not None:
        write_json(json_file, {"run": run.about, "metrics": run.metrics, "cost": run.cost})
        screen.print(f"Figures: {json_file}", highlight=False, markup=False)
