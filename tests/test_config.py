import dataclasses
import json
import os
import sys

import pytest

from outpace import registry
from outpace.cli.main import main
from outpace.config import PLAN_KEYS, MethodSpec, build, cache_folder, needs_settings, split_specs
from outpace.errors import OutpaceError, SpecError, UnknownNameError
from outpace.methods.lookup.prompt_lookup import PromptLookupConfig
from outpace.models.zoo import open_checkpoint


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("none", "none"),
        (" prompt_lookup ", "prompt_lookup"),
        ("prompt_lookup[]", "prompt_lookup"),
        ("x[b=2  a=1]", "x[a=1 b=2]"),
        ("x[levels=y[a=1 b=2]+z tree=2x1]", "x[levels=y[a=1 b=2]+z tree=2x1]"),
    ],
)
def test_a_spec_has_one_normal_form(text, normal):
    spec = MethodSpec.parse(text)
    assert str(spec) == normal
    assert MethodSpec.parse(normal) == spec


@pytest.mark.parametrize(
    "text", ["", "[a=1]", "x[a=1", "x[a]", "x[=1]", "x[a=]", "x[a=1 a=2]", "x[a=]b]", "x[a=[1]"]
)
def test_a_broken_spec_is_one_clear_line(text):
    with pytest.raises(SpecError) as error:
        MethodSpec.parse(text)
    assert "\n" not in str(error.value) and text in str(error.value)


def test_lists_of_specs_split_outside_brackets():
    assert split_specs("none, a[x=1,2 y=b[c=3,4]],b") == ["none", "a[x=1,2 y=b[c=3,4]]", "b"]


def test_configs_are_built_from_text_by_their_types():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config:
        count: int = 1
        share: float | None = 0.5
        deep: bool = False
        path: str = "a"

    given = {"count": "3", "share": "none", "deep": "true", "path": "b/c"}
    assert build(Config, given, "it") == Config(count=3, share=None, deep=True, path="b/c")
    for key, bad in (("count", "2.5"), ("share", "half"), ("deep", "yes")):
        with pytest.raises(SpecError, match=f"it: {key}='{bad}' is not"):
            build(Config, {key: bad}, "it")
    with pytest.raises(UnknownNameError, match="did you mean count"):
        build(Config, {"cuont": "3"}, "it")
    with pytest.raises(SpecError, match="min_ngram"):
        build(PromptLookupConfig, {"min_ngram": "9"}, "prompt_lookup")


def test_the_registry_suggests_near_names_and_its_classes_keep_the_contract():
    with pytest.raises(UnknownNameError, match="did you mean prompt_lookup"):
        registry.entry("drafter", "prompt_lokup")
    for row in registry.entries():
        cls = registry.load(row.kind, row.name)
        fields = {field.name for field in dataclasses.fields(cls.Config)}
        assert not fields & set(PLAN_KEYS), f"{row.name}: these keys belong to every method"
        assert row.summary and "\n" not in row.summary
        assert cls.__doc__
        if row.kind == "verifier":
            assert cls.name == row.name and cls.lossless == row.lossless


@pytest.fixture
def plug(tmp_path, monkeypatch):
    """Installs a package with a table of methods, as pip would."""

    def install(source, name="stranger"):
        info = tmp_path / f"{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[outpace.methods]\n{name} = {name}\n")
        (tmp_path / f"{name}.py").write_text(f"from outpace.registry import MethodEntry\n{source}\n")
        installed.append(name)
        registry._table.cache_clear()

    installed = []
    monkeypatch.syspath_prepend(tmp_path)
    yield install
    monkeypatch.undo()
    registry._table.cache_clear()
    for name in installed:
        sys.modules.pop(name, None)


HOME = "outpace.methods.lookup.prompt_lookup:PromptLookupConfig"


