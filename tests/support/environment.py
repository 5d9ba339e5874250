"""The environment that `make` builds in its cache: what is installed, in which steps of pip.

    environment.py key 0.5.14             # names its folder: of all that decides what is in it
    environment.py build 0.5.14 FOLDER

The SGLang that the `test` extra pins is what pip resolves next to verl. Another one wants a
transformers that verl's metadata excludes: it is installed with the group `beside-newer-sglang`,
then verl alone. SGLang 0.5.18 to 0.5.22 get an empty distribution in place of `cuda-tile`, of which
PyPI has no wheel and which SGLang imports on GPUs alone. Standard library only: this runs before
all of them.
"""

import hashlib
import json
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
ALONE = "--no-deps"
STAND_INS = "--find-links={stand_ins}"
WITH_CUDA_TILE = ((0, 5, 18), (0, 5, 22))
CUDA_TILE = "cuda_tile-1.6.0rc5"

Step = tuple[list[str], list[str]]
"""Options of `pip install`, and requirements."""


def steps(sglang: str) -> list[Step]:
    """What to install, one `pip install` after the other."""
    project = tomllib.loads(PROJECT.read_text())
    groups, extras = project["dependency-groups"], project["project"]["optional-dependencies"]
    test, others = extras["test"], extras["megatron"]
    without = groups["without-dependencies"]
    if f"sglang=={sglang}" in test:
        pinned = {_name(each) for each in test if "==" in each}
        ours = [each for each in project["project"]["dependencies"] if _name(each) not in pinned]
        return [([], ours + test + others), ([ALONE], without)]
    verl = next(each for each in test if _name(each) == "verl")
    tools = [each for each in test if _name(each) not in ("verl", "sglang")]
    beside = groups["beside-newer-sglang"]
    first, last = WITH_CUDA_TILE
    needs_stand_in = first <= tuple(map(int, sglang.split("."))) <= last
    options = [STAND_INS] if needs_stand_in else []
    newer = [f"sglang=={sglang}", *beside, *tools, *others]
    return [(options, newer), ([ALONE], [verl, *without])]


def _name(requirement: str) -> str:
    return re.split("[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0]


def key(sglang: str) -> str:
    """Differs where the requirements, a step or Python's version do."""
    content = json.dumps([steps(sglang), platform.python_version()])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def build(sglang: str, folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin/python", "-m", "pip", "install", "-q"]
    with tempfile.TemporaryDirectory() as stand_ins:
        write_empty_wheel(Path(stand_ins), CUDA_TILE)
        for options, requirements in [(["-U"], ["pip"]), *steps(sglang)]:
            given = [option.format(stand_ins=stand_ins) for option in options]
            subprocess.run([*pip, *given, *requirements], check=True)


def write_empty_wheel(folder: Path, distribution: str) -> None:
    """Write a wheel with nothing in it. `distribution`: its name and version, joined by "-"."""
    name, release = distribution.split("-")
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: make\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{distribution}-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(f"{distribution}.dist-info/{file}", text)
        wheel.writestr(f"{distribution}.dist-info/RECORD", "")


if __name__ == "__main__":
    if sys.argv[1] == "key":
        print(key(sys.argv[2]))
    else:
        build(sys.argv[2], Path(sys.argv[3]))
