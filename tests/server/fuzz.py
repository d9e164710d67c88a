"""Requests made from `/openapi.json`, against a real server: schemathesis finds nothing.

python -m tests.server.fuzz --examples 30 --seed 7        the embedded model; exit 1 if it found something
"""

import argparse
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile

import schemathesis
from schemathesis import GenerationMode

from tests.support import until

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "described_bodies_are_answered",
)
BEYOND = (
    "more than fit",
    "pages of memory",
    "give one of them",
    "min_tokens must be at most",
    "answers are asked for",
    "two functions of one name",
    "tool_choice names",
    "cannot be used",
    "form cannot be followed",
    "strict",
    "tools and ",
    "answers are not continued",
    "messages is empty",
    "messages has no text",
    "input is empty",
    "the prompt is empty",
    "no token may be generated",
    "no distribution",
    "cannot be reproducible",
)
"""What JSON Schema cannot say: in the refusals of bodies that the description allows."""


@schemathesis.check
def described_bodies_are_answered(context, response, case) -> None:
    """Their own check, which knows no reasons: it would also count what no schema can say."""
    described = case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE
    if described and response.status_code == 400:
        message = response.json()["error"]["message"]
        assert any(part in message for part in BEYOND), f"refused, though described: {message}"


@contextlib.contextmanager
def served(*arguments: str) -> Iterator[str]:
    """The address of `outpace serve` on a port of its own."""
    command = [sys.executable, "-m", "outpace", "serve", "--port", "0", *arguments]
    with NamedTemporaryFile("w") as log, subprocess.Popen(command, stderr=log) as process:

        def said() -> str:
            return Path(log.name).read_text()

        try:
            until(lambda: process.poll() is not None or "running on" in said(), seconds=120)
            found = re.search(r"running on (http://127\.0\.0\.1:\d+)", said())
            if found is None:
                raise SystemExit(f"the server did not start: {said()[-500:]}")
            yield found[1]
        finally:
            process.terminate()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=30, help="bodies per operation and kind")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--model", default="smollm2-135m")
    asked = parser.parse_args()
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        f"--config-file={Path(__file__).with_name('schemathesis.toml')}",
        "run",
        f"--max-examples={asked.examples}",
        f"--seed={asked.seed}",
        f"--checks={','.join(CHECKS)}",
        "--request-timeout=60",
        "--continue-on-failure",
        "--no-color",
    ]
    with served("--model", asked.model, "--max-new-tokens", "8") as url:
        environment = {**os.environ, "SCHEMATHESIS_HOOKS": __spec__.name}
        return subprocess.run([*command, f"{url}/openapi.json"], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
