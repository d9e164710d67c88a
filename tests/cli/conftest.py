import io
from dataclasses import dataclass

import pytest
import torch

from outpace.cli.main import main


@dataclass
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small gain nothing from a second thread and wait for it when others run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def outpace(capsys, monkeypatch):
    """Runs a command line in this process; nothing is a terminal."""

    def run(*arguments, stdin=b""):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capsys.readouterr()
        code = main(arguments)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run
