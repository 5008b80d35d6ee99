from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import boxcov as package
from boxcov.cli import app as cli
from boxcov.cli.command import build_command, run
from boxcov.cli.convert import convert
from boxcov.data import simulated
from boxcov.outlines import corners, ellipse
from boxcov.pipeline.options import DemoCommand, option, vocabulary
from helpers.command_line import boxcov, refuse, succeed
from helpers.export_boxes import in_space

EXAMPLES = {verb: words for panel in cli.COMMANDS.values() for verb, words in panel.items()}


@pytest.mark.parametrize("verb", [verb.__name__ for verb in EXAMPLES])
def test_help_has_an_example(verb) -> None:
    done = succeed(f"{verb} --help")
    assert f"Example: boxcov {verb} " in done.out


def test_examples_use_existing_options() -> None:
    for verb, examples in EXAMPLES.items():
        known = {param.name for param in build_command(verb, "", ()).params}
        words = {
            word.removeprefix("--").replace("-", "_")
            for example in examples
            for word in example.split()
            if word.startswith("--")
        }
        assert words <= known


@pytest.mark.parametrize("words", ["-h", "--help"])
def test_short_and_long_help(words: str) -> None:
    for verb in ("", "fit "):
        done = succeed(f"{verb}{words}")
        assert "Usage: boxcov" in done.out


def test_version() -> None:
    done = boxcov("--version")
    assert (done.code, done.out) == (0, f"boxcov {package.__version__}\n")


def test_help_shows_input_then_method_then_output() -> None:
    text = boxcov("predict -h").out
    panels = [text.index(f"\n{name}:\n") for name in ("Input", "Method", "Output", "Options")]
    assert panels == sorted(panels)
    assert "<bool>" not in text


def test_help_shows_every_command_with_its_first_sentence() -> None:
    text = boxcov("-h").out
    panels = [text.index(f"\n{name}:\n") for name in cli.COMMANDS]
    assert panels == sorted(panels)
    words = " ".join(text.split())
    for verb in EXAMPLES:
        sentence = " ".join((verb.__doc__ or "").split("\n\n")[0].split())
        assert f" {verb.__name__} {sentence}" in words


def test_arguments_are_explained_before_the_options() -> None:
    text = boxcov("evaluate -h").out
    assert "Usage: boxcov evaluate [OPTIONS] FILE...\n" in text
    assert text.index("  FILE...: Written by boxcov predict") < text.index("\nInput:\n")


def test_completion_names_the_commands() -> None:
    words = {"_BOXCOV_COMPLETE": "bash_complete", "COMP_WORDS": "boxcov pre", "COMP_CWORD": "1"}
    code = "from boxcov.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **words}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["plain,predict"]


