"""What all tests share: no network, no user folders, one embedded model per session."""

import os
import tempfile

# Before anything imports the hub's client: a test that reaches for the network fails at once.
os.environ["HF_HUB_OFFLINE"] = "1"
_FOLDERS = tempfile.TemporaryDirectory(prefix="outpace-tests-")
os.environ["OUTPACE_CACHE"] = os.path.join(_FOLDERS.name, "cache")
os.environ["OUTPACE_DATA"] = os.path.join(_FOLDERS.name, "data")
