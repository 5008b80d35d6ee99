"""``boxcov reproduce``: all runs that are not there yet, then every table and figure from their files."""

from __future__ import annotations

from pathlib import Path

from boxcov.files import replacing
from boxcov.pipeline.evaluate import key_sweep
from boxcov.pipeline.reproduce.measures import records
from boxcov.pipeline.reproduce.runs import Progress, Workshop
from boxcov.pipeline.reproduce.setting import TEST, Run, Setting, runs
from boxcov.pipeline.reproduce.shift import scenarios, with_data
from boxcov.pipeline.reproduce.table import Table, write
from boxcov.pipeline.reproduce.tables import tables
from boxcov.pipeline.reproduce.why import glm_and_mcglm, published_chance
from boxcov.report.figures import write_figures
from boxcov.report.page import write as write_page
from boxcov.report.study import Method, Scene, Study
from boxcov.version import __version__

SCENES = 8  # frames to step through in the report


def reproduce(folder: Path, setting: Setting, progress: Progress | None = None) -> list[Table]:
    """Everything: runs, tables, figures and the report, in ``folder``. What is there already is not done again."""
    workshop = Workshop(folder, setting, progress)
    for run in runs(setting):
        if not workshop.done(run):
            workshop.make(run)
    made = [*tables(workshop), published_chance(), glm_and_mcglm(workshop), with_data(workshop)]
    if setting.shifts:
        made.append(scenarios(workshop))
    for table in made:
        write(folder / "tables", table)
    text = "\n\n".join(table.markdown() for table in made)
    with replacing(folder / "reproduction.md") as file:
        file.write_text(
            f"# Reproduction\n\nboxcov {__version__}, {setting.detector}, {setting.test}.\n\n{text}\n"
        )
    study = shown(workshop, made)
    write_figures(folder / "figures", study)
    write_page(folder / "report.html", study)
    return made


def shown(workshop: Workshop, made: list[Table]) -> Study:
    """The methods of table I under the paper's posterior, for curves, pictures and the report."""
    exact = records(workshop, Run("exact", "paper"))
    methods = [
        Method("MCI", records(workshop, Run("mci")), "MC dropout, k = 10"),
        Method("MC-GLM", records(workshop, Run("mcglm", "paper")), "k = 10, exact derivatives"),
        Method("GLM", exact, "by ExactGLM: the covariance that MC-GLM estimates"),
    ]
    runtime = next(table for table in made if table.name == "runtime").json()["rows"]
    bars = [
        {
            "method": row["method"],
            "device": workshop.setting.device,
            "ms": row["ms"],
            "ratio": row["times the plain detector"],
        }
        for row in runtime
    ]
    about = {"boxcov": __version__, **workshop.setting.json(), "posterior": "paper's form, head"}
    return Study("Reproduction of MC-GLM", about, methods, _scenes(workshop), bars)


def _scenes(workshop: Workshop) -> dict[int, Scene]:
    """The first frames, where they are point clouds."""
    truth, scenes = workshop.truth(TEST), {}
    for number, (inputs, _) in enumerate(workshop.frames(TEST)[:SCENES]):
        if not isinstance(inputs, list):
            break
        mine = truth.frame == number
        scenes[number] = Scene(
            f"frame {number}", key_sweep(inputs[0].cpu()), truth.boxes[mine], truth.labels[mine]
        )
    return scenes