WRONG = {
    "fti": "Did you mean 'fit'?",
    "predict --otu x": "--out",
    "predict": "Missing option '--out'.",
    "convert boxes --out x": "Missing option '--format'.",
    "calibrate --out": "Option '--out' requires an argument.",
    "predict --out x --detector centrpoint:small": "(did you mean 'centerpoint'?)",
    "predict --out x --data simlated:clear": "(did you mean 'simulated'?)",
    "predict --out x --data simulated:claer": "(did you mean 'clear'?)",
    "predict --out x --data simulated": "no data 'simulated': give simulated:SCENARIO",
    "predict --out x --show x": "--show and --out are both x: give two names",
    "calibrate --out x --posterior small --stress simulated:foog": "(did you mean 'fog'?)",
    "train --out x --test kiti:ROOT": "(did you mean 'kitti'?)",
    "predict --out x --count ten": "Invalid value for '--count': 'ten' is not an integer.",
    "predict --out x --method exct": "exact or mci or nms (did you mean 'exact'?).",
    "fit --out x --prior-precision abc": "'--prior-precision': 'abc' is not auto or a number.",
    "bench --boxes 10 --boxes many": "Invalid value for '--boxes': 'many' is not an integer.",
    "fit --out x --n-data -5": "--n-data must be above 0, got -5",
    "fit --out x --n-data nan": "--n-data must be above 0, got nan",
    "fit --out x --count 0": "--count must be at least 1, got 0",
    "fit --out x --fraction 0": "--fraction must be above 0 and at most 1, got 0",
    "fit --out x --prior-precision inf": "--prior-precision must be above 0, got inf",
    "predict --out x --method mcglm --samples 1": "--samples must be at least 2, got 1",
    "bench --boxes 10 --boxes 0": "--boxes must be at least 1, got 0",
    "train --out x --rate -1": "--rate must be above 0, got -1",
    "monitor x --usual y --false-alarm-rate 1": "must be above 0 and below 1, got 1",
    "reproduce --out x --threshold 2": "--threshold must be at least 0 and below 1, got 2",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_values_are_refused_before_any_work(words: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = boxcov(words)
    assert done.code in (1, 2)
    assert WRONG[words] in done.err
    assert not list(tmp_path.iterdir())


NAMES = [  # no value to parse, or a wrong one
    *("-h", "", "predict -h", "evaluate -h", "fti", "predict --otu x"),
    *("predict --out x --count ten", "bench --boxes 10 --boxes many"),
    *("predict --out x --method exct", "fit --out x --prior-precision abc"),
]


@pytest.mark.parametrize("words", list(dict.fromkeys([*NAMES, *WRONG])))
def test_help_and_typos_import_little(words: str) -> None:
    """Counted, not timed: torch alone takes seconds to import."""
    code = """
import sys
from boxcov.__main__ import main
try:
    main()
except SystemExit:
    pass
heavy = {"torch", "numpy", "safetensors", "matplotlib", "scipy", "PIL", "rich"} & set(sys.modules)
assert not heavy, heavy
assert len(sys.modules) < LIMIT, len(sys.modules)
""".replace("LIMIT", "250" if words in NAMES else "400")
    command = [sys.executable, "-c", code, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("given", "used"), [(None, "passive"), ("active", "active")])
def test_threads_sleep_while_they_wait(given: str | None, used: str) -> None:
    """On busy cores threads that spin make a frame several times slower (benchmarks/busy.py)."""
    code = """
import os, sys
sys.argv = ["boxcov", "--version"]
from boxcov.__main__ import main
try:
    main()
except SystemExit:
    pass
assert "torch" not in sys.modules  # which reads the variable
print(os.environ["OMP_WAIT_POLICY"])
"""
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    env |= {} if given is None else {"OMP_WAIT_POLICY": given}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True
    )
    assert done.stdout.split()[-1] == used


@dataclass(frozen=True)
class Long(option.Options):
    """Options of a command that can be resumed."""

    resume: bool = vocabulary.resume()


def long(options: Long) -> None:
    raise KeyboardInterrupt


def short(options: DemoCommand) -> None:
    raise KeyboardInterrupt


def test_interrupted_commands_say_how_to_continue(capsys) -> None:
    with pytest.raises(SystemExit, match="130"):
        run(long, Long, resume=False)
    told = "boxcov: interrupted; the same command with --resume continues\n"
    assert capsys.readouterr().err == told
    with pytest.raises(SystemExit, match="130"):
        run(short, DemoCommand, out=Path("x"))
    assert capsys.readouterr().err == "boxcov: interrupted\n"


def option_names(verb) -> set[str]:
    commands = cli.build_app().commands
    return {
        name
        for param in commands[verb.__name__].params
        for name in (*param.opts, *param.secondary_opts)
    }


def test_every_command_that_prints_results_has_json() -> None:
    without = {verb.__name__ for verb in EXAMPLES if "--json" not in option_names(verb)}
    assert without == {"stream", "monitor"}  # their lines are JSON


def test_messages_name_options_that_exist() -> None:
    """Every --option in a text of src/ is one of some command, or of another program."""
    known = {name for verb in EXAMPLES for name in option_names(verb)}
    known |= {"--help", "--version"}
    source = Path(package.__file__).parent
    for path in [*source.glob("pipeline/**/*.py"), *source.glob("cli/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) else ""
            for word in re.findall(r"(?<![\w/-])--[a-z][a-z-]+", text if type(text) is str else ""):
                assert word in known, f"{path}, line {node.lineno}: {word}"


def test_convert_has_the_options_that_its_errors_name(tmp_path) -> None:
    """``convert --format ros`` of uncalibrated boxes advises --covariance epistemic."""
    plain = tmp_path / "d.safetensors"
    in_space(3, calibrated=False).save(plain)
    words = f"convert {plain} --format ros --out {tmp_path}/x.json"
    error = refuse(words)
    advised = set(re.findall(r"--[a-z-]+", error))
    assert advised == {"--covariance"} <= option_names(convert)
    succeed(f"{words} --covariance epistemic")


def test_scenarios_are_those_of_the_simulation() -> None:
    assert tuple(simulated.SCENARIOS) == option.SCENARIOS


def test_every_public_name_imports() -> None:
    assert {*package._HOMES, "__version__"} == set(package.__all__) == set(dir(package))
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing


def test_documented_names_need_no_further_import() -> None:
    """In a separate process: here other tests have imported the modules already."""
    names = (
        "data.batched data.coco.frames data.kitti.frames data.nuscenes.frames data.shapes.frames "
        "data.simulated.CLASSES data.simulated.frames data.simulated.sequences "
        "detectors.centerpoint.load detectors.tiny.TinyCenter detectors.tiny.train "
        "detectors.yolox.load evaluate.matching.match evaluate.quality"
    )
    code = "import boxcov, operator, sys; operator.attrgetter(*sys.argv[1:])(boxcov)"
    run = subprocess.run([sys.executable, "-c", code, *names.split()], capture_output=True)
    assert run.returncode == 0, run.stderr.decode()


def test_warnings_are_one_line() -> None:
    """In a separate process, because pytest handles warnings itself."""
    code = """
import sys, warnings
from boxcov.cli import app as cli
from boxcov import BoxcovWarning
from boxcov.pipeline.options import DemoCommand

def warned(options: DemoCommand) -> None:
    warnings.warn("look", BoxcovWarning)

cli.COMMANDS["Use"][warned] = ()
sys.argv = ["boxcov", "warned"]
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr == "boxcov: look\n"


def test_import_needs_only_torch_numpy_and_safetensors() -> None:
    """``import boxcov`` works without the packages of the extras."""
    code = """
import sys
for name in ("click", "rich", "matplotlib", "scipy", "plotly", "PIL"):
    sys.modules[name] = None
import boxcov
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_ellipse_matches_the_covariance() -> None:
    covariance = torch.tensor([[4.0, 1.0], [1.0, 2.0]]).numpy()
    line = ellipse(torch.tensor([1.0, -1.0]).numpy(), covariance, 2.0)
    off = torch.as_tensor(line - [1.0, -1.0])
    mahalanobis = (off @ torch.linalg.inv(torch.as_tensor(covariance).double()) * off).sum(1).sqrt()
    assert torch.allclose(mahalanobis, torch.full_like(mahalanobis, 2.0))


def test_corners_turn_with_the_heading() -> None:
    ahead, left = corners(
        torch.tensor([[1.0, 2.0, 2.0, 4.0, 0.0], [1.0, 2.0, 2.0, 4.0, torch.pi / 2]]).numpy()
    )
    assert ahead[:, 0].max() == pytest.approx(3)
    assert left[:, 1].max() == pytest.approx(4)
    assert left[:, 0].max() == pytest.approx(2)
