"""What the documents name is there: files, functions, settings, fields of a report, log lines."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from verl_sglang_sync.commands.report_files.runs import STAGES
from verl_sglang_sync.config import COMPILED_KEYS, PRESET_KEYS
from verl_sglang_sync.report import SyncReport

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/results/*.md")]


def first_column(document, heading):
    """Names in backticks in the first cells of the table that follows a line."""
    rows = (ROOT / document).read_text().split(f"{heading}\n|---|")[1].split("\n\n")[0]
    return re.findall(r"`([\w.<>]+)`", "".join(row.split(" | ")[0] for row in rows.splitlines()))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_to_a_file(document):
    for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
        assert target.startswith("http") or (document.parent / target).exists(), target


def names_in(node, prefix=""):
    """Qualified names of the functions and classes of a module."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name
            yield from names_in(child, f"{prefix}{child.name}.")


def test_every_function_of_the_structure_is_there():
    named = re.findall(r"`([\w/]+\.py): ([\w.]+)`", (ROOT / "docs/structure.md").read_text())
    assert len(named) > 40
    for file, name in named:
        (path,) = ROOT.glob(f"plugins/*/{file}")
        assert name in names_in(ast.parse(path.read_text())), f"{file}: {name}"


def test_the_readme_and_the_glossary_stay_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    rows = (ROOT / "docs/glossary.md").read_text().split("| word | meaning |\n|---|---|\n")[1]
    assert 10 < len(rows.splitlines()) <= 25


def test_every_setting_is_in_the_readme():
    keys = {name.split(".")[0] for name in first_column("README.md", "| key | default | meaning |")}
    assert keys == {*PRESET_KEYS, *COMPILED_KEYS}


def test_every_report_field_and_stage_is_described():
    fields = {name.split(".")[0] for name in first_column("docs/report.md", "| field | meaning |")}
    assert fields == {field.name for field in dataclasses.fields(SyncReport)}
    stages = first_column("docs/report.md", "| stage | what the leading rank does |")
    assert set(stages) == {*STAGES, "sync", "load_adapter", "unload_adapter"} - {"other"}


def test_a_quoted_log_line_is_one_of_ours():
    files = ROOT.glob("plugins/**/*.py")
    said = re.sub(r'"\s*\n\s*f?"', "", "".join(path.read_text() for path in files))
    quoted = re.findall(r"\*\*`([^`]+)`", (ROOT / "docs/troubleshooting.md").read_text())
    assert len(quoted) >= 12
    for line in map(" ".join, map(str.split, quoted)):
        for part in re.split(r"<reason>|\.\.\.|\d of \d engine ranks|\bN\b|'nccl'|; ", line):
            assert part.strip(":% ") in said, line
