"""Ctrl-C while a command starts: at once, exit code 130, no traceback; and nothing of it in a library."""

import signal
import subprocess
import sys

import pytest

ASKED = ("generate", "--model", "tiny", "--max-new-tokens", "2", "hi")


@pytest.mark.parametrize("module", ["typer", "numpy", "torch.torch_version"])
def test_ctrl_c_in_an_import_ends_the_process(module):
    """Python tells of every import that has ended, so the signal comes in one of those that follow."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "outpace", *ASKED],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs the tests in the background may have left the signal ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        for line in process.stderr:
            if line.rpartition("|")[2].strip() == module:
                process.send_signal(signal.SIGINT)
                break
        err = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err


RUNS = """
import os, signal, sys
{before}
from outpace.cli import interrupts
{then}
"""
IMPORTING = """
open("stops.py", "w").write("import os, signal\\ntry:\\n    os.kill(os.getpid(), signal.SIGINT)\\nfinally:\\n    print(1)")
sys.path.insert(0, "")
"""  # noqa: E501
KILL = "\nos.kill(os.getpid(), signal.SIGINT)"


@pytest.mark.parametrize(
    ("before", "then", "code", "out", "err"),
    [
        ("", "interrupts.leave_at_once()" + KILL, 130, "", ""),
        ("", "interrupts.leave_at_once(); interrupts.leave_imports()" + KILL, 1, "", "KeyboardInterrupt"),
        (IMPORTING, "interrupts.leave_at_once(); interrupts.leave_imports(); import stops", 130, "", ""),
        (IMPORTING, "interrupts.leave_imports(); import stops", 1, "1", "KeyboardInterrupt"),
        ("", "interrupts.leave_at_once(); interrupts.done()" + KILL, 1, "", "KeyboardInterrupt"),
        ("", KILL, 1, "", "KeyboardInterrupt"),
        ("sys.argv[0] = '/bin/outpace'", KILL, 130, "", ""),
        (
            "signal.signal(signal.SIGINT, signal.SIG_IGN)",
            f"interrupts.leave_at_once(){KILL}; print(2)",
            0,
            "2",
            "",
        ),
    ],
)
def test_who_handles_ctrl_c(tmp_path, before, then, code, out, err):
    ran = subprocess.run(
        [sys.executable, "-c", RUNS.format(before=before, then=then)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    # A process that ends by KeyboardInterrupt ends by the signal, as shells want it.
    assert ran.returncode == (-signal.SIGINT if code == 1 else code)
    assert ran.stdout.strip() == out
    assert ran.stderr.strip().endswith(err) and (err or not ran.stderr)


def test_a_library_leaves_ctrl_c_alone(outpace):
    before = signal.getsignal(signal.SIGINT)
    assert outpace(*ASKED).code == 0
    assert signal.getsignal(signal.SIGINT) is before
