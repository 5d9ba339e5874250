"""The environment that `make` builds in its cache: what is installed, in which steps of pip.

    environment.py key 0.5.14 0.3.1             # names its folder, by all that is in it
    environment.py build 0.5.14 0.3.1 FOLDER

The arguments are the releases of SGLang and of Megatron-Bridge.

The SGLang that the `test` extra pins is what pip resolves next to verl. Another one wants a
transformers that verl's metadata excludes: it is installed with the group `beside-newer-sglang`,
then verl alone. SGLang 0.5.18 to 0.5.22 get an empty distribution in place of `cuda-tile`, of which
PyPI has no wheel and which SGLang imports on GPUs alone.

Megatron-Bridge is installed by `--no-deps`. Releases after the one of the group
`without-dependencies` want a newer megatron-core, and the group `beside-newer-bridge`.

Standard library only: this runs before all of them.
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
BRIDGE = "megatron-bridge"
NEWER_BRIDGES = {"0.5.0": "megatron-core==0.18.2", "0.6.2": "megatron-core==0.19.2"}
"""Releases of Megatron-Bridge beside the default one, and the megatron-core of each."""
BRIDGES_PYTHON = (3, 12)
"""The one Python that the newer releases of Megatron-Bridge are for."""

Step = tuple[list[str], list[str]]
"""Options of `pip install`, and requirements."""


def steps(sglang: str, bridge: str) -> list[Step]:
    """What to install, one `pip install` after the other.

    Raises:
        ValueError: this release of Megatron-Bridge is unknown, or not for this Python.
    """
    project = tomllib.loads(PROJECT.read_text())
    groups, extras = project["dependency-groups"], project["project"]["optional-dependencies"]
    test, others = extras["test"], extras["megatron"]
    without = groups["without-dependencies"]
    if f"{BRIDGE}=={bridge}" not in without:
        core = _core_of(bridge, without)
        others = [core if _name(core) == _name(each) else each for each in others]
        others += groups["beside-newer-bridge"]
        without = [each for each in without if _name(each) != BRIDGE] + [f"{BRIDGE}=={bridge}"]
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


def _core_of(bridge: str, without: list[str]) -> str:
    """The requirement of megatron-core beside a release of Megatron-Bridge."""
    if bridge not in NEWER_BRIDGES:
        default = [each.partition("==")[2] for each in without if _name(each) == BRIDGE]
        known = ", ".join([*default, *NEWER_BRIDGES])
        raise ValueError(f"BRIDGE={bridge}: not one of {known}")
    if sys.version_info[:2] != BRIDGES_PYTHON:
        ours = platform.python_version()
        raise ValueError(f"BRIDGE={bridge} needs Python 3.12, PYTHON is {ours}")
    return NEWER_BRIDGES[bridge]


def _name(requirement: str) -> str:
    return re.split("[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0]


def key(sglang: str, bridge: str) -> str:
    """Differs where the requirements, a step or Python's version do."""
    content = json.dumps([steps(sglang, bridge), platform.python_version()])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def build(sglang: str, bridge: str, folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin/python", "-m", "pip", "install", "-q"]
    with tempfile.TemporaryDirectory() as stand_ins:
        write_empty_wheel(Path(stand_ins), CUDA_TILE)
        for options, requirements in [(["-U"], ["pip"]), *steps(sglang, bridge)]:
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
    command, *releases = sys.argv[1:4]
    try:
        if command == "key":
            print(key(*releases))
        else:
            build(*releases, Path(sys.argv[4]))
    except ValueError as error:
        sys.exit(str(error))
