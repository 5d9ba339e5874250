"""The lint of docstrings and messages finds what breaks its rules, and nothing else."""

import pytest
from tools.plain_english import (
    CLEAN,
    ROOT,
    long_test_names,
    main,
    problems_in,
    python_files,
    readme_problems,
)


@pytest.fixture
def problems(tmp_path):
    """Texts of the problems in a source file."""

    def check(source):
        path = tmp_path / "module.py"
        path.write_text(source)
        return [problem.text for problem in problems_in(path)]

    return check


@pytest.mark.parametrize("opening", ["The bytes", "Whether it", "True if", "`x`", "Sends", "How"])
def test_function_docstring_without_verb_is_found(problems, opening):
    (text,) = problems(f'async def f():\n    """{opening} of a bucket."""\n')
    assert text.startswith("f starts with")


@pytest.mark.parametrize("opening", ["Sends", "Copies", "What", "How", "See", "Where"])
def test_class_docstring_without_noun_is_found(problems, opening):
    (text,) = problems(f'class Bucket:\n    """{opening} a thing."""\n')
    assert text.startswith("Bucket starts with")


@pytest.mark.parametrize(
    "source",
    [
        'def f():\n    """Send a bucket."""\n',
        'def f():\n    """Export a bucket."""\n',
        "def f():\n    pass\n",
        'class Bucket:\n    """A run of tensors."""\n',
        'class Addresses:\n    """Process of the trainer."""\n',
        'class A:\n    @functools.cached_property\n    def b(self):\n        """The size."""\n',
        'A = 1\n"""The size."""\n',
        '"""Use `a; b` here."""\n',
        '"""A module:\n\n    a = 1; b = 2\n\n    c = 3; d = 4\n\nIts end.\n"""\n',
        'entity = "&lt;b"\n',
        "a = 1  # a comment; it may\n",
    ],
)
def test_plain_text_passes(problems, source):
    assert not problems(source)


def test_property_docstring_with_clause_is_found(problems):
    assert problems('class A:\n    @property\n    def b(self):\n        """Where it is."""\n')


def test_docstring_of_a_constant_with_clause_is_found(problems):
    assert problems('LIMIT_S = 1.0\n"""How long to wait."""\n')
    assert problems('class A:\n    b: int = 1\n    """What it is."""\n')


@pytest.mark.parametrize(
    "source",
    [
        '"""A module; and more."""\n',
        'def f():\n    """Send.\n\n    If it fails, stop; the caller repeats.\n    """\n',
        'def f():\n    """Send.\n\n    Args:\n        a: the one; the other.\n    """\n',
        'raise ValueError(f"tensor {name} is lost; repeat")\n',
        'raise ValueError(f"{name};")\n',
        "text = f\"{name + '; '}\"\n",
        'text = "; ".join(texts)\n',
    ],
)
def test_semicolons_in_text_are_found(problems, source):
    assert len(problems(source)) == 1


def test_readme_of_121_lines_is_found(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("line\n" * 120)
    assert not list(readme_problems(readme))
    readme.write_text("line\n" * 121)
    assert len(list(readme_problems(readme))) == 1


def test_exit_status_reports_problems(tmp_path, capsys):
    path = tmp_path / "module.py"
    path.write_text('def f():\n    """The bytes."""\n')
    assert main([str(tmp_path)]) == 1
    assert f"{path}:2: f starts with" in capsys.readouterr().out
    path.write_text('def f():\n    """Return the bytes."""\n')
    assert main([str(path)]) == 0


def test_every_checked_path_has_files():
    for path in CLEAN:
        assert list(python_files([str(ROOT / path)])), path


def test_a_test_name_of_nine_words_is_found(tmp_path):
    allowed, too_long = "test_a_b_c_d_e_f_g_h", "test_a_b_c_d_e_f_g_h_i"
    path = tmp_path / "test_names.py"
    path.write_text(
        f"def {allowed}(): pass\n\nclass TestA:\n    async def {too_long}(self): pass\n"
    )
    (problem,) = long_test_names(path)
    assert (problem.line, problem.text) == (4, f"{too_long} has 9 words: at most 8")


def test_the_names_of_all_tests_are_short():
    files = list(python_files([str(ROOT / "tests")]))
    assert len(files) > 100
    assert not [problem for path in files for problem in long_test_names(path)]
