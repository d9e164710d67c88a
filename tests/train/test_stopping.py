import signal

import pytest

from outpace.train.stopping import asked, told


@pytest.fixture(autouse=True)
def usual():
    """Signals as they are in a process that nobody changed."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    signal.signal(signal.SIGTERM, before)


def test_the_number_stays_whoever_raises_anew():
    lines = []
    with pytest.raises(KeyboardInterrupt) as stop, told(lines.append, lambda: "kept"):
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None
    assert stop.value.args == (signal.SIGTERM,) and lines == ["kept"]


def test_within_it_a_loop_is_asked_and_ends_its_step():
    lines, steps = [], []
    with pytest.raises(KeyboardInterrupt) as stop, told(lines.append, lambda: "kept"), asked(lines.append):
        signal.raise_signal(signal.SIGTERM)
        steps.append(1)
    assert stop.value.args == (signal.SIGTERM,) and steps == [1]
    assert lines == ["stopping after this step, with a checkpoint; Ctrl-C ends at once", "kept"]


def test_who_ignores_sigterm_goes_on_so():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with told(pytest.fail, lambda: "kept"):
        signal.raise_signal(signal.SIGTERM)
    assert signal.signal(signal.SIGTERM, signal.SIG_DFL) == signal.SIG_IGN
