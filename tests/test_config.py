import dataclasses

import pytest

from outpace import registry
from outpace.config import PLAN_KEYS, MethodSpec, build, needs_settings, split_specs
from outpace.drafters.lookup.prompt_lookup import PromptLookupConfig
from outpace.errors import OutpaceError, SpecError, UnknownNameError


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
        registry.row("drafter", "prompt_lokup")
    for row in registry.rows():
        cls = registry.load(row.kind, row.name)
        fields = {field.name for field in dataclasses.fields(cls.Config)}
        assert not fields & set(PLAN_KEYS), f"{row.name}: these keys belong to every method"
        assert row.summary and "\n" not in row.summary
        assert cls.__doc__
        if row.kind == "verifier":
            assert cls.name == row.name and cls.lossless == row.lossless


def test_a_plugin_adds_a_row_and_cannot_take_a_name(monkeypatch):
    class Point:
        name = "mine"

        def load(self):
            return PromptLookupConfig

    def plug(point):
        monkeypatch.setattr(
            registry, "entry_points",
            lambda group: [point] if group == "outpace.drafters" else [],
        )
        registry._table.cache_clear()

    try:
        plug(Point())
        assert registry.load("drafter", "mine") is PromptLookupConfig
        assert registry.row("drafter", "mine").summary == "Settings of the drafter."
        Point.name = "none"
        plug(Point())
        with pytest.raises(OutpaceError, match="two drafters are called 'none'"):
            registry.rows()
    finally:
        monkeypatch.undo()
        registry._table.cache_clear()


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
