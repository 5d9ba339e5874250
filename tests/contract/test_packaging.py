"""The plugins load from a built wheel and from an editable install: in verl, in SGLang, in Hydra.

Both are installed into environments of their own, empty but for the dependencies, which they see
through a .pth file, from a copy of the sources: nothing of this checkout can be imported there by
accident. The wheel is what `make dist` makes, which builds it from the sdist.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.our_imports import PLUGINS, imports
from support.processes import DOCTOR, report_of, run_process

HEALTHY = ("verl plugin", "verl hooks", "SGLang plugin", "SGLang hooks")
ROOT = Path(__file__).parents[2]
ENVIRONMENT = "tests/support/environment.py"  # which `make` asks for the key of its cache
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "Makefile", ENVIRONMENT)
OPTIONAL = {
    "triton",  # torch brings it where it has CUDA; what imports it does without it elsewhere
    "matplotlib",  # of `report --plot`, which says so
    "peft",  # which verl requires, and has made the adapters with that are looked at
}

IN_HYDRA = """
from hydra import compose, initialize
with initialize(version_base=None, config_path=None):
    config = compose(overrides=["+weight_sync=flattened"])
"""
LOADED = (
    IN_HYDRA
    + """
assert config.actor_rollout_ref.rollout.custom.weight_sync.mode == "flattened", config
import sys
assert "verl" not in sys.modules and "sglang" not in sys.modules
import hydra_plugins.verl_sglang_sync.search_path as plugin, sglang_loader, verl_sglang_sync
print(plugin.__file__, sglang_loader.__file__, verl_sglang_sync.__file__, sep="\\n")
"""
)


@dataclass(frozen=True)
class Installation:
    """One environment with this project in it.

    Attributes:
        python: its interpreter.
        packages: where the project's modules must come from.
    """

    python: Path
    packages: Path


def names_of(requirements):
    """Canonical names of those that every installation needs, without an extra."""
    found = map(Requirement, requirements)
    return {
        canonicalize_name(each.name)
        for each in found
        if each.marker is None or each.marker.evaluate({"extra": ""})
    }


def test_the_group_for_newer_sglang_completes_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    group = names_of(project["dependency-groups"]["beside-newer-sglang"])
    given = group | names_of(requires("sglang") or ()) | {"verl", "sglang"}
    needed = names_of(requires("verl") or ()) | names_of(project["project"]["dependencies"])
    assert len(needed) > 20
    assert not needed - given


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of what a build needs."""
    folder = tmp_path_factory.mktemp("sources")
    leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "plugins", folder / "plugins", ignore=leave_out)
    for name in BUILT_FROM:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def dist(sources):
    """What `make dist` builds, here without network, and without a warning."""
    build = f"BUILD={sys.executable} -m build --no-isolation"
    # Setuptools warns of the one, and `make test` sets the other.
    left_out = ("PYTHONDONTWRITEBYTECODE", "MAKEFLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    command = ["make", "dist", f"PYTHON={sys.executable}", build]
    options = {"capture_output": True, "text": True, "check": False}
    made = subprocess.run(command, cwd=sources, env=environment, **options)
    printed = made.stdout + made.stderr
    assert made.returncode == 0, printed[-4000:]
    assert "warning" not in printed.lower(), printed
    return sources / "dist"


@pytest.fixture(scope="module")
def wheel(dist):
    (built,) = dist.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module", params=["wheel", pytest.param("editable", marks=pytest.mark.slow)])
def installation(request, tmp_path_factory):
    """The project installed as `request.param`."""
    python = thin_environment(tmp_path_factory.mktemp(request.param))
    if request.param == "wheel":
        what = [str(request.getfixturevalue("wheel"))]
        packages = site_packages(python)
    else:
        folder = request.getfixturevalue("sources")
        what = ["--no-build-isolation", "--editable", str(folder)]
        packages = folder / "plugins"
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", *what)
    run(*install, python=python, cwd=python.parent)
    return Installation(python, packages)


def thin_environment(folder):
    """Make a virtual environment that sees this one's dependencies; return its interpreter."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    specs = [importlib.util.find_spec(name) for name in ("sgl_kernel", "verl")]
    folders = [Path(spec.origin).parents[1] for spec in specs if spec and spec.origin]
    assert len(folders) == 2, "the one may be a stand-in for a CPU, in a folder of its own"
    (site_packages(python) / "dependencies.pth").write_text("\n".join(map(str, folders)))
    return python


def site_packages(python):
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return python.parents[1] / "lib" / version / "site-packages"


def run(*arguments, cwd, python=sys.executable, environment=None):
    """Run an interpreter that must succeed; return what it printed."""
    result = run_process(str(python), *arguments, cwd=cwd, environment=environment)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    return result.stdout


class TestWheel:
    def test_holds_every_module_and_data_file(self, wheel, sources):
        """And leaves the namespace `hydra_plugins` open: it has no `__init__.py`."""
        packages = sources / "plugins"
        names = set(zipfile.ZipFile(wheel).namelist())
        expected = {
            str(path.relative_to(packages))
            for path in packages.rglob("*")
            if path.suffix in (".py", ".yaml") or path.name == "py.typed"
        }
        assert "verl_sglang_sync/conf/weight_sync/flattened.yaml" in expected
        assert {"verl_sglang_sync/py.typed", "sglang_loader/py.typed"} <= expected
        assert {name for name in names if ".dist-info/" not in name} == expected
        assert "hydra_plugins/__init__.py" not in names

    def test_comes_with_its_licence(self, wheel, dist, metadata):
        text = (ROOT / "LICENSE").read_bytes()
        archive = zipfile.ZipFile(wheel)
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/licenses/LICENSE"))
        assert archive.read(name) == text
        assert b"Apache License" in text
        assert metadata["License-Expression"] == "Apache-2.0"
        (sdist,) = dist.glob("*.tar.gz")
        with tarfile.open(sdist) as packed:
            assert f"{sdist.name.removesuffix('.tar.gz')}/LICENSE" in packed.getnames()

    def test_declares_every_package_that_it_imports(self, metadata):
        """Else a module of another distribution is there because verl or SGLang bring it today. And
        what verl leaves to an extra.
        """
        declared = names_of(metadata.get_all("Requires-Dist", []))
        assert {"transferqueue", "cachetools"} <= declared
        provided_by = packages_distributions()
        modules = {module.partition(".")[0] for _, module, _ in imports()}
        imported = modules - sys.stdlib_module_names - {path.name for path in PLUGINS.iterdir()}
        assert {"zmq", "torch"} <= imported, "the control"
        missing = {
            module
            for module in imported - OPTIONAL
            if not {canonicalize_name(name) for name in provided_by[module]} & declared
        }
        assert not missing


class TestLoaded:
    def test_by_hydra_alone_from_where_it_is_installed(self, installation, tmp_path):
        printed = run("-c", LOADED, python=installation.python, cwd=tmp_path)
        files = printed.splitlines()
        assert len(files) == 3
        assert all(Path(file).is_relative_to(installation.packages) for file in files)

    def test_doctor_sees_both_plugins_loaded(self, installation, tmp_path, preloaded):
        script = installation.python.with_name("verl-sglang-sync")
        ran = run_process(str(script), *DOCTOR, cwd=tmp_path, environment=preloaded)
        status, checks, overall = report_of(ran)
        ours = "import verl_sglang_sync; print(verl_sglang_sync.__file__)"
        file = run("-c", ours, python=installation.python, cwd=tmp_path, environment=preloaded)
        assert Path(file.strip()).is_relative_to(installation.packages), "the control"
        assert not [check for check in checks.values() if check["status"] == "fail"]
        assert status == 0
        for name in HEALTHY:
            assert checks[name]["status"] == "ok", checks[name]
        assert checks["SGLang hooks"]["detail"] == "all 14 are in place"
        if not torch.cuda.is_available():
            assert checks["recipe: what it does"]["advice"] == "for development only: no GPU here"
            assert overall == "warn"

    def test_without_the_project_there_is_no_preset(self, tmp_path):
        """Negative control: the environment alone does not provide it.

        Hydra then takes the flag for a plain value, which is why our own checks refuse that value.
        """
        python = thin_environment(tmp_path / "bare")
        printed = run("-c", f"{IN_HYDRA}print(config)", python=python, cwd=tmp_path)
        assert printed.strip() == "{'weight_sync': 'flattened'}"
