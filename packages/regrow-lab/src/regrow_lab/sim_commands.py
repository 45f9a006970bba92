"""`regrow sim`: simulates a job of any size over weeks, and takes the costs for that from real runs."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from regrow.core.config import jobs_home
from regrow.core.errors import UsageError

_FIGURES = (".png", ".svg")


@click.group("sim")
def sim() -> None:
    """Simulate what faults and capacity cost a job, under several ways to recover."""


@sim.command("run")
@click.argument("scenario", type=click.Path(path_type=Path), metavar="SCENARIO.toml")
@click.option("--seeds", type=click.IntRange(min=1), metavar="N", help="Jobs of each policy; else the scenario's.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here.")
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="Draw to a .png or .svg.")
def run(scenario: Path, seeds: int | None, json_path: Path | None, plot_path: Path | None) -> None:
    """Simulate the policies of SCENARIO.toml: goodput, time to finish, money, with confidence intervals.

    docs/simulator.md lists the keys of the file; benchmarks/scenarios/ has examples.
    """
    import msgspec

    from regrow_lab.fleet.reading import decode_costs, decode_scenario
    from regrow_lab.fleet.report import simulation_lines
    from regrow_lab.fleet.summary import simulate_all

    if plot_path is not None and plot_path.suffix not in _FIGURES:
        raise UsageError(f"--plot {plot_path} is not the name of a figure", hint="end it in .png or .svg")
    table = _load(scenario)
    named = table.get("costs_from", [])
    files = [scenario.parent / name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    costs = [row for path in files for row in decode_costs(_load(path), place=str(path))]
    found = decode_scenario(table, place=str(scenario), costs=costs)
    report = simulate_all(found, seeds or found.seeds)
    for line in simulation_lines(report):
        click.echo(line)
    if json_path is not None:
        _write(json_path, msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    if plot_path is not None:
        from regrow_lab.fleet.drawing import render_simulation

        _write(plot_path, render_simulation(report, plot_path.suffix.removeprefix(".")))


@sim.command("calibrate")
@click.argument("runs", nargs=-1, metavar="[JOB|FOLDER|FILE]...")
@click.option("--of", default="regrow", metavar="NAME", help="Name of the set of costs.  [regrow]")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write the costs here.")
def calibrate(runs: tuple[str, ...], of: str, out: Path | None) -> None:
    """Take costs from the records of real RUNS, for a scenario to name in costs_from.

    Without a name, use the job that runs, or the newest. Runs without faults give the duration of a start and of a
    step.
    """
    from regrow.launch.verifying import find_run_on_one_clock
    from regrow_lab.fleet.calibration import calibration_lines, measured

    found = []
    for name in runs or (None,):
        run = find_run_on_one_clock(jobs_home(), name)
        one = measured(run.records, run.name)
        # A run whose oldest records were dropped does not show the duration of its start.
        found.append((run.name, replace(one, start=0.0) if run.since else one))
    text = "\n".join(calibration_lines(found, of=of)) + "\n"
    if out is None:
        click.echo(text, nl=False)
    else:
        _write(out, text.encode())


@sim.command("replay")
@click.argument("seed", metavar="SEED")
@click.option("--json", "as_json", is_flag=True, help="Print the schedule alone, as JSON.")
def replay(seed: str, as_json: bool) -> int:
    """Run one random schedule of the coordinator's tests again, exactly, and print what happens.

    SEED is a number, election: and a number for one of the tests of elections, or the code that a failed test has
    printed. Exit code 1: an invariant of the simulator is broken.
    """
    import msgspec

    from regrow_lab.sim.draws import draw
    from regrow_lab.sim.elections.faults import ElectionSchedule, draw_election
    from regrow_lab.sim.elections.world import ELECTION, election_lines
    from regrow_lab.sim.schedule import BROKEN, SimSchedule, replay_lines

    number = seed.removeprefix(ELECTION)
    numbered = number.isascii() and number.isdigit()
    schedule: ElectionSchedule | SimSchedule
    if seed.startswith(ELECTION):
        if not numbered:
            raise UsageError(f"{seed[:40]!r} is not an election", hint=f"give its number, as in {ELECTION}11")
        schedule = draw_election(int(number))
    else:
        schedule = draw(int(seed)) if numbered else SimSchedule.of_code(seed)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(schedule)).decode())
        return 0
    line = ""
    for line in election_lines(schedule) if isinstance(schedule, ElectionSchedule) else replay_lines(schedule):
        click.echo(line)
    return int(line.startswith(BROKEN))


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}", hint="benchmarks/scenarios has examples") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            f"{path} is not valid TOML: {error}", hint="strings are in quotes, lists in [brackets]"
        ) from error


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}", hint="choose another place") from error


COMMANDS = (sim,)
