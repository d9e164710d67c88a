"""What tests of several folders share."""

import time


def until(true, seconds=20.0):
    """Wait for something that happens on another thread or in another process, and not for ever."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"it did not happen within {seconds:g} seconds"
        time.sleep(0.002)
