"settings.ini is the one place for version and requirements: nothing else may say otherwise"
import re
import tomllib
from configparser import ConfigParser
from importlib.metadata import entry_points, metadata, version

import pytest
import qwen35_lit
from book import ROOT


@pytest.fixture(scope="module")
def settings():
    config = ConfigParser(interpolation=None, inline_comment_prefixes=("#",), delimiters=("=",))
    config.read(ROOT / "settings.ini", encoding="utf-8")
    return config["DEFAULT"]


@pytest.fixture(scope="module")
def pyproject(): return tomllib.loads((ROOT / "pyproject.toml").read_text())


STALE = "the installed package is an old one: pip install -e '.[dev]'"


def lines(text): return [o.strip() for o in text.splitlines() if o.strip()]
def bare(requirement): return re.sub(r"[\s()'\"]", "", requirement)


def test_version(settings):
    assert qwen35_lit.__version__ == settings["version"]
    assert version("qwen35_lit") == settings["version"], STALE
    assert f"## {settings['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_pyproject_declares_and_does_not_repeat(settings, pyproject):
    project = pyproject["project"]
    assert project["name"] == settings["lib_name"]
    assert set(project) == {"name", "dynamic"}
    assert {"version", "requires-python", "dependencies", "optional-dependencies", "scripts", "entry-points"} <= set(project["dynamic"])


def test_installed_requirements(settings):
    installed = metadata("qwen35_lit")
    plain = {bare(o) for o in installed.get_all("Requires-Dist") if ";" not in o}
    assert plain == {bare(o) for o in lines(settings["requirements"])}, STALE
    extras = {k.removesuffix("_requirements") for k in settings if k.endswith("_requirements")}
    assert set(installed.get_all("Provides-Extra")) == extras
    assert installed["Requires-Python"] == f">={settings['min_python']}"


def test_dev_installs_no_torch(settings):
    for key in ("requirements", "dev_requirements"):
        assert not re.search(r"^(torch|transformers)\b", settings[key], re.M)


def test_every_requirement_says_why():
    text = (ROOT / "settings.ini").read_text()
    for line in re.findall(r"^ {4}(?=[\w-]+ *(?:[=<>]{2}|[<>] *\d| *#)).*$", text, re.M): assert "# " in line, line


def test_commands(settings):
    scripts = {e.name: e.value for e in entry_points(group="console_scripts") if e.dist and e.dist.name == "qwen35_lit"}
    assert scripts["qwen35-lit"] == "qwen35_lit.cli:main"
    assert {"nbdev_test", "nbdev_export", "nbdev_clean", "nbdev_docs"} <= set(scripts)
    assert all(e.load() for e in entry_points(group="console_scripts") if e.name.startswith("nbdev_") and e.dist.name == "qwen35_lit")
