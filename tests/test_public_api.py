"""The public surface is one sorted list. A new name is added here on purpose, or not at all."""

import inspect
import subprocess
import sys

import pytest

import outpace

PUBLIC = [
    "Chunk",
    "Conversation",
    "Counters",
    "Engine",
    "ModelError",
    "OutpaceError",
    "RequestError",
    "Result",
    "SamplingParams",
    "SpecError",
    "UnknownNameError",
    "__version__",
]


def test_the_list_is_as_agreed_and_sorted():
    assert outpace.__all__ == PUBLIC == sorted(PUBLIC)
    assert set(outpace._HOME) | {"__version__"} == set(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC[:-1])
def test_every_name_is_documented_with_its_public_methods(name):
    thing = getattr(outpace, name)
    assert thing.__module__ == outpace._HOME[name]
    assert inspect.getdoc(thing)
    for member, value in vars(thing).items():
        documentable = inspect.isfunction(value) or isinstance(value, (property, classmethod))
        if documentable and not member.startswith("_"):
            assert inspect.getdoc(value), f"{name}.{member} has no docstring"


def test_the_public_names_are_shown():
    assert set(PUBLIC) <= set(dir(outpace))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Enginee'"):
        _ = outpace.Enginee


def test_importing_outpace_and_its_registry_imports_no_torch():
    code = (
        "import sys, outpace, outpace.registry, outpace.config\n"
        "print(outpace.registry.entry('drafter', 'prompt_lookup').summary, outpace.OutpaceError)\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
