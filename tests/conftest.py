"""What all tests share: no network, no user folders, what is dear and always the same made once."""

import os
import signal
import tempfile

import pytest

# Before torch is imported, here and in child processes: two threads that wait for each other on a
# machine where something else runs take minutes for what one does in a second (LOG.md).
os.environ["OMP_NUM_THREADS"] = "1"

# Before anything imports the hub's client: a test that reaches for the network fails at once.
os.environ["HF_HUB_OFFLINE"] = "1"
_FOLDERS = tempfile.TemporaryDirectory(prefix="outpace-tests-")
os.environ["OUTPACE_CACHE"] = os.path.join(_FOLDERS.name, "cache")
os.environ["OUTPACE_DATA"] = os.path.join(_FOLDERS.name, "data")


LONGEST = (
    "tests/conformance/test_drafters.py",
    "tests/test_mutations.py",
    "tests/laws/test_laws.py",
    "tests/test_without_methods.py",
)
"""Files whose tests take minutes: begun first, so that no worker waits for another at the end."""
ENUMERATED = (
    "tests/laws/test_laws.py",
    "tests/cli/test_check.py",
    "tests/test_docs.py",
    "tests/verifiers/test_verifiers.py",
)
"""Files that need the enumeration, which one worker makes for all of them."""


def pytest_collection_modifyitems(items):
    """Longest files first; who needs the enumeration is listed above."""
    for item in items:
        shared = {"laws", "oracles"} & set(getattr(item, "fixturenames", ()))
        assert not shared or item.location[0] in ENUMERATED, f"name {item.location[0]} in ENUMERATED"
    order = {file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.location[0], len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give every file to one worker, and the enumeration's files to the same."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "enumerated" if file in ENUMERATED else file

    return Files(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture
def set_threads():
    """Sets how many threads compute; afterwards as many as before do."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def laws():
    """What enumeration says of all verifiers."""
    from outpace.analysis.law import check_laws

    return check_laws()


@pytest.fixture(scope="session")
def oracles():
    """What their oracles say of all verifiers."""
    from outpace.analysis.agreement import check_oracle

    return check_oracle()


@pytest.fixture
def enumerated_once(laws, oracles, monkeypatch):
    """`check` has levels 1 and 2, which know neither model nor chance, from those who test them."""
    from outpace.analysis import check

    monkeypatch.setattr(check, "check_laws", lambda: laws)
    monkeypatch.setattr(check, "check_oracle", lambda: oracles)


@pytest.fixture
def signals():
    """Handled as Python does, whoever started the tests."""
    usual = ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL))
    before = [(number, signal.signal(number, handler)) for number, handler in usual]
    yield
    for number, handler in before:
        signal.signal(number, handler)
