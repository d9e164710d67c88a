"""``outpace serve``: the model behind HTTP, for clients of the OpenAI API and for a browser."""

from __future__ import annotations

import importlib.util
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from outpace import registry
from outpace.cli import show
from outpace.cli.drafting import known
from outpace.cli.keys import read_keys
from outpace.cli.options import AutoOptions, marks_of, notes, option
from outpace.config import MethodSpec, build
from outpace.errors import ModelError, RequestError
from outpace.files import expanded
from outpace.params import SamplingParams
from outpace.server.ports import check_port
from outpace.serving.keyed import check_stores

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.serving.learning import Learner
    from outpace.serving.service import Service

_server = partial(option, panel="Server")
_limits = partial(option, panel="Limits")
_learn = partial(option, panel="Learning")
_PER_TOKEN = 16
"""Bytes of a body per token: some 5 of text, three times as many where JSON escapes them."""

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/?#@:\[\]A-Z]+)(:[0-9]{1,5})?")

EXAMPLES = """
Examples:

  outpace serve

  outpace serve -m ./my-model --drafter auto --drafter prompt_lookup

  outpace serve --host 0.0.0.0 --api-key-file keys.txt --port 9000

Then open http://127.0.0.1:8000 in a browser, or point a client at http://127.0.0.1:8000/v1
"""


def serve(
    *,
    model: AutoOptions,
    drafter: list[str] | None = option(
        None,
        "Drafters that requests may name; the first serves those that name none. "
        "Repeatable. none and reference are always there.",
        "-d",
        metavar="SPEC",
        panel="Model",
        shown="auto",
    ),
    allow_lossy: bool = option(
        False,
        "Allow verifiers and drafters that change the distribution of the text; every answer says so.",
        panel="Model",
    ),
    name: str | None = _server(None, "What clients call the model.", metavar="NAME", shown="the model's"),
    host: str = _server(
        "127.0.0.1", "Where to listen; 0.0.0.0: reachable from other machines.", metavar="HOST"
    ),
    port: int = _server(8000, "Likewise; 0: a free one.", "-p"),
    api_key: list[str] | None = _server(
        None,
        "Ask for this bearer key. Repeatable. Other users of the machine can see it in "
        "the list of processes.",
        metavar="KEY",
    ),
    api_key_file: Path | None = _server(None, "Keys, one per line.", metavar="FILE"),
    allowed_host: list[str] | None = _server(
        None,
        "A further name that clients may call the server by, such as that of a proxy. Repeatable.",
        metavar="NAME",
    ),
    allowed_origin: list[str] | None = _server(
        None,
        "A site, such as https://example.org, whose pages may call the API (CORS). Repeatable.",
        metavar="ORIGIN",
    ),
    thinking_mark: list[str] | None = _server(
        None,
        "What begins and what ends thinking in answers; a third one is written before the end where a budget "
        "ends. Repeatable.",
        metavar="TEXT",
        shown="the model's own",
    ),
    max_batch: int = _limits(32, "Answers at a time.", least=1),
    max_queue: int = _limits(
        256, "Answers that may wait; what comes then is told to try again later.", least=1
    ),
    pages: int | None = _limits(
        None,
        "Most pages of 64 tokens of keys and values. Where they do not suffice, "
        "answers wait for memory or lend it to others.",
        shown="40 % of the free memory",
        least=2,
    ),
    stored_pages: int | None = _limits(
        None, "Most pages kept for prompts that begin alike; 0: none.", shown="512 MB"
    ),
    max_prompt_tokens: int | None = _limits(None, "Longest prompt.", shown="the context", least=1),
    max_new_tokens: int | None = _limits(
        None, "Most tokens per answer that may be asked for.", shown="the context", least=1
    ),
    max_answers: int = _limits(32, "Answers per request: prompts times n.", least=1),
    max_body_kb: int | None = _limits(
        None, "Longest body, KiB.", shown="1024; more for contexts above 64 Ki tokens", least=1
    ),
    max_connections: int = _limits(512, "Connections at a time.", least=1),
    max_per_key: int | None = _limits(None, "Most answers under way for one key.", shown="no bound", least=1),
    timeout: int = _limits(600, "Longest request, seconds.", metavar="S", least=1),
    learn: bool = _learn(
        False,
        "Train drafters that can learn, such as draft_model, on requests and answers while serving. "
        "Texts stay in memory, weights are kept on the disk.",
    ),
    learn_topics: int = _learn(1, "Most topics per key that get a drafter of their own.", least=1),
    learn_share: float = _learn(
        0.02,
        "Share of the time of passes that learning may take besides idle time; 0: idle time alone.",
        metavar="X",
    ),
    learn_folder: str | None = _learn(
        None, "Where versions of drafters are kept.", metavar="DIR", shown="in the user's data folder"
    ),
    share_across_keys: bool = _server(False, "Use what was read or learned for one key for all of them."),
    grace: int = _limits(
        30, "How long answers under way may take after Ctrl-C or SIGTERM, seconds.", metavar="S", least=1
    ),
) -> None:
    """Serve the OpenAI API and a page to chat on. Ctrl-C stops it when answers have ended."""
    if stored_pages is not None and stored_pages < 0:
        raise RequestError(f"--stored-pages must be at least 0, got {stored_pages}")
    if not 0 <= learn_share < 1:
        raise RequestError(f"--learn-share must be in [0, 1), got {learn_share:g}")
    if not 0 <= port < 1 << 16:
        raise RequestError(f"--port must be in 0 to 65535, got {port}")
    SamplingParams(thinking_marks=marks_of(thinking_mark))  # refuses what are no marks
    check_origins(allowed_origin or [])
    keys = read_keys(api_key or [], api_key_file)
    for spec in drafter or []:
        known(spec)
    specs = with_reference(drafter or ["auto"])
    if keys and not share_across_keys:
        check_stores(specs)
    for module in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(module) is None:
            raise ModelError(f"serving needs the package {module}; install it: pip install 'outpace[server]'")
    check_port(host, port)
    engine = model.load(drafter="none", allow_lossy=allow_lossy)
    engine.remember()
    for line in notes(engine, SamplingParams()):
        show.note(f"outpace: {line}")
    with show.busy("loading drafters"):
        from outpace.server.limits import Limits
        from outpace.server.run import is_loopback
        from outpace.server.run import serve as run
        from outpace.serving.service import Service

        limits = Limits(
            body_bytes=body_bytes(engine, max_body_kb),
            prompt_tokens=max_prompt_tokens,
            new_tokens=max_new_tokens,
            answers=max_answers,
            request_seconds=float(timeout),
            per_key=max_per_key,
            connections=max_connections,
            grace_seconds=float(grace),
        )
        learner = learner_for(engine, specs, learn_topics, learn_folder) if learn else None
        service = Service(
            engine,
            drafters=specs,
            max_batch=max_batch,
            max_queue=max_queue,
            pages=pages,
            stored_pages=stored_pages,
            learner=learner,
            learn_share=learn_share,
            share_across_keys=share_across_keys,
        )
    note_limits(service, learner)
    if not keys and not is_loopback(host):
        show.note(
            f"outpace: anyone who reaches {host} port {port} can use this server; "
            "--api-key-file asks for keys"
        )
    show.note(f"outpace: serving {name or engine.target.name} with {', '.join(service.drafters)}")
    run(
        service,
        name=name or engine.target.name,
        host=host,
        port=port,
        keys=keys,
        allowed_hosts=allowed_host or [],
        origins=allowed_origin or [],
        limits=limits,
        thinking_marks=thinking_mark or [],
    )


