import dataclasses
import json
import sys
from importlib.metadata import EntryPoint

import pytest

from outpace import registry
from outpace.config import PLAN_KEYS, MethodSpec, build, needs_settings, split_specs
from outpace.errors import OutpaceError, SpecError, UnknownNameError
from outpace.methods.lookup.prompt_lookup import PromptLookupConfig


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
def plug(monkeypatch):
    """Installs entry points for drafters."""

    def install(**value_of):
        points = [EntryPoint(n, v, "outpace.drafters") for n, v in value_of.items()]
        monkeypatch.setattr(
            registry, "entry_points", lambda group: points if group == "outpace.drafters" else []
        )
        registry._table.cache_clear()

    yield install
    monkeypatch.undo()
    registry._table.cache_clear()


HOME = "outpace.methods.lookup.prompt_lookup:PromptLookupConfig"


def test_a_plugin_adds_a_row_and_cannot_take_a_name(plug):
    plug(mine=HOME)
    assert registry.load("drafter", "mine") is PromptLookupConfig
    row = registry.entry("drafter", "mine")
    assert (row.summary, row.path, row.family) == ("Settings of the drafter.", HOME, "plug-in")
    plug(none=HOME)
    with pytest.raises(OutpaceError, match="two drafters are called 'none'; rename that of a plug"):
        registry.entries()


def test_a_plugin_may_be_a_row_whose_class_is_imported_later(plug, tmp_path, monkeypatch):
    (tmp_path / "strange.py").write_text(
        "from outpace.registry import MethodEntry\n"
        f"ROW = MethodEntry('other', 'drafter', 'lookup', '{HOME}', 'Strange.', auto=True)\n"
        "LOST = MethodEntry('lost', 'drafter', 'lookup', 'nowhere:Lost', 'Lost.')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plug(strange="strange:ROW", lost="strange:LOST")
    row = registry.entry("drafter", "strange")
    assert (row.name, row.summary, row.auto) == ("strange", "Strange.", True)
    assert registry.load("drafter", "strange") is PromptLookupConfig
    assert registry.entry("drafter", "lost").summary == "Lost."
    with pytest.raises(OutpaceError, match=r"'lost' of .* ModuleNotFoundError"):
        registry.load("drafter", "lost")


def test_a_broken_plugin_is_blamed_when_it_is_used_and_not_before(plug, tmp_path, monkeypatch):
    package = tmp_path / "breaker-1.2.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: breaker\nVersion: 1.2\n")
    (package / "entry_points.txt").write_text(
        "[outpace.drafters]\nbroken = broken_one:Broken\nthing = math:pi\n"
    )
    (tmp_path / "broken_one.py").write_text("raise RuntimeError('it was written on a Friday')\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry._table.cache_clear()
    try:
        assert registry.entry("drafter", "none").name == "none"
        assert registry.load("drafter", "none")
        assert "broken_one" not in sys.modules, "nothing is imported for another's sake"
        for call in (registry.entry, registry.load):
            with pytest.raises(OutpaceError) as error:
                call("drafter", "broken")
            assert "'broken' of the package breaker 1.2" in str(error.value)
            assert "RuntimeError: it was written on a Friday" in str(error.value)
        with pytest.raises(OutpaceError, match="it is no class and no MethodEntry"):
            registry.load("drafter", "thing")
        listed = {row.name: row for row in registry.entries("drafter")}
        assert "breaker 1.2 cannot be loaded" in listed["broken"].summary
        with pytest.raises(UnknownNameError, match="did you mean broken"):
            registry.entry("drafter", "brokn")
    finally:
        monkeypatch.undo()
        registry._table.cache_clear()


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
