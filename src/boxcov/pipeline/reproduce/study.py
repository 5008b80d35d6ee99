"""``boxcov reproduce``: every table and figure of the paper, from runs that are missing or done."""

from __future__ import annotations

from boxcov._files.output_file import write_json, write_text
from boxcov.pipeline.options import ReproduceCommand
from boxcov.pipeline.paths import hold_folder
from boxcov.pipeline.reproduce.comparison import Table, paper_tables
from boxcov.pipeline.reproduce.plan import TEST, Run, Setting
from boxcov.pipeline.reproduce.workspace import Start, Workspace
from boxcov.report.figures import write_figures
from boxcov.report.page import write
from boxcov.report.study import Method, Study, scenes_of
from boxcov.version import __version__

SCENES = 8  # frames to show in the report


def run(options: ReproduceCommand, started: Start) -> list[Table]:
    """Write runs, tables, figures and the report to a folder; return the tables."""
    with hold_folder(options.out) as folder:
        return reproduce(Workspace(folder, Setting.from_options(options), started))


def reproduce(workspace: Workspace) -> list[Table]:
    """Write what is missing in ``workspace``; return the tables."""
    folder, setting = workspace.folder, workspace.setting
    tables = paper_tables(workspace)
    for table in tables:
        write_json(folder / "tables" / f"{table.name}.json", table.json())
    text = "\n\n".join(table.markdown() for table in tables)
    title = f"# Reproduction\n\nboxcov {__version__}, {setting.detector}, {setting.test}."
    write_text(folder / "reproduction.md", f"{title}\n\n{text}\n")
    study = _build_study(workspace, tables)
    write_figures(folder / "figures", study)
    write(folder / "report.html", study)
    return tables


def _build_study(workspace: Workspace, tables: list[Table]) -> Study:
    """Return the methods of table I with the paper's posterior, for the figures and the report."""
    mci, mcglm, exact = Run("mci"), Run("mcglm", "paper"), Run("exact", "paper")
    by_exact = "by ExactGLM: the covariance that MC-GLM estimates"
    methods = [
        Method("MCI", workspace.records(mci), "MC dropout, k = 10"),
        Method("MC-GLM", workspace.records(mcglm), "k = 10, exact derivatives"),
        Method("GLM", workspace.records(exact), by_exact),
    ]
    rows = next(table.rows for table in tables if table.name == "runtime")
    device, ratio = workspace.setting.device, "times the plain detector"
    runtime = [{**row, "device": device, "ratio": row[ratio]} for row in rows]
    about = {"boxcov": __version__, **workspace.setting.json(), "posterior": "paper's form, head"}
    shown = {n: inputs for n, (inputs, _) in enumerate(workspace.frames(TEST)[:SCENES])}
    scenes = scenes_of(shown, workspace.truth(TEST), methods[0].records.fields)
    return Study("Reproduction of MC-GLM", about, methods, scenes, runtime)
