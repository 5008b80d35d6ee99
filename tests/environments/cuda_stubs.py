"""Let torchvision's wheel from PyPI load beside a CPU build of torch, and print what was imported.

    python tests/environments/cuda_stubs.py FOLDER

On Linux the wheel is linked to torch's CUDA libraries, which a CPU build does not have. Its CPU
operators call nothing in them. So FOLDER, which must be in LD_LIBRARY_PATH, gets libraries of the
same names that define the missing symbols. Each of them aborts when it is called. torchvision's own
files stay as they are.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

_CUDA = re.compile(r"\b_ZNK?(?:3c10|2at)4cuda\w+")  # names in c10::cuda and at::cuda
_CHECK = """
import torch, torchvision, transformers, ultralytics
torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
for package in (torch, torchvision, transformers, ultralytics):
    print(f"{package.__name__} {package.__version__}")
"""


def main(folder: Path) -> int:
    """Write the libraries if torchvision does not load without them; return an exit code."""
    if not _can_load():
        _write(folder, Path(find_spec("torchvision").submodule_search_locations[0]))
    return subprocess.run([sys.executable, "-c", _CHECK], check=False).returncode


def _can_load() -> bool:
    command = [sys.executable, "-c", "import torchvision"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _write(folder: Path, package: Path) -> None:
    library = package / "_C.so"
    symbols = _CUDA.findall(_output("nm", "-D", "--undefined-only", str(library)))
    source = "#include <stdlib.h>\n" + "".join(
        f"void {name}(void) {{ abort(); }}\n" for name in dict.fromkeys(symbols)
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("libc10_cuda.so", source), ("libtorch_cuda.so", "")):
        options = ["-shared", "-fPIC", "-x", "c", "-", f"-Wl,-soname,{name}"]
        subprocess.run(
            ["cc", *options, "-o", str(folder / name)], input=text, text=True, check=True
        )
    for runtime in (package.parent / "torchvision.libs").glob("libcudart.*"):
        wanted = re.search(r"libcudart\.so\.\d+", _output("readelf", "-d", str(library)))
        link = folder / wanted.group()
        link.unlink(missing_ok=True)
        link.symlink_to(runtime)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
