"""``outpace serve``: the model behind HTTP, for clients of the OpenAI API and for a browser."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outpace import registry
from outpace.cli import show
from outpace.cli.keys import read_keys
from outpace.cli.options import ModelOptions, at_least_one, notes, option, spread
from outpace.config import MethodSpec, build
from outpace.errors import ModelError, RequestError
from outpace.params import SamplingParams
from outpace.serving.keyed import check_stores

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.serving.learning import Learner

_SERVER = "Server"
_LIMITS = "Limits"
_LEARN = "Learning"
_PER_TOKEN = 16
"""Bytes of a body per token: some 5 of text, three times as many where JSON escapes them."""

_EXAMPLES = r"""
Examples:

  outpace serve

  outpace serve -m ./my-model --drafter auto --drafter prompt_lookup

  outpace serve --host 0.0.0.0 --api-key-file keys.txt --port 9000

Then open http://127.0.0.1:8000 in a browser, or point a client at http://127.0.0.1:8000/v1
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EXAMPLES.strip())(spread(serve))


def serve(
    *,
    model: ModelOptions,
    drafter: Annotated[
        list[str] | None,
        option(
            "--drafter",
            "-d",
            panel="Model",
            metavar="SPEC",
            show_default="auto",
            help="Drafters that requests may name; the first serves those that name none. "
            "Repeatable. none and reference are always there.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        option(
            "--name",
            panel=_SERVER,
            metavar="NAME",
            show_default="the model's",
            help="What clients call the model.",
        ),
    ] = None,
    host: Annotated[
        str,
        option(
            "--host",
            panel=_SERVER,
            metavar="HOST",
            help="Where to listen; 0.0.0.0: reachable from other machines.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, option("--port", "-p", panel=_SERVER, metavar="N", help="Likewise; 0: a free one.")
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        option(
            "--api-key",
            panel=_SERVER,
            metavar="KEY",
            help="Ask for this bearer key. Repeatable. Other users of the machine can see it in "
            "the list of processes.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, option("--api-key-file", panel=_SERVER, metavar="FILE", help="Keys, one per line.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        option(
            "--allowed-host",
            panel=_SERVER,
            metavar="NAME",
            help="A further name that clients may call the server by, such as that of a proxy. Repeatable.",
        ),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        option(
            "--allowed-origin",
            panel=_SERVER,
            metavar="ORIGIN",
            help="A site, such as https://example.org, whose pages may call the API (CORS). Repeatable.",
        ),
    ] = None,
    max_batch: Annotated[
        int, option("--max-batch", panel=_LIMITS, metavar="N", help="Answers at a time.")
    ] = 32,
    max_queue: Annotated[
        int,
        option(
            "--max-queue",
            panel=_LIMITS,
            metavar="N",
            help="Answers that may wait; what comes then is told to try again later.",
        ),
    ] = 256,
    pages: Annotated[
        int | None,
        option(
            "--pages",
            panel=_LIMITS,
            metavar="N",
            show_default="40 % of the free memory",
            help="Most pages of 64 tokens of keys and values. Where they do not suffice, "
            "answers wait for memory or lend it to others.",
        ),
    ] = None,
    stored_pages: Annotated[
        int | None,
        option(
            "--stored-pages",
            panel=_LIMITS,
            metavar="N",
            show_default="512 MB",
            help="Most pages kept for prompts that begin alike; 0: none.",
        ),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None,
        option(
            "--max-prompt-tokens",
            panel=_LIMITS,
            metavar="N",
            show_default="the context",
            help="Longest prompt.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        option(
            "--max-new-tokens",
            panel=_LIMITS,
            metavar="N",
            show_default="the context",
            help="Most tokens per answer that may be asked for.",
        ),
    ] = None,
    max_answers: Annotated[
        int, option("--max-answers", panel=_LIMITS, metavar="N", help="Answers per request: prompts times n.")
    ] = 32,
    max_body_kb: Annotated[
        int | None,
        option(
            "--max-body-kb",
            panel=_LIMITS,
            metavar="N",
            show_default="1024; more for contexts above 64 Ki tokens",
            help="Longest body, KiB.",
        ),
    ] = None,
    max_connections: Annotated[
        int, option("--max-connections", panel=_LIMITS, metavar="N", help="Connections at a time.")
    ] = 512,
    max_per_key: Annotated[
        int | None,
        option(
            "--max-per-key",
            panel=_LIMITS,
            metavar="N",
            show_default="no bound",
            help="Most answers under way for one key.",
        ),
    ] = None,
    timeout: Annotated[
        int, option("--timeout", panel=_LIMITS, metavar="S", help="Longest request, seconds.")
    ] = 600,
    learn: Annotated[
        bool,
        option(
            "--learn",
            panel=_LEARN,
            help="Train drafters that can learn, such as draft_model, on requests and answers while serving. "
            "Texts stay in memory, weights are kept on the disk.",
        ),
    ] = False,
    learn_topics: Annotated[
        int,
        option(
            "--learn-topics",
            panel=_LEARN,
            metavar="N",
            help="Most topics per key that get a drafter of their own.",
        ),
    ] = 1,
    learn_share: Annotated[
        float,
        option(
            "--learn-share",
            panel=_LEARN,
            metavar="X",
            help="Share of the time of passes that learning may take besides idle time; 0: idle time alone.",
        ),
    ] = 0.02,
    learn_folder: Annotated[
        str | None,
        option(
            "--learn-folder",
            panel=_LEARN,
            metavar="DIR",
            show_default="in the user's data folder",
            help="Where versions of drafters are kept.",
        ),
    ] = None,
    share_across_keys: Annotated[
        bool,
        option(
            "--share-across-keys",
            panel=_SERVER,
            help="Use what was read or learned for one key for all of them.",
        ),
    ] = False,
    grace: Annotated[
        int,
        option(
            "--grace",
            panel=_LIMITS,
            metavar="S",
            help="How long answers under way may take after Ctrl-C or SIGTERM, seconds.",
        ),
    ] = 30,
) -> None:
    """Serve the OpenAI API and a page to chat on. Ctrl-C stops it when answers have ended."""
    for option_name, value in (
        ("--max-batch", max_batch),
        ("--max-queue", max_queue),
        ("--max-answers", max_answers),
        ("--max-prompt-tokens", max_prompt_tokens),
        ("--max-new-tokens", max_new_tokens),
        ("--max-body-kb", max_body_kb),
        ("--max-connections", max_connections),
        ("--max-per-key", max_per_key),
        ("--timeout", timeout),
        ("--grace", grace),
        ("--pages", pages),
        ("--learn-topics", learn_topics),
    ):
        at_least_one(option_name, value)
    if stored_pages is not None and stored_pages < 0:
        raise RequestError(f"--stored-pages must be at least 0, got {stored_pages}")
    if not 0 <= learn_share < 1:
        raise RequestError(f"--learn-share must be in [0, 1), got {learn_share:g}")
    if not 0 <= port < 1 << 16:
        raise RequestError(f"--port must be in 0 to 65535, got {port}")
    keys = read_keys(api_key or [], api_key_file)
    specs = with_reference(drafter or ["auto"])
    if keys and not share_across_keys:
        check_stores(specs)
    for module in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(module) is None:
            raise ModelError(f"serving needs the package {module}; install it: pip install 'outpace[server]'")
    engine = model.load(drafter="none")
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
    if service.longest < engine.target.max_positions:
        show.note(
            f"outpace: memory for keys and values holds texts of at most {service.longest} "
            f"tokens, of a context of {engine.target.max_positions}; --pages may give more"
        )
    if learner is not None:
        show.note(f"outpace: {learner.spec} learns from this traffic; versions in {learner.folder}")
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
    where = None if folder is None else Path(folder).expanduser()
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
