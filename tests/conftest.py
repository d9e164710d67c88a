"""What all tests share: no network, no user folders, one embedded model per session."""

import os
import tempfile

# Before torch is imported, here and in child processes: two threads that wait for each other on a
# machine where something else runs take minutes for what one does in a second (LOG.md).
os.environ["OMP_NUM_THREADS"] = "1"

# Before anything imports the hub's client: a test that reaches for the network fails at once.
os.environ["HF_HUB_OFFLINE"] = "1"
_FOLDERS = tempfile.TemporaryDirectory(prefix="outpace-tests-")
os.environ["OUTPACE_CACHE"] = os.path.join(_FOLDERS.name, "cache")
os.environ["OUTPACE_DATA"] = os.path.join(_FOLDERS.name, "data")