def note_limits(service: Service, learner: Learner | None) -> None:
    """Say what memory does not hold, and what learns."""
    longest, most = service.longest, service.engine.target.max_positions
    if longest < most:
        show.note(
            f"outpace: memory for keys and values holds texts of at most {longest} "
            f"tokens, of a context of {most}; --pages may give more"
        )
    if learner is not None:
        show.note(f"outpace: {learner.spec} learns from this traffic; versions in {learner.folder}")


def check_origins(origins: list[str]) -> None:
    """Raise RequestError for what no browser ever sends as the origin of a page."""
    for one in origins:
        if not _ORIGIN.fullmatch(one):
            raise RequestError(
                f"--allowed-origin {one!r:.80} is no origin; give scheme://host or scheme://host:port in "
                "small letters, without a path, such as https://example.org"
            )


def body_bytes(engine: Engine, kb: int | None) -> int:
    """The longest body: as the user says, or one that can fill the context."""
    return max(1 << 20, _PER_TOKEN * engine.target.max_positions) if kb is None else kb << 10


def learner_for(engine: Engine, specs: list[str], topics: int, folder: str | None) -> Learner:
    """What learns, of these drafters.

    Raises:
        OutpaceError: none of them does, or its files are damaged or in use.
    """
    from outpace.serving.learning import learning_spec

    spec = learning_spec({one: engine.method(one) for one in specs})
    where = None if folder is None else expanded(folder)
    method = MethodSpec.parse(spec).name
    kind = registry.load("learner", method)
    given = {} if topics == 1 else {"topics": str(topics)}
    learner: Learner = kind.open(engine.target, spec, build(kind.Config, given, f"learner {method!r}"), where)
    return learner


def with_reference(specs: list[str]) -> list[str]:
    """The drafters to start: those that were named, and one for predictions."""
    names = {MethodSpec.parse(spec).name for spec in specs}
    able = [entry.name for entry in registry.able("drafter", registry.READS_REFERENCE)]
    return specs if names & set(able) else [*specs, *able[:1]]