def test_a_package_adds_rows_as_we_do(plug):
    plug(
        f"ENTRIES = (MethodEntry('mine', 'drafter', 'lookup', '{HOME}', 'Mine.', auto=True),\n"
        "    MethodEntry('lost', 'policy', 'policy', 'nowhere:Lost', 'Lost.'))"
    )
    row = registry.entry("drafter", "mine")
    assert (row.name, row.summary, row.auto) == ("mine", "Mine.", True)
    assert registry.load("drafter", "mine") is PromptLookupConfig
    assert [row.name for row in registry.entries("policy")][-1] == "lost" and not registry.broken()
    with pytest.raises(UnknownNameError, match="did you mean mine"):
        registry.entry("drafter", "mien")
    with pytest.raises(OutpaceError, match=r"'lost' of the package stranger 1.2 .* ModuleNotFoundError"):
        registry.load("policy", "lost")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise RuntimeError('it was written on a Friday')", "RuntimeError: it was written on a Friday"),
        ("ENTRIES = (print,)", "which is no MethodEntry"),
        ("PAGES = ()", "has no attribute 'ENTRIES'"),
        (f"ENTRIES = (MethodEntry('a', 'drafer', 'lookup', '{HOME}', 'A.'),)", "known: drafter, verifier"),
        (f"ENTRIES = (MethodEntry('none', 'drafter', 'none', '{HOME}', 'A.'),)", "a drafter 'none' already"),
        (f"ENTRIES = (MethodEntry('a', 'drafter', 'x', '{HOME}', 'A.'),) * 2", "ENTRIES holds two drafters"),
    ],
)
def test_a_broken_table_is_left_out_and_blamed(plug, source, why, capsys):
    fine = f"ENTRIES = (MethodEntry('fine', 'drafter', 'lookup', '{HOME}', 'Fine.'),)"
    plug(source)
    plug(fine, name="another")
    assert registry.load("drafter", "none") and registry.entry("drafter", "fine")
    (line,) = registry.broken()
    assert "the package stranger 1.2" in line and why in line
    with pytest.raises(UnknownNameError) as error:
        registry.entry("drafter", "a")
    assert line in str(error.value)
    assert main(["methods", "none"]) == 0
    assert "stranger 1.2" in " ".join(capsys.readouterr().err.split())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, config in (
        ("head", {"method": "eagle3", "target_digest": "0"}),
        ("a b", {"method": "x"}),
        ("model", {"model_type": "llama"}),
        ("list", ["method", "target_digest"]),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "a b" / "config.json").write_text('{"method": "x", "target_digest": "0"}')
    return tmp_path


def test_the_folder_of_a_trained_drafter_is_a_spec(folder):
    assert str(MethodSpec.parse("./head")) == "eagle3[model=./head]"
    assert str(MethodSpec.parse("~/head")) == "eagle3[model=~/head]"
    full = f"{folder}/head"
    assert str(MethodSpec.parse(f"{full}[tree=2x2 verifier=match]")) == (
        f"eagle3[model={full} tree=2x2 verifier=match]"
    )
    spec = MethodSpec.parse(full)
    assert MethodSpec.parse(str(spec)) == spec
    assert MethodSpec.parse("head").name == "head", "a plain name stays a name"
    with pytest.raises(OutpaceError, match="for the folder write"):
        registry.entry("drafter", "head")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("./nowhere", "./nowhere is no folder of a trained drafter"),
        ("./model", "or NAME[model=FOLDER]"),
        ("./list", "no folder of a trained drafter"),
        ("./head[model=x]", "names two folders"),
        ("./a b", "cannot hold a space"),
        (3, "a method spec is text, got 3"),
    ],
)
def test_a_folder_that_is_no_drafter_is_one_clear_line(folder, text, says):
    with pytest.raises(SpecError) as error:
        MethodSpec.parse(text)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_names_are_suggested_where_they_are_near_and_listed_where_they_are_few():
    many = [f"name{i}" for i in range(9)]
    assert str(UnknownNameError("thing", "nope", [*many, "coupled"])).count("coupled") == 1
    assert "did you mean" not in str(UnknownNameError("thing", "nope", [*many, "coupled"]))
    near = str(UnknownNameError("thing", "cuopled", [*many, "coupled"]))
    assert near == "unknown thing 'cuopled'; did you mean coupled?"
    few = str(UnknownNameError("thing", "cuopled", ["tree", "coupled"]))
    assert few == "unknown thing 'cuopled'; did you mean coupled? known: coupled, tree"


def test_a_plan_is_put_into_a_spec():
    spec = MethodSpec.parse("draft_model[layers=2 tree=2x1]")
    assert str(spec.planned(tree="dynamic", tree_size=8, verifier=None)) == (
        "draft_model[layers=2 tree=dynamic tree_size=8]"
    )
    assert spec.planned() == spec


def test_a_setting_that_is_missing_is_named():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Needs:
        store: str
        size: int = 3

    with pytest.raises(SpecError, match=r"drafter 'x' needs store=\.\.\.$"):
        build(Needs, {"size": "4"}, "drafter 'x'")
    assert needs_settings(Needs) and not needs_settings(PromptLookupConfig)


def test_a_home_that_nobody_knows_is_no_error(monkeypatch):
    """As of a user of a container who has no entry."""
    for name in ("HOME", "XDG_CACHE_HOME", "OUTPACE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert str(cache_folder()).startswith(os.devnull)


def test_the_home_of_a_user_whom_nobody_knows_is_one_line():
    with pytest.raises(SpecError, match="is no folder of a trained drafter"):
        MethodSpec.parse("~nobody-of-that-name/drafter")
    with pytest.raises(OutpaceError, match="no such file or folder"):
        open_checkpoint("~nobody-of-that-name/model")
