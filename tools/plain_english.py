"""Check the rules of the project's English that need no judgement.

    python tools/plain_english.py                   # the paths of CLEAN
    python tools/plain_english.py plugins/a/b.py    # other files or folders

The rules:

- The docstring of a function starts with an imperative verb. `tools/verbs.txt` lists the
  verbs: add one that is missing.
- The docstring of a class, a property or a constant starts with a noun phrase, not with "Sends" or
  "How".
- No string literal has a semicolon: no docstring and no message. Code may have semicolons: text in
  backticks, and indented lines under a blank line.
- The name of a test has at most eight words after `test`.
- README.md has at most 120 lines.
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

CLEAN = ["plugins"]
"""The folders and files that `make lint` checks."""

README_MAX_LINES = 120
TEST_NAME_MAX_WORDS = 8

# Without "tell", "know", "learn", "remember", "forget", "let" and "give": no program does that.
VERBS = frozenset((ROOT / "tools/verbs.txt").read_text().split())

# An opening that makes a clause, or a phrase without a noun.
CLAUSES = re.compile(
    "after|also|although|as|at|because|before|both|by|each|every|for|from|how|if|in|like|not|of|on|"
    "only|see|since|so|than|that|then|there|these|this|those|though|to|until|what|when|where|"
    "whether|which|while|who|whose|why|with|without"
)

Documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Problem(NamedTuple):
    """A place where the text breaks a rule."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def problems_in(path: Path) -> Iterator[Problem]:
    """Yield the problems of one Python file."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, Documented) and (text := _opening_problem(node)):
            yield Problem(path, node.body[0].lineno, text)
    for line, docstring in _docstrings_of_constants(tree):
        if text := _noun_phrase_problem("a constant's docstring", docstring):
            yield Problem(path, line, text)
    for literal, text in _literals(tree):
        if _has_semicolon(text):
            yield Problem(path, literal.lineno, "semicolon: make two sentences, or use backticks")


def long_test_names(path: Path) -> Iterator[Problem]:
    """Yield the tests of one file whose names have too many words."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            prefix, *words = node.name.split("_")
            if prefix == "test" and len(words) > TEST_NAME_MAX_WORDS:
                text = f"{node.name} has {len(words)} words: at most {TEST_NAME_MAX_WORDS}"
                yield Problem(path, node.lineno, text)


def readme_problems(path: Path) -> Iterator[Problem]:
    """Yield a problem if a README is too long."""
    num_lines = len(path.read_text().splitlines())
    if num_lines > README_MAX_LINES:
        yield Problem(path, num_lines, f"{num_lines} lines: at most {README_MAX_LINES} are allowed")


def _opening_problem(node: Documented) -> str | None:
    docstring = ast.get_docstring(node)
    if not docstring:
        return None
    if isinstance(node, ast.ClassDef) or _is_property(node):
        return _noun_phrase_problem(node.name, docstring)
    opening = _opening(docstring)
    is_verb = opening.lower() in VERBS
    return None if is_verb else f'{node.name} starts with "{opening}": not in tools/verbs.txt'


def _noun_phrase_problem(name: str, docstring: str) -> str | None:
    opening = _opening(docstring)
    word = opening.lower()
    is_noun_phrase = not CLAUSES.fullmatch(word) and not _is_third_person(word)
    return None if is_noun_phrase else f'{name} starts with "{opening}": no noun phrase'


def _opening(docstring: str) -> str:
    match = re.match(r"[A-Za-z]+(-[a-z]+)*", docstring)
    return match[0] if match else docstring.split(maxsplit=1)[0]


def _docstrings_of_constants(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each string that stands below an assignment."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            for statement, following in zip(node.body, node.body[1:], strict=False):
                match statement, following:
                    case ast.Assign() | ast.AnnAssign(), ast.Expr(ast.Constant(str(text))):
                        yield following.lineno, text


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def _is_third_person(word: str) -> bool:
    stems = [word.removesuffix("s"), word.removesuffix("es"), word.removesuffix("ies") + "y"]
    return word.endswith("s") and word not in VERBS and any(stem in VERBS for stem in stems)


def _literals(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Yield each string literal with its text. An f-string is one literal."""
    if isinstance(node, ast.JoinedStr):
        yield node, "".join(_constant_text(part) for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node, node.value
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)):
            yield from _literals(child)


def _constant_text(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "{}"


def _has_semicolon(text: str) -> bool:
    prose = re.sub(r"`[^`]*`", "", inspect.cleandoc(text) if "\n" in text else text)
    return any(re.search(r";(\s|$)", line) for line in _lines_of_prose(prose))


def _lines_of_prose(text: str) -> Iterator[str]:
    """Yield the lines of a text that are in no block of code."""
    lines = text.split("\n")
    in_code = False
    for previous, line in zip(["", *lines], lines, strict=False):
        if line.strip():
            # The entries of "Args:" are indented, too. No blank line stands above them.
            in_code = line.startswith("    ") and (in_code or not previous.strip())
            if not in_code:
                yield line


def python_files(paths: Sequence[str]) -> Iterator[Path]:
    """Yield the Python files of files and folders."""
    for path in map(Path, paths):
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def main(arguments: list[str]) -> int:
    """Print all problems. Return 1 if there is one."""
    paths = arguments or [str(ROOT / path) for path in CLEAN]
    problems = [problem for path in python_files(paths) for problem in problems_in(path)]
    for path in python_files([str(ROOT / "tests")]):
        problems += long_test_names(path)
    problems += readme_problems(ROOT / "README.md")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
